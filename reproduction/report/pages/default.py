"""Build the page on the library's default: against fixed settings and adapters.

The best fixed setting of a merger and number of samples is the one with the highest test average
there, which favours it.
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

import pandas as pd

from reproduction.report.evidence import Evidence, read_scores, select
from reproduction.report.figures import COLOURS, shown, stacked
from reproduction.report.html import PageOutput, averaged, change, listed
from reproduction.report.paper import IMAGES, LANGUAGE, REAL, SECOND, VISION
from reproduction.report.statistics import Estimate, estimate, highest, lead
from reproduction.report.tables import ADAPTERS, MERGERS, NAMES

SOURCES = (
    (VISION, "8"), (REAL, "8"), (SECOND, "8"), LANGUAGE, (IMAGES, "8"), ("flan_t5_base", "glue"), ("llama_3b", "mergebench"),
)  # fmt: skip
SETTINGS = {
    "paper": "printed settings", "suite": "tuned settings", "large anchor": "λ .01, ρ 8, α .3",
    "best": "former preset best",
}  # fmt: skip
SHORT = {
    VISION: "ViT-S", REAL: "MiniLM", SECOND: "MPNet", LANGUAGE[0]: "SmolLM2", IMAGES: "CLIP", "flan_t5_base": "T5", "llama_3b": "Llama",
}  # fmt: skip
CLOSE = 0.5  # points that the default may be below the best fixed setting
MISSING = "no scores of the default"
# rows of ideas that the library no longer has, and of the settings that each was added to
DROPPED = Path(__file__).parents[1] / "dropped.csv"
IDEAS = ("held-out α", "no harm", "two sweeps", "attention", "Ledoit–Wolf λ", "earlier search")


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
        return _best({words: self.score("featcal", name) for name, words in SETTINGS.items()})

    @property
    def adapter(self) -> tuple[str, Estimate | None]:
        """Return the better tuned adapter, and its average."""
        return _best({NAMES[name]: self.score(name) for name in ADAPTERS})


def _best(found: dict[str, Estimate | None]) -> tuple[str, Estimate | None]:
    best = highest(found.values())
    return next((name for name, one in found.items() if one and one is best), ""), best


def places(suite: str, most_drawn: bool = False) -> list[Place]:
    """Return what was run; most_drawn: with the number of samples that has most draws."""
    found = []
    for source in SOURCES:
        ours = Evidence(suite, *source)
        rows = ours.table("default")
        for merger in dict.fromkeys(rows["upstream"]):
            own = rows[rows["upstream"] == merger].groupby("samples", sort=False)["seed"].nunique()
            several = [int(own.idxmax())] if most_drawn else [int(n) for n in own.index]
            found += [Place(ours, merger, n) for n in several]
    return found


def answer(suite: str) -> PageOutput:
    """Compare the default with the merged model, fixed settings and adapters, by merger and model."""
    rows = []
    for one in places(suite, most_drawn=True):
        (fixed, best), (adapter, other) = one.fixed, one.adapter
        model = f"{SHORT[one.ours.role]}, n = {one.samples}"
        cells = [f"{MERGERS.get(one.merger, one.merger)}<small>{model}</small>"]
        cells += map(averaged, (one.merged, one.score("featcal", "paper"), one.auto))
        cells.append(change(one.auto, one.merged))
        cells += [f"{averaged(best)}<small>{fixed}</small>", change(one.auto, best)]
        cells += [f"{averaged(other)}<small>{adapter}</small>", change(one.auto, other)]
        rows.append(cells)
    head = ["Merged with", "Merged", "Printed settings", "Default", "Default − merged"]
    head += ["Best fixed setting", "Default − it", "Better adapter", "Default − it"]
    caption = (
        "Average score (%), n samples per task, mean over draws; CLIP, T5 and Llama: synthetic."
        " Differences: points ± two standard errors, paired."
    )
    return listed(head, rows, caption, "fc-long", MISSING)


def expected(suite: str) -> PageOutput:
    """Count how often the default does what is expected of it, over mergers and numbers of samples."""
    rows = []
    for role, own in groupby(places(suite), key=lambda one: one.ours.role):
        run = [(auto, one) for one in own if (auto := one.auto)]
        fixed = [lead(auto, best) for auto, one in run if (best := one.fixed[1])]
        merged = [lead(auto, start) for auto, one in run if (start := one.merged)]
        adapter = [lead(auto, best) for auto, one in run if (best := one.adapter[1])]
        if run:
            cells = [len(run), sum(gap >= -CLOSE for gap, _ in fixed)]
            cells.append(sum(gap + room < 0 for gap, room in merged))
            cells += [sum(sign * gap > room for gap, room in adapter) for sign in (1, -1)]
            rows.append([SHORT[role], *map(str, cells)])
    head = ["Model", "Mergers × samples", "At most half a point below the best fixed setting"]
    head += ["Below the merged model", "Above the better adapter", "Below the better adapter"]
    caption = "Above, below: by more than two standard errors."
    return listed(head, rows, caption, missing=MISSING)


def chosen(suite: str) -> PageOutput:
    """Draw how often the default chose each candidate, by model and merger."""
    counts: dict[str, Counter[str]] = {}
    known = dict[str, None]()
    for one in places(suite):
        tried = select(one.ours.table("default.candidates"), {"method": "auto"})
        known |= dict.fromkeys(tried["candidate"])
        name = f"{MERGERS.get(one.merger, one.merger)}, {SHORT[one.ours.role]}"
        if one.auto:
            draws = one.auto.rows.drop_duplicates("seed")["candidate"]
            counts.setdefault(name, Counter()).update(draws)
    known.pop("calibrated", None)  # the chosen one once more, with all samples
    if not counts:
        return shown(None, "choices of the default")
    names = list(known)
    with stacked(1, 0.34 * len(counts) + 1.8) as (picture, [axes]):
        for y, own in enumerate(counts.values()):
            for word, times in own.items():
                x = names.index(word)
                axes.plot(x, y, "o", color=COLOURS["featcal"], markersize=9 + 3 * times)
                axes.annotate(str(times), (x, y), ha="center", va="center", color="white", size=10)
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axes.set_yticks(range(len(counts)), list(counts))
        axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(counts) - 0.5, -0.5))
        return shown(picture, "choices of the default")


def by_samples(suite: str, role: str) -> PageOutput:
    """Draw the default, the best fixed setting and the better adapter by the number of samples."""
    what, panels = "scores of the default by number of samples", {}
    for one in places(suite):
        if one.ours.role == role:
            panels.setdefault(one.merger, []).append(one)
    if not any(len(own) > 1 for own in panels.values()):
        return shown(None, what)
    lines = {
        "default": (lambda one: one.auto, {"color": COLOURS["featcal"], "marker": "^"}),
        "better adapter": (lambda one: one.adapter[1], {"color": COLOURS["surgery"], "marker": "s", "ls": "--"}),
        "best fixed setting": (
            lambda one: one.fixed[1], {"color": COLOURS["expert"], "marker": "o", "ls": ":", "mfc": "none"},
        ),
        "merged": (lambda one: one.merged, {"color": COLOURS["merged"], "ls": "-."}),
    }  # fmt: skip
    with stacked(len(panels), 2.1 * len(panels) + 0.8, sharex=True) as (picture, several):
        for axes, (merger, own) in zip(several, panels.items(), strict=True):
            own.sort(key=lambda one: one.samples)
            for name, (shown_of, look) in lines.items():
                points = [(one.samples, e.mean) for one in own if (e := shown_of(one))]
                axes.plot(*zip(*points, strict=True), label=name, lw=2, ms=8, **look)
            axes.set_xscale("log", base=2)
            axes.set_title(f"after {MERGERS.get(merger, merger)}", loc="left")
            axes.set_xticks([one.samples for one in own], [str(one.samples) for one in own])
        picture.supylabel("average score (%)", size=13)
        axes.set_xlabel("samples per task")
        picture.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        return shown(picture, what)


def seconds(ours: Evidence, samples: int | None = None) -> pd.Series:
    """Return the mean seconds of every way to calibrate, with so many samples or over all runs."""
    runs = ours.record("default").get("cost", [])
    return pd.DataFrame([o["seconds"] for o in runs if samples in (None, o["samples"])]).mean()


def costs(suite: str) -> PageOutput:
    """List the seconds of every way to calibrate."""
    rows = []
    for source in SOURCES:
        ours = Evidence(suite, *source)
        for n in dict.fromkeys(ours.table("default")["samples"]):
            spent = seconds(ours, n)
            spent["adapters"] = spent.get("surgery", math.nan) + spent.get("prob_surgery", 0.0)
            took = [spent.get(name, math.nan) for name in ("paper", "auto", "adapters")]
            cells = ("–" if math.isnan(one) else f"{one:.0f}" for one in took)
            rows.append([SHORT[source[0]], str(n), *cells])
    head = ["Model", "Samples per task", "Printed settings", "Default", "Both adapters"]
    caption = "Seconds of one core, mean over mergers and draws; adapters: all trials, without computing features; –: not measured"
    return listed(head, rows, caption, missing=MISSING)


def dropped() -> PageOutput:
    """Show the scores of the ideas that were tried and dropped, from the rows kept with the report."""
    frozen, pools = read_scores(DROPPED), dict(SOURCES)

    def kept(role: str, merger: str, variant: str) -> Estimate | None:
        wanted = {"role": role, "pool": pools[role], "upstream": merger, "variant": variant}
        return estimate(select(frozen, wanted))

    columns = [(role, m) for role, m in product(pools, MERGERS) if kept(role, m, "suite")]
    rows = []
    for variant in dict.fromkeys(v for v in frozen["variant"] if v.endswith(IDEAS)):
        cells = []
        for place in columns:
            idea, without = kept(*place, variant), variant.rpartition(", ")[0] or "suite"
            cells.append(change(idea, kept(*place, without)) if idea else "–")
        rows.append([variant, *cells])
    head = ["Variant", *(f"{SHORT[role]}, {MERGERS[merger]}" for role, merger in columns)]
    caption = "Change of the average (points) from the same settings without the idea, one draw"
    return listed(head, rows, caption, "fc-long")
