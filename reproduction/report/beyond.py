"""Ideas beyond the paper: which was chosen on validation samples, what each gives, and how it
stands against adapters.

Differences of two scores come with two standard errors, paired row by row. Of each adapter the best
setting by test labels is
shown among those whose training rows are not scored: that favours the adapter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from reproduction.report.evidence import Evidence, read_scores, select
from reproduction.report.figures import COLOURS, INK, one_panel
from reproduction.report.html import PageOutput, note, table
from reproduction.report.page import drawn, label
from reproduction.report.statistics import Estimate, estimate, noise
from reproduction.report.tables import MERGERS

MODELS = {
    ("minilm", "8"): "MiniLM, 8 tasks of real texts", ("clip_b32", "8"): "CLIP ViT-B/32, 8 tasks",
    ("flan_t5_base", "glue"): "FLAN-T5-base, 8 tasks of GLUE’s form",
    ("llama_3b", "mergebench"): "Llama-3.2-3B, 6 tests of MergeBench’s form",
}  # fmt: skip
PRESET = "the preset best"
CLOSED_FORM = "wudi_closed_form"
BROKEN = (
    "Its minimum divides by how far the experts moved in each direction, and where they hardly moved it blows up their rounding. "
    "Settings that lean on the merged weights keep that; the preset, which hardly does, does not."
)
ADAPTERS = {"surgery": "Surgery", "prob_surgery": "ProbSurgery"}
OWN = {
    "merged": "merged",
    "paper": "FeatCal, the paper’s λ, ρ, α",
    "suite": "FeatCal, the suite’s λ, ρ, α",
}
# rows of ideas that the library no longer has, and of the settings that each was added to
DROPPED = Path(__file__).with_name("dropped.csv")
IDEAS = ("held-out α", "no harm", "two sweeps", "attention", "Ledoit–Wolf λ")


@dataclass(frozen=True)
class Study:
    """What one study found."""

    ours: Evidence
    rows: pd.DataFrame
    chosen: str
    validation: dict[str, float]
    seeds: tuple[str, ...]
    samples: int
    few: tuple[
        int, ...
    ]  # other numbers of samples, with which the preset and the paper's method were run
    chosen_on: tuple[str, ...]  # mergers from which every variant was run

    @property
    def upstreams(self) -> list[str]:
        return list(dict.fromkeys(self.rows["upstream"]))

    def score(
        self, upstream: str, variant: str, samples: int | None = None, seed: str | None = None
    ) -> Estimate | None:
        """Of a variant on test samples, over all seeds it was run with or one of them; with the
        usual number of samples.
        """
        drawn = 0 if variant == "merged" else samples or self.samples
        wanted = {"upstream": upstream, "variant": variant, "samples": drawn} | (
            {"seed": seed} if seed else {}
        )
        return estimate(select(self.rows, wanted))

    def adapter(self, upstream: str, method: str) -> Estimate | None:
        """The best of an adapter's settings whose training rows are not scored."""
        scores = select(self.ours.table("scores"), {"upstream": upstream, "method": method})
        apart = [s for s in dict.fromkeys(scores["setting"]) if not self.sees_scored_rows(s)]
        found = [estimate(select(scores, {"setting": setting})) for setting in apart]
        return max((one for one in found if one), key=lambda one: one.mean, default=None)

    def sees_scored_rows(self, setting: str) -> bool:
        """Whether an adapter of this setting was trained on rows that are scored: of images unless
        told otherwise.
        """
        return (
            not setting.endswith("_train")
            if self.ours.role.startswith("clip")
            else setting.endswith("_scored")
        )


@cache
def study(role: str, pool: str, suite: str) -> Study | None:
    """The results of one model; None where the study was not run."""
    ours = Evidence(suite, role, pool)
    rows, told = ours.table("beyond"), ours.settings("beyond")
    if rows.empty or not told:
        return None
    used = told["study"]
    seeds = tuple(str(seed) for seed in used["seeds"])
    few, chosen_on = tuple(used["few"]), tuple(used["chosen_on"])
    return Study(
        ours, rows, told["chosen"], told["validation"], seeds, used["samples"], few, chosen_on
    )


def gap(left: Estimate | None, right: Estimate | None) -> str:
    """left − right with two standard errors, or a dash where one is missing."""
    return (
        f"{left.mean - right.mean:+.1f}<small>± {noise(left, right):.1f}</small>"
        if left and right
        else "–"
    )


def mean(value: Estimate | None) -> str:
    """A score, with the spread over seeds where there are several."""
    if value is None:
        return "–"
    return f"{value.mean:.1f}" + (
        f"<small>± {value.spread:.1f}</small>" if value.spread is not None else ""
    )


def summary(suite: str) -> PageOutput:
    """In words, for every model: what was chosen, from how many mergers it beats the paper's method
    and each adapter.
    """
    return PageOutput("".join(_summary(model, suite) for model in MODELS))


def _summary(model: tuple[str, str], suite: str) -> str:
    it = study(*model, suite)
    if it is None:
        return note(f"○ not run: {MODELS[model]}.")
    against = {"the paper’s method": [it.score(u, "suite") for u in it.upstreams]}
    against |= {
        words: [it.adapter(u, method) for u in it.upstreams] for method, words in ADAPTERS.items()
    }
    ours = [it.score(u, it.chosen) for u in it.upstreams]
    parts = []
    for words, theirs in against.items():
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
        ahead = sum(a.mean - b.mean > noise(a, b) for a, b in pairs)
        behind = sum(b.mean - a.mean > noise(a, b) for a, b in pairs)
        parts += (
            [f"{words}: ahead from {ahead} of {len(pairs)} mergers, behind from {behind}"]
            if pairs
            else []
        )
    told = f"Chosen on validation samples: <em>{it.chosen}</em>. Beyond two standard errors against {'; '.join(parts)}."
    return note(f"<strong>{MODELS[model]}.</strong> {told} {_presets(it)}")


def _presets(it: Study) -> str:
    """The preset best against the preset paper, for those who have nothing to choose with, in
    words.
    """
    pairs = {
        u: [it.score(u, variant, seed=it.seeds[0]) for variant in (PRESET, "paper")]
        for u in it.upstreams
    }
    leads = [f"{gap(*pair)} from {MERGERS.get(u, u)}" for u, pair in pairs.items() if all(pair)]
    return (
        f"The preset <em>best</em> against the preset <em>paper</em>, one draw: {'; '.join(leads)}."
        if leads
        else ""
    )


def _each(suite: str, piece: Callable[[Study, str], str]) -> PageOutput:
    """A piece of the page about every model that the study was run with, told its name."""
    found = [piece(it, name) for model, name in MODELS.items() if (it := study(*model, suite))]
    return PageOutput("".join(found) or note("○ not run: no such study in the results."))


def against(suite: str) -> PageOutput:
    """One row for each merger: the chosen variant beside the paper's method and the adapters on
    rows that none of them saw.
    """
    return _each(suite, _against)


def _against(it: Study, name: str) -> str:
    head = [
        "Merger", "Merged", "Paper’s method", "Chosen variant", "Over the paper’s method", *ADAPTERS.values(),
        *(f"Over {words}" for words in ADAPTERS.values()),
    ]  # fmt: skip
    rows = []
    for upstream in it.upstreams:
        ours, paper = it.score(upstream, it.chosen), it.score(upstream, "suite")
        rivals = [it.adapter(upstream, method) for method in ADAPTERS]
        cells = [
            mean(it.score(upstream, "merged")),
            mean(paper),
            mean(ours),
            gap(ours, paper),
            *map(mean, rivals),
        ]
        rows.append(
            ("", [MERGERS.get(upstream, upstream), *cells, *(gap(ours, rival) for rival in rivals)])
        )
    caption = (
        f"{name}: average score on test samples, {it.samples} samples of each task, "
        f"{len(it.seeds)} draw{'s' * (len(it.seeds) > 1)} of them for the chosen variant and the paper’s method"
    )
    merged = it.score(CLOSED_FORM, "merged")
    broken = (
        f"{MERGERS[CLOSED_FORM]} gets nothing right here by itself. {BROKEN}"
        if merged and merged.mean < 1
        else ""
    )
    return table(head, rows, f"{caption} — {label(it.ours.suite)}") + (
        note(broken) if broken else ""
    )


def variants(suite: str) -> PageOutput:
    """Every variant with one draw: test scores from every merger, the mean on validation samples."""
    return _each(suite, _variants)


def _variants(it: Study, name: str) -> str:
    rows = []
    for variant in (*OWN, *it.validation):
        seed = None if variant == "merged" else it.seeds[0]
        scores = [it.score(upstream, variant, seed=seed) for upstream in it.chosen_on]
        judged = f"{it.validation[variant]:.1f}" if variant in it.validation else "–"
        words = OWN.get(variant, variant) + (" ← chosen" if variant == it.chosen else "")
        rows.append(("", [words, *(f"{one.mean:.1f}" if one else "–" for one in scores), judged]))
    mergers = [MERGERS.get(upstream, upstream) for upstream in it.chosen_on]
    head = ["Variant", *mergers, "Mean on validation samples"]
    return table(head, rows, f"{name}: every variant, one draw — {label(it.ours.suite)}")


def changes(it: Study, upstreams: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """By variant, its lead over the paper's method from each merger it was run from, with two
    standard errors, one draw.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for variant in it.validation:
        pairs = [[it.score(u, v, seed=it.seeds[0]) for v in (variant, "suite")] for u in upstreams]
        found[variant] = [
            (ours.mean - paper.mean, noise(ours, paper)) for ours, paper in pairs if ours and paper
        ]
    return found


def figure(role: str, pool: str, suite: str) -> PageOutput:
    """The lead of every variant over the paper's method from every merger, with two standard
    errors.
    """
    it = study(role, pool, suite)
    if it is None:
        return PageOutput(note(f"○ not run: {MODELS[role, pool]}."))
    found = changes(it, it.chosen_on)
    with one_panel(0.42 * len(found) + 1.5) as (picture, axes):
        for number, upstream in enumerate(it.chosen_on):
            places = [
                place + 0.18 * (number - (len(it.chosen_on) - 1) / 2) for place in range(len(found))
            ]
            leads, errors = zip(*(pairs[number] for pairs in found.values()), strict=True)
            look = {
                "fmt": "os^D"[number % 4],
                "color": (COLOURS["featcal"], COLOURS["merged"])[number % 2],
            }
            axes.errorbar(
                leads,
                places,
                xerr=errors,
                label=MERGERS.get(upstream, upstream),
                lw=1.2,
                markersize=6,
                **look,
            )
        axes.axvline(0, color=INK, lw=1)
        axes.set_yticks(range(len(found)), list(found))
        axes.invert_yaxis()
        axes.set(xlabel="over the paper’s method (points)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
    return drawn(picture, "variants over the paper's method", label(suite))


def not_working(suite: str) -> PageOutput:
    """In words, for every model: variants behind the paper's method by more than two standard
    errors, and those of no effect.
    """
    return _each(suite, _not_working)


def _not_working(it: Study, name: str) -> str:
    found = changes(it, it.upstreams)
    behind = [
        f"<em>{v}</em>" for v, pairs in found.items() if any(-lead > sure for lead, sure in pairs)
    ]
    idle = [
        f"<em>{v}</em>"
        for v, pairs in found.items()
        if not any(abs(lead) > sure for lead, sure in pairs)
    ]
    told = f"Behind the paper’s method from some merger: {'; '.join(behind) or 'none'}. "
    told += f"Neither ahead nor behind from any: {'; '.join(idle) or 'none'}."
    return note(f"<strong>{name}.</strong> {told}")


def few(suite: str) -> PageOutput:
    """The preset and the paper's method by the number of samples of each task, from one merger."""
    return _each(suite, _few)


def _few(it: Study, name: str) -> str:
    upstream, rows = it.chosen_on[0], []
    for n in sorted({*it.few, it.samples}):
        ours, paper = (it.score(upstream, variant, n, it.seeds[0]) for variant in (PRESET, "suite"))
        rows.append(("", [str(n), mean(paper), mean(ours), gap(ours, paper)]))
    head = [
        "Samples of each task",
        "Paper’s method, the suite’s λ, ρ, α",
        "The preset best",
        "Difference",
    ]
    caption = f"{name}, from {MERGERS.get(upstream, upstream)}: by samples of each task, one draw — {label(it.ours.suite)}"
    return table(head, rows, caption)


def dropped() -> PageOutput:
    """Show the scores of the ideas that were tried and dropped, from the rows kept with the report."""
    frozen = read_scores(DROPPED)
    columns = [
        (key, upstream)
        for key in MODELS
        for upstream in MERGERS
        if not select(frozen, _cell(key, upstream, "suite")).empty
    ]
    variants = list(dict.fromkeys(frozen["variant"]))
    rows = []
    for idea in IDEAS:
        for variant in (name for name in variants if name.endswith(idea)):
            added_to = variant.rpartition(", ")[0] or "suite"
            cells = []
            for key, upstream in columns:
                ours, without = (
                    estimate(select(frozen, _cell(key, upstream, name)))
                    for name in (variant, added_to)
                )
                cells.append(f"{ours.mean:.1f} ({gap(ours, without)})" if ours else "–")
            rows.append(("", [variant, *cells]))
    head = [
        "Variant",
        *(f"{MODELS[key].split(',')[0]}, {MERGERS[upstream]}" for key, upstream in columns),
    ]
    caption = "Average score on test samples, one draw; in brackets the change from the same settings without the idea"
    return PageOutput(table(head, rows, f"{caption} — {label('mini')}"))


def _cell(key: tuple[str, str], upstream: str, variant: str) -> dict[str, str]:
    role, pool = key
    return {"role": role, "pool": pool, "upstream": upstream, "variant": variant}
