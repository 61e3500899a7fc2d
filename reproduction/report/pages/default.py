"""Build the page on the library's default: against fixed settings, adapters and the earlier search.

The best fixed setting of a merger and number of samples is the one with the highest test average
there, which favours it.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, read_scores, select
from reproduction.report.figures import COLOURS, WIDTH, drawing, shown
from reproduction.report.html import PageOutput, estimated, note, table
from reproduction.report.paper import IMAGES, REAL, VISION, model_title
from reproduction.report.statistics import Estimate, estimate, highest, noise
from reproduction.report.tables import MERGERS, NAMES

SOURCES = (
    (VISION, "8"),
    (REAL, "8"),
    (IMAGES, "8"),
    ("flan_t5_base", "glue"),
    ("llama_3b", "mergebench"),
)
SETTINGS = {
    "paper": "printed settings", "suite": "tuned settings", "large anchor": "λ .01, ρ 8, α .3",
    "best": "former preset best",
}  # fmt: skip
ADAPTERS = ("surgery", "prob_surgery")
SHORT = {VISION: "ViT-S", REAL: "MiniLM", IMAGES: "CLIP", "flan_t5_base": "T5", "llama_3b": "Llama"}
CLOSE = 0.5  # points that the default may be below the best fixed setting
NOT_RUN = "○ not run: no scores of the default."
# rows of ideas that the library no longer has, and of the settings that each was added to
DROPPED = Path(__file__).parents[1] / "dropped.csv"
IDEAS = ("held-out α", "no harm", "two sweeps", "attention", "Ledoit–Wolf λ")


@dataclass(frozen=True)
class Place:
    """One model, merger and number of samples."""

    ours: Evidence
    merger: str
    samples: int

    def score(self, method: str, setting: str = "") -> Estimate | None:
        """Return the average over tasks and draws."""
        wanted = {"upstream": self.merger, "samples": self.samples, "method": method}
        return estimate(select(self.ours.table("default"), wanted | {"setting": setting}))

    @property
    def merged(self) -> Estimate | None:
        return self.score("merged")

    @property
    def auto(self) -> Estimate | None:
        return self.score("featcal", "auto")

    @property
    def fixed(self) -> tuple[str, Estimate | None]:
        """Return the best fixed setting and its average."""
        found = {name: self.score("featcal", name) for name in SETTINGS}
        best = highest(found.values())
        return next((SETTINGS[name] for name, one in found.items() if one is best), ""), best

    @property
    def adapter(self) -> tuple[str, Estimate | None]:
        """Return the better tuned adapter with the trials that were chosen, and its average."""
        found = {name: self.score(name) for name in ADAPTERS}
        best = highest(found.values())
        name = next((name for name, one in found.items() if one is best), "")
        if best is None or best.rows is None:
            return "", best
        return "; ".join([NAMES[name], *dict.fromkeys(best.rows["candidate"])]), best

    @property
    def title(self) -> str:
        return f"{MERGERS.get(self.merger, self.merger)}<small>{model_title(self.ours.role, self.ours.suite)}</small>"


def places(suite: str, most_drawn: bool = False) -> list[Place]:
    """Return what was run; most_drawn: with the number of samples that has most draws."""
    found = []
    for source in SOURCES:
        ours = Evidence(suite, *source)
        rows = ours.table("default")
        for merger in dict.fromkeys(rows["upstream"]):
            own = rows[rows["upstream"] == merger].groupby("samples")["seed"].nunique()
            several = [int(own.idxmax())] if most_drawn else [int(n) for n in own.index]
            found += [Place(ours, merger, n) for n in several]
    return found


def answer(suite: str) -> PageOutput:
    """Compare the default with the merged model, fixed settings and adapters, by merger and model."""
    rows = []
    for one in places(suite, most_drawn=True):
        (fixed, best), (adapter, other) = one.fixed, one.adapter
        cells = [estimated(one.merged), estimated(one.score("featcal", "paper"))]
        cells += [estimated(one.auto), lead(one.auto, one.merged)]
        cells += [f"{estimated(best)}<small>{fixed}</small>", lead(one.auto, best)]
        cells += [f"{estimated(other)}<small>{adapter}</small>", lead(one.auto, other)]
        rows.append(("", [one.title, *cells]))
    head = ["Merged with", "Merged", "Printed settings", "Default", "Default − merged"]
    head += ["Best fixed setting", "Default − it", "Better adapter", "Default − it"]
    caption = (
        "Average score (%), 32 samples per task, mean over draws. Differences: points ± two standard"
        " errors, test samples paired."
    )
    return PageOutput(table(head, rows, caption, "fc-long")) if rows else PageOutput(note(NOT_RUN))


def expected(suite: str) -> PageOutput:
    """Count how often the default does what is expected of it, over mergers and numbers of samples."""
    rows = []
    for source in SOURCES:
        own = [one for one in places(suite) if (one.ours.role, one.ours.pool) == source]
        own = [one for one in own if one.auto]
        if not own:
            continue
        close = [_lead(one.auto, one.fixed[1])[0] >= -CLOSE for one in own]
        harmed = [sum(pair) < 0 for pair in (_lead(one.auto, one.merged) for one in own)]
        above = [_lead(one.auto, one.adapter[1]) for one in own]
        cells = [str(len(own)), str(sum(close)), str(sum(harmed))]
        cells += [str(sum(gap > error for gap, error in above))]
        cells += [str(sum(gap < -error for gap, error in above))]
        rows.append(("", [model_title(source[0], suite), *cells]))
    head = ["Model", "Mergers × samples", "At most half a point below the best fixed setting"]
    head += ["Below the merged model", "Above the better adapter", "Below the better adapter"]
    caption = (
        "Number of mergers and numbers of samples where it is so. Above, below: by more than two"
        " standard errors."
    )
    return PageOutput(table(head, rows, caption)) if rows else PageOutput(note(NOT_RUN))


def lead(left: Estimate | None, right: Estimate | None) -> str:
    """Return left minus right and two standard errors, or a dash."""
    if left is None or right is None:
        return "–"
    gap, error = _lead(left, right)
    return f"{round(gap, 1) + 0.0:+.1f} ± {error:.1f}"


def _lead(left: Estimate | None, right: Estimate | None) -> tuple[float, float]:
    """Return left minus right, and two standard errors."""
    assert left is not None and right is not None  # every draw has all models
    return left.mean - right.mean, noise(left, right)


def chosen(suite: str) -> PageOutput:
    """Draw how often the default chose each candidate, by model and merger."""
    counts: dict[str, dict[str, int]] = {}
    names = dict[str, None]()
    for one in places(suite):
        listed = select(one.ours.table("default.candidates"), {"method": "auto"})
        names |= dict.fromkeys(listed["candidate"])
        rows = select(one.ours.table("default"), {"upstream": one.merger, "samples": one.samples})
        draws = select(rows, {"setting": "auto"}).drop_duplicates("seed")["candidate"]
        name = f"{MERGERS.get(one.merger, one.merger)}, {SHORT[one.ours.role]}"
        for word in draws:
            own = counts.setdefault(name, {})
            own[word] = own.get(word, 0) + 1
    names.pop("calibrated", None)  # the chosen one once more, with all samples
    return shown(_dots(counts, list(names)) if counts else None, "choices of the default")


def _dots(counts: dict[str, dict[str, int]], names: list[str]) -> Figure:
    with drawing():
        picture = Figure(figsize=(WIDTH, 0.34 * len(counts) + 1.8), layout="constrained")
        axes = picture.subplots()
        for y, own in enumerate(counts.values()):
            for word, times in own.items():
                x = names.index(word)
                axes.plot(x, y, "o", color=COLOURS["featcal"], markersize=9 + 3 * times)
                axes.annotate(str(times), (x, y), ha="center", va="center", color="white", size=10)
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axes.set_yticks(range(len(counts)), list(counts))
        axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(counts) - 0.5, -0.5))
        return picture


def costs(suite: str) -> PageOutput:
    """Compare the default with the earlier search, and list seconds of every way to calibrate."""
    rows = []
    for role, pool in SOURCES:
        ours = Evidence(suite, role, pool)
        scores, records = ours.table("default"), ours.record("default").get("cost", [])
        for n in dict.fromkeys(scores["samples"]):
            merger = next(iter(select(scores, {"setting": "search", "samples": n})["upstream"]), "")
            place, spent = Place(ours, merger, int(n)), dict[str, float]()
            for name in ("paper", "auto", "search", *ADAPTERS):
                own = [one["seconds"] for one in records if one["samples"] == n]
                if found := [one[name] for one in own if name in one]:
                    spent[name] = mean(found)
            found = place.score("featcal", "search")
            cells = [str(n), estimated(place.auto) if found else "–", estimated(found)]
            cells += [lead(place.auto, found)]
            cells += [f"{spent[one]:.0f}" if one in spent else "–" for one in ("paper", "auto")]
            cells += [f"{spent['search']:.0f}" if "search" in spent else "–"]
            cells += [f"{sum(spent[one] for one in ADAPTERS):.0f}" if "surgery" in spent else "–"]
            rows.append(("", [model_title(role, suite), *cells]))
    head = ["Model", "Samples per task", "Default", "Earlier search", "Default − search"]
    head += ["Seconds: printed", "Seconds: default", "Seconds: search", "Seconds: both adapters"]
    caption = (
        "Average score (%) after task arithmetic, where the search was run. Seconds of one core,"
        " mean over mergers and draws, adapters with all trials; –: not measured."
    )
    return PageOutput(table(head, rows, caption, "fc-long")) if rows else PageOutput(note(NOT_RUN))


def dropped() -> PageOutput:
    """Show the scores of the ideas that were tried and dropped, from the rows kept with the report."""
    frozen = read_scores(DROPPED)
    columns = [
        (role, merger)
        for role, pool in SOURCES
        for merger in MERGERS
        if len(_kept(frozen, role, pool, merger, "suite"))
    ]
    pools, rows = dict(SOURCES), []
    for variant in dict.fromkeys(frozen["variant"]):
        if not variant.endswith(IDEAS):
            continue
        without = variant.rpartition(", ")[0] or "suite"
        cells = []
        for role, merger in columns:
            pair = (variant, without)
            ours, before = (estimate(_kept(frozen, role, pools[role], merger, v)) for v in pair)
            if ours and before:
                cells.append(f"{ours.mean:.1f}<small>{lead(ours, before)}</small>")
            else:
                cells.append("–")
        rows.append(("", [variant, *cells]))
    head = ["Variant", *(f"{SHORT[role]}, {MERGERS[merger]}" for role, merger in columns)]
    caption = (
        "Tried and dropped: average score (%), one draw; small: change from the same settings"
        " without the idea"
    )
    return PageOutput(table(head, rows, caption, "fc-long"))


def _kept(frozen: Any, role: str, pool: str, merger: str, variant: str) -> Any:
    wanted = {"role": role, "pool": pool, "upstream": merger, "variant": variant}
    return select(frozen, wanted)
