"""What the paper leaves open for language models: how far one choice moves the score, and how far
chance does.

Chance is two standard errors of one model's difference to the mean of the default's S draws:
2·√(s²(1 + 1/S) + v), where s is the deviation of those draws and v what other test texts would do
to the difference, which answers text by text tell.
"""

import math
from dataclasses import dataclass
from html import escape
from statistics import fmean, variance
from typing import Any

from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import COLOURS, one_panel
from reproduction.report.html import PageOutput, compact, note, table
from reproduction.report.page import SYMBOLS, drawn, label
from reproduction.report.statistics import difference, estimate

ROLES = {
    "flan_t5_base": ("glue", "FLAN-T5-base on GLUE"),
    "llama_3b": ("mergebench", "Llama-3B on MergeBench"),
}
WORDS = {
    "split": ("the texts are from", {"train": "the training split", "validation": "the validation split"}),
    "decoder": ("the decoder reads", {"answer": "the answer", "start": "its start token alone"}),
    "counted": ("what counts of a text", {"all": "prompt and answer", "prompt": "the prompt", "answer": "the answer"}),
    "tokens": ("longest text", {"None": "what the model takes"}),
    "modules": ("linears solved", {"None": "all"}),
    "samples": ("texts per task", {}),
}  # fmt: skip


@dataclass(frozen=True)
class OptionEffect:
    """One option: its average score, how far that is from the mean of the default's draws, and two
    standard errors of that.
    """

    choice: str
    option: str
    mean: float
    change: float
    noise: float

    @property
    def clear(self) -> bool:
        """Whether the change exceeds the noise."""
        return abs(self.change) > self.noise


def evidence(role: str, suite: str) -> Evidence:
    """The results of one model."""
    return Evidence(suite, role, ROLES[role][0])


def draws(ours: Evidence) -> list[float]:
    """The default's average score at each seed."""
    rows = select(ours.table("choices"), {"default": 1})
    return [float(value) for value in rows.groupby("seed")["value"].mean()]


def moved(ours: Evidence) -> list[OptionEffect]:
    """Every option in the order of the file; empty where the study was not run."""
    own, rows = draws(ours), ours.table("choices")
    if len(own) < 2:
        return []
    middle, default = fmean(own), select(rows, {"default": 1})
    drawn = variance(own) * (1 + 1 / len(own))
    found = []
    for (choice, option), part in select(rows, {"default": 0}).groupby(
        ["choice", "option"], sort=False
    ):
        mean, ends = (
            float(part["value"].mean()),
            [(weight, estimate(rows)) for weight, rows in ((1.0, part), (-1.0, default))],
        )
        texts = difference([(weight, end) for weight, end in ends if end])
        chance = drawn + texts.variance - sum(end.seed_variance for _, end in ends if end)
        found.append(
            OptionEffect(str(choice), str(option), mean, mean - middle, 2 * math.sqrt(chance))
        )
    return found


def values(suite: str) -> PageOutput:
    """A table for each model: the default first, then what stands in its place."""
    return PageOutput("".join(_values(role, suite) for role in ROLES))


def _values(role: str, suite: str) -> str:
    ours = evidence(role, suite)
    found, own, used = moved(ours), draws(ours), _study(ours)
    if not found:
        return note(
            f"○ not run: no such study of {ROLES[role][1]} in the results of the {label(suite)}."
        )
    middle = sum(own) / len(own)
    listed = ", ".join(f"{value:.1f}" for value in own)
    draws_of = f"{middle:.1f}<small>draws {listed}</small>"
    rows = [("fc-merger", ["The default", "–", draws_of, "–", "–", "–"])]
    for one in found:
        what, before, after = _words(one, used)
        verdict = "moves the score" if one.clear else "within noise"
        rows.append(
            (
                "",
                [
                    f"{what}: {after}",
                    before,
                    f"{one.mean:.1f}",
                    f"{one.change:+.1f}",
                    f"± {one.noise:.1f}",
                    verdict,
                ],
            )
        )
    head = [
        "Changed, one at a time",
        "By default",
        "Average score",
        "Difference",
        "Two standard errors",
        "",
    ]
    return table(
        head, rows, f"{ROLES[role][1]}: average score on test texts — {label(suite)}", "fc-words"
    )


def summary(suite: str) -> PageOutput:
    """In words, which choices moved the score on each model and which did not."""
    return PageOutput("".join(_summary(role, suite) for role in ROLES))


def _summary(role: str, suite: str) -> str:
    ours = evidence(role, suite)
    found, used = moved(ours), _study(ours)
    if not found:
        return note(f"○ not run: {ROLES[role][1]}.")
    ordered = sorted(found, key=lambda one: -abs(one.change))
    clear = [f"{_told(one, used)} ({one.change:+.1f})" for one in ordered if one.clear]
    rest = [_told(one, used) for one in ordered if not one.clear]
    told = [
        f"Beyond noise: {'; '.join(clear)}." if clear else "No option moves the score beyond noise."
    ]
    told += [f"Within it: {'; '.join(rest)}."] if rest else []
    return note(f"<strong>{ROLES[role][1]}.</strong> {' '.join(told)}")


def panel(role: str, suite: str) -> PageOutput:
    """Options as dots beside the default's draws, or a note where there are none."""
    return drawn(
        _panel(evidence(role, suite), ROLES[role][1]), "study of unstated choices", label(suite)
    )


def _panel(ours: Evidence, title: str) -> Figure | None:
    """Marks are filled where the bar of two standard errors ends before the default's mean, hollow
    where it reaches it.
    """
    found, own, used = moved(ours), draws(ours), _study(ours)
    if not found:
        return None
    names = ["the default, every draw", *(": ".join(_words(one, used)[::2]) for one in found)]
    middle = sum(own) / len(own)
    with one_panel(0.5 * len(names) + 1.3) as (figure, axes):
        axes.axvline(middle, color=COLOURS["expert"], lw=1.2, zorder=1)
        axes.scatter(own, [0] * len(own), s=60, marker="|", color=COLOURS["expert"], lw=2, zorder=3)
        for place, one in enumerate(found, start=1):
            colour = COLOURS["merged"] if one.clear else COLOURS["featcal"]
            look: dict[str, Any] = {
                "fmt": "o",
                "markersize": 8,
                "color": colour,
                "capsize": 3,
                "lw": 1.6,
                "zorder": 4,
            }
            axes.errorbar(
                one.mean,
                place,
                xerr=one.noise,
                markerfacecolor=colour if one.clear else "white",
                **look,
            )
        merged = select(
            ours.table("scores"), {"method": "merged", "upstream": used.get("upstream", "")}
        )["value"]
        if len(merged):
            axes.axvline(
                float(merged.mean()), color=COLOURS["merged"], ls=(0, (1, 2)), lw=1.6, zorder=1
            )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set(xlabel="average score (%)", title=title)
        axes.grid(axis="y", visible=False)
        return figure


def settings(suite: str) -> PageOutput:
    """λ, ρ, α, the draws and what is read by default, of each model."""
    rows = []
    for role, (_, name) in ROLES.items():
        used = _study(evidence(role, suite))
        if used:
            values = used["featcal"] | used
            reading = ", ".join(
                f"{key} {value}" for key, value in used["reading"].items() if value is not None
            )
            rows.append(
                (
                    "",
                    [
                        name,
                        *(compact(values[key]) for key in SYMBOLS),
                        ", ".join(map(str, used["seeds"])),
                        reading,
                    ],
                )
            )
    head = [
        "Model",
        *(words.replace("images", "texts") for words in SYMBOLS.values()),
        "seeds",
        "reading",
    ]
    return PageOutput(
        table(head, rows, f"The default — {label(suite)}")
        if rows
        else note("○ not run: no settings file yet.")
    )


def _study(ours: Evidence) -> dict[str, Any]:
    """The resolved settings that the study left beside its numbers."""
    return dict(ours.settings("choices").get("study", {}))


def _words(one: OptionEffect, used: dict[str, Any]) -> tuple[str, str, str]:
    """What was changed, from what, to what, as a reader would say it."""
    what, options = WORDS[one.choice]
    values = {"samples": used.get("samples"), "modules": None} | used.get("reading", {})
    before, after = (
        escape(options.get(str(value), str(value)))
        for value in (values.get(one.choice), one.option)
    )
    return what, before, after + (" tokens" if one.choice == "tokens" else "")


def _told(one: OptionEffect, used: dict[str, Any]) -> str:
    what, before, after = _words(one, used)
    return f"{what} {after} instead of {before}"
