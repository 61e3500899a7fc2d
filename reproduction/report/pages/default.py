"""Build the page on settings: what goes beyond the paper, what was dropped, and choosing without labels.

Of each adapter the best setting by test labels is shown among those not trained on scored rows: that favours the adapter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, read_scores, select
from reproduction.report.figures import COLOURS, INK, WIDTH, drawing, one_panel, shown
from reproduction.report.html import PageOutput, compact, note, table
from reproduction.report.paper import IMAGES, REAL
from reproduction.report.statistics import Estimate, estimate, noise
from reproduction.report.tables import MERGERS, NAMES

MODELS = {
    (REAL, "8"): "MiniLM, 8 text tasks", (IMAGES, "8"): "Smaller CLIP, 8 image tasks",
    ("clip_l14", "8"): "Larger CLIP, 8 image tasks", (IMAGES, "14"): "Smaller CLIP, 14 image tasks",
    (IMAGES, "20"): "Smaller CLIP, 20 image tasks", ("flan_t5_base", "glue"): "Smaller T5, 8 text tasks",
    ("llama_3b", "mergebench"): "Smaller Llama, 6 tests",
}  # fmt: skip
ADAPTERS = ("surgery", "prob_surgery")
PRESET = "the preset best"
OWN = {"paper": "FeatCal, printed settings", "suite": "FeatCal, tuned settings"}
SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α"}
# rows of ideas that the library no longer has, and of the settings that each was added to
DROPPED = Path(__file__).parents[1] / "dropped.csv"
IDEAS = ("held-out α", "no harm", "two sweeps", "attention", "Ledoit–Wolf λ")


@dataclass(frozen=True)
class Study:
    """What one model was run with beyond the paper's method."""

    ours: Evidence
    chosen: str
    seed: str
    samples: int
    chosen_on: tuple[str, ...]
    few: tuple[int, ...]
    variants: tuple[str, ...]

    def score(
        self, merger: str, variant: str, samples: int = 0, one_draw: bool = False
    ) -> Estimate | None:
        """Return the average of a variant on test samples, over all draws or the first one."""
        number = 0 if variant == "merged" else samples or self.samples
        wanted: dict[str, Any] = {"upstream": merger, "variant": variant, "samples": number}
        if one_draw and variant != "merged":
            wanted["seed"] = self.seed
        return estimate(select(self.ours.table("beyond"), wanted))

    def adapter(self, merger: str, method: str) -> Estimate | None:
        """Return the best setting of an adapter whose training rows are not scored."""
        scores = select(self.ours.table("scores"), {"upstream": merger, "method": method})
        images = self.ours.role.startswith(
            "clip"
        )  # whose unmarked settings see the scored test images
        apart = [
            setting
            for setting in dict.fromkeys(scores["setting"])
            if (setting.endswith("_train") if images else not setting.endswith("_scored"))
        ]
        found = [estimate(select(scores, {"setting": setting})) for setting in apart]
        return max((one for one in found if one), key=lambda one: one.mean, default=None)


def studies(suite: str) -> dict[str, Study]:
    """Return the studies that were run, by the name of the model."""
    found = {}
    for place, name in MODELS.items():
        ours = Evidence(suite, *place)
        facts = ours.settings("beyond")
        if facts and len(ours.table("beyond")):
            used = facts["study"]
            seed, few, on = str(used["seeds"][0]), tuple(used["few"]), tuple(used["chosen_on"])
            found[name] = Study(
                ours, facts["chosen"], seed, used["samples"], on, few, tuple(facts["validation"])
            )
    return found


def lead(left: Estimate | None, right: Estimate | None) -> str:
    """Return left minus right with two standard errors, or a dash."""
    if left is None or right is None:
        return "–"
    return f"{round(left.mean - right.mean, 1) + 0.0:+.1f} ± {noise(left, right):.1f}"


def _mean(value: Estimate | None) -> str:
    return f"{value.mean:.1f}" if value else "–"


def against(suite: str) -> PageOutput:
    """List, by model and merger, the extended variant that validation chose next to the paper's method and adapters."""
    rows = []
    for name, it in studies(suite).items():
        for merger in dict.fromkeys(it.ours.table("beyond")["upstream"]):
            ours, paper = it.score(merger, it.chosen), it.score(merger, "suite")
            adapters = [it.adapter(merger, method) for method in ADAPTERS]
            preset = it.score(merger, PRESET, one_draw=True)
            answers = (
                paper if paper and paper.mean > 1 else None
            )  # no gain over a model that answers nothing
            cells = [
                _mean(it.score(merger, "merged")),
                _mean(paper),
                _mean(preset),
                _mean(ours),
                lead(ours, answers),
            ]
            cells += [lead(ours, one) for one in adapters]
            rows.append(("", [f"{MERGERS.get(merger, merger)}<small>{name}</small>", *cells]))
    if not rows:
        return PageOutput(note("○ not run: nothing beyond the paper."))
    head = [
        "Model, merged with",
        "Merged",
        "Paper’s method, tuned",
        "Preset best",
        "Chosen variant",
    ]
    head += ["over the paper’s method", *(f"over {NAMES[method]}" for method in ADAPTERS)]
    return PageOutput(
        table(head, rows, "Average score (%) on test samples; ± two standard errors", "fc-long")
    )


def few(suite: str) -> PageOutput:
    """Compare the preset and the paper's method by the number of samples, after one merger."""
    rows = []
    for name, it in studies(suite).items():
        for number in sorted({*it.few, it.samples}):
            ours, paper = (it.score(it.chosen_on[0], v, number, True) for v in (PRESET, "suite"))
            cells = [str(number), _mean(paper), _mean(ours), lead(ours, paper)]
            rows.append(("", [f"{name}<small>{MERGERS[it.chosen_on[0]]}</small>", *cells]))
    head = [
        "Model, merged with",
        "Samples per task",
        "Paper’s method, tuned",
        "Preset best",
        "Difference",
    ]
    caption = "By samples per task, one draw: average score (%)"
    return PageOutput(
        table(head, rows, caption) if rows else note("○ not run: nothing beyond the paper.")
    )


def figure(role: str, pool: str, suite: str) -> PageOutput:
    """Draw the lead of every variant over the paper's method, from every merger it was run from."""
    it = studies(suite).get(MODELS[role, pool])
    if it is None:
        return PageOutput(note(f"○ not run: {MODELS[role, pool]}."))
    with one_panel(0.42 * len(it.variants) + 1.5) as (picture, axes):
        for number, merger in enumerate(it.chosen_on):
            points = []
            for place, variant in enumerate(it.variants):
                ours, paper = (it.score(merger, v, one_draw=True) for v in (variant, "suite"))
                if ours and paper:
                    y = place + 0.18 * (number - (len(it.chosen_on) - 1) / 2)
                    points.append((ours.mean - paper.mean, y, noise(ours, paper)))
            leads, places, errors = zip(*points, strict=True)
            colour = (COLOURS["featcal"], COLOURS["merged"])[number % 2]
            look: dict[str, Any] = {
                "fmt": "os^D"[number % 4],
                "color": colour,
                "lw": 1.2,
                "markersize": 6,
            }
            axes.errorbar(leads, places, xerr=errors, label=MERGERS.get(merger, merger), **look)
        axes.axvline(0, color=INK, lw=1)
        axes.set_yticks(range(len(it.variants)), it.variants)
        axes.invert_yaxis()
        axes.set(xlabel="over the paper’s method (points)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
    return shown(picture, "variants over the paper's method")


def dropped() -> PageOutput:
    """Show the scores of the ideas that were tried and dropped, from the rows kept with the report."""
    frozen = read_scores(DROPPED)
    places = [
        (place, m) for place in MODELS for m in MERGERS if len(_kept(frozen, place, m, "suite"))
    ]
    rows = []
    for variant in dict.fromkeys(frozen["variant"]):
        if variant.endswith(IDEAS):
            without = variant.rpartition(", ")[0] or "suite"
            cells = []
            for place, merger in places:
                ours, before = (
                    estimate(_kept(frozen, place, merger, name)) for name in (variant, without)
                )
                cells.append(f"{ours.mean:.1f}<small>{lead(ours, before)}</small>" if ours else "–")
            rows.append(("", [variant, *cells]))
    head = [
        "Variant",
        *(f"{MODELS[place].split(',')[0]}, {MERGERS[merger]}" for place, merger in places),
    ]
    caption = "Tried and dropped: average score (%), one draw; small: change from the same settings without the idea"
    return PageOutput(table(head, rows, caption, "fc-long"))


def _kept(frozen: Any, place: tuple[str, str], merger: str, variant: str) -> Any:
    wanted = {"role": place[0], "pool": place[1], "upstream": merger, "variant": variant}
    return select(frozen, wanted)


@dataclass(frozen=True)
class Trial:
    """One calibrated candidate of a search without labels."""

    origin: str
    chosen: bool
    settings: str
    divergence: float
    score: Estimate


def trials(ours: Evidence) -> list[Trial]:
    """Return the candidates in order, then the settings that labels chose; empty where not run."""
    found = []
    for _, rows in ours.table("tune").groupby("trial", sort=True):
        first, score = rows.iloc[0], estimate(rows)
        words = ", ".join(
            f"{symbol} {compact(float(first[name]))}" for name, symbol in SYMBOLS.items()
        )
        if score:
            found.append(
                Trial(
                    first["origin"], bool(first["chosen"]), words, float(first["divergence"]), score
                )
            )
    return found


def searches(suite: str) -> PageOutput:
    """Compare what each search without labels chose with the printed settings and with the best by test labels."""
    rows = []
    for place, name in MODELS.items():
        every = trials(Evidence(suite, *place))
        if every:
            tried = [one for one in every if one.origin != "reference"]
            chosen, best = (
                next(t for t in tried if t.chosen),
                max(tried, key=lambda one: one.score.mean),
            )
            labels = next((one for one in every if one.origin == "reference"), None)
            spent = Evidence(suite, *place).record("tune").get("cost", {})
            cells = [_scored(chosen), _scored(tried[0]), lead(chosen.score, tried[0].score)]
            same = chosen is best  # a model against itself has no error
            cells += [
                _scored(best),
                "the same" if same else lead(chosen.score, best.score),
                _scored(labels),
            ]
            cells += [str(len(tried)), f"{sum(spent.values()):.0f}" if spent else "–"]
            rows.append(("", [name, *cells]))
    if not rows:
        return PageOutput(note("○ not run: no search without labels."))
    head = [
        "Model",
        "Chosen without labels",
        "Printed settings",
        "Gain",
        "Best by test labels",
        "Chosen minus best",
    ]
    head += ["Chosen with labels", "Trials", "Seconds"]
    caption = "Average score (%) on test samples, all calibrated on the same samples; ± two standard errors"
    return PageOutput(table(head, rows, caption, "fc-long"))


def _scored(one: Trial | None) -> str:
    return f"{one.score.mean:.1f}<small>{one.settings}</small>" if one else "–"


def panel(suite: str) -> PageOutput:
    """Draw every candidate of two searches: divergence without labels against test score."""
    places = {place: trials(Evidence(suite, *place)) for place in ((REAL, "8"), (IMAGES, "8"))}
    known = {MODELS[place]: every for place, every in places.items() if every}
    return shown(_panel(known) if known else None, "searches without labels")


def _panel(known: dict[str, list[Trial]]) -> Figure:
    with drawing():
        picture = Figure(figsize=(WIDTH, 3.2 * len(known)), layout="constrained")
        spots = picture.subplots(len(known), 1, squeeze=False)[:, 0]
        for axes, (name, every) in zip(spots, known.items(), strict=True):
            for one in every:
                marker = "D" if one.origin == "reference" else "X" if one.chosen else "o"
                colour = {"D": COLOURS["merged"], "X": INK, "o": COLOURS["featcal"]}[marker]
                axes.plot(
                    one.divergence, one.score.mean, marker, color=colour, markersize=8, ls="none"
                )
            axes.set(xscale="log", title=name, ylabel="average score (%)")
            axes.minorticks_off()
        spots[-1].set(xlabel="divergence from the experts (nats), without labels")
        return picture
