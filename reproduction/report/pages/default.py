"""Build the page on the library's default: against fixed settings and adapters.

The best fixed setting of a merger and number of samples is the one with the highest test average
there, which favours it.
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from reproduction.report.evidence import Evidence, read_scores, select
from reproduction.report.figures import COLOURS, figure_output, stacked
from reproduction.report.html import PageOutput, change, mean_cell, tabulate
from reproduction.report.paper import IMAGES, LANGUAGE, REAL, SECOND, VISION
from reproduction.report.statistics import Estimate, estimate, lead
from reproduction.report.tables import ADAPTERS, MERGERS, NAMES, average

EXPERIMENTS = (
    (VISION, "8"), (REAL, "8"), (SECOND, "8"), LANGUAGE, (IMAGES, "8"), ("flan_t5_base", "glue"), ("llama_3b", "mergebench"),
)  # fmt: skip
SETTINGS = {
    "paper": "printed settings", "suite": "tuned settings", "large anchor": "λ .01, ρ 8, α .3",
    "best": "former preset best",
}  # fmt: skip
MODELS = {
    VISION: "ViT-S/14", REAL: "MiniLM", SECOND: "MPNet", LANGUAGE[0]: "SmolLM2", IMAGES: "CLIP", "flan_t5_base": "T5", "llama_3b": "Llama",
}  # fmt: skip
CLOSE = 0.5  # points that the default may be below the best fixed setting
MISSING = "no scores of the default"
# rows of ideas that the library no longer has, and of the settings that each was added to
DROPPED = Path(__file__).parents[1] / "dropped.csv"
IDEAS = ("held-out α", "no harm", "two sweeps", "attention", "Ledoit–Wolf λ", "earlier search")


class Best(NamedTuple):
    """The best of several models: its name and average; no average where none was run."""

    name: str
    score: Estimate | None


@dataclass(frozen=True)
class Case:
    """One model, merger and number of samples."""

    data: Evidence
    merger: str
    samples: int

    def score(self, method: str, setting: str = "") -> Estimate | None:
        """Return the average of a method over tasks and draws."""
        return average(self.data, (self.merger, method, setting), "default", samples=self.samples)

    @property
    def merged(self) -> Estimate | None:
        return self.score("merged")

    @property
    def auto(self) -> Estimate | None:
        return self.score("featcal", "auto")

    @property
    def fixed(self) -> Best:
        return _best({title: self.score("featcal", name) for name, title in SETTINGS.items()})

    @property
    def adapter(self) -> Best:
        return _best({NAMES[name]: self.score(name) for name in ADAPTERS})


def _best(estimates: dict[str, Estimate | None]) -> Best:
    means = {name: score.mean for name, score in estimates.items() if score}
    name = max(means, key=lambda name: means[name], default="")
    return Best(name, estimates.get(name))


def cases(suite: str, most_drawn: bool = False) -> list[Case]:
    """Return the cases that were run; most_drawn: only the number of samples with most draws."""
    result = []
    for source in EXPERIMENTS:
        data = Evidence(suite, *source)
        for merger, rows in data.table("default").groupby("upstream", sort=False):
            draws = rows.groupby("samples", sort=False)["seed"].nunique()
            sizes = [int(draws.idxmax())] if most_drawn else [int(n) for n in draws.index]
            result += [Case(data, merger, n) for n in sizes]
    return result


def answer(suite: str) -> PageOutput:
    """Compare the default with merged model, fixed settings and adapters, by merger and model."""
    rows = []
    for case in cases(suite, most_drawn=True):
        model = f"{MODELS[case.data.role]}, n = {case.samples}"
        cells = [f"{MERGERS.get(case.merger, case.merger)}<small>{model}</small>"]
        cells += map(mean_cell, (case.merged, case.score("featcal", "paper"), case.auto))
        cells.append(change(case.auto, case.merged))
        for best in (case.fixed, case.adapter):
            cells.append(f"{mean_cell(best.score)}<small>{best.name}</small>")
            cells.append(change(case.auto, best.score))
        rows.append(cells)
    head = ["Merged with", "Merged", "Printed settings", "Default", "Default − merged"]
    head += ["Best fixed setting", "Default − it", "Better adapter", "Default − it"]
    caption = (
        "Average score (%), n samples per task, mean over draws; CLIP, T5 and Llama: synthetic."
        " Differences: points ± two standard errors, paired."
    )
    return tabulate(head, rows, caption, "fc-long", MISSING)


def expected(suite: str) -> PageOutput:
    """Count how often the default meets expectations, over mergers and numbers of samples."""
    rows = []
    for role, role_cases in groupby(cases(suite), key=lambda case: case.data.role):
        cases_run = [(auto, case) for case in role_cases if (auto := case.auto)]
        fixed = [lead(auto, best) for auto, case in cases_run if (best := case.fixed.score)]
        merged = [lead(auto, start) for auto, case in cases_run if (start := case.merged)]
        adapter = [lead(auto, best) for auto, case in cases_run if (best := case.adapter.score)]
        if cases_run:
            cells = [len(cases_run), sum(gap >= -CLOSE for gap, _ in fixed)]
            cells.append(sum(gap + room < 0 for gap, room in merged))
            cells += [sum(sign * gap > room for gap, room in adapter) for sign in (1, -1)]
            rows.append([MODELS[role], *map(str, cells)])
    head = ["Model", "Mergers × samples", "At most half a point below the best fixed setting"]
    head += ["Below the merged model", "Above the better adapter", "Below the better adapter"]
    caption = "Above, below: by more than two standard errors."
    return tabulate(head, rows, caption, missing=MISSING)


def chosen(suite: str) -> PageOutput:
    """Draw how often the default chose each candidate, by model and merger."""
    counts: dict[str, Counter[str]] = {}
    candidates = dict[str, None]()
    for case in cases(suite):
        tried = select(case.data.table("default.candidates"), {"method": "auto"})
        candidates |= dict.fromkeys(tried["candidate"])
        name = f"{MERGERS.get(case.merger, case.merger)}, {MODELS[case.data.role]}"
        if case.auto:
            draws = case.auto.rows.drop_duplicates("seed")["candidate"]
            counts.setdefault(name, Counter()).update(draws)
    candidates.pop("calibrated", None)  # the chosen one once more, with all samples
    if not counts:
        return figure_output(None, "choices of the default")
    names = list(candidates)
    with stacked(1, 0.34 * len(counts) + 1.8) as (picture, [axes]):
        for y, counted in enumerate(counts.values()):
            for candidate, times in counted.items():
                x = names.index(candidate)
                axes.plot(x, y, "o", color=COLOURS["featcal"], markersize=9 + 3 * times)
                axes.annotate(str(times), (x, y), ha="center", va="center", color="white", size=10)
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axes.set_yticks(range(len(counts)), list(counts))
        axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(counts) - 0.5, -0.5))
        return figure_output(picture, "choices of the default")


def by_samples(suite: str, role: str) -> PageOutput:
    """Draw the default, the best fixed setting and the better adapter by the number of samples."""
    title, panels = "scores of the default by number of samples", {}
    for case in cases(suite):
        if case.data.role == role:
            panels.setdefault(case.merger, []).append(case)
    if not any(len(merger_cases) > 1 for merger_cases in panels.values()):
        return figure_output(None, title)
    lines = {
        "default": (lambda case: case.auto, {"color": COLOURS["featcal"], "marker": "^"}),
        "better adapter": (lambda case: case.adapter.score, {"color": COLOURS["surgery"], "marker": "s", "ls": "--"}),
        "best fixed setting": (
            lambda case: case.fixed.score, {"color": COLOURS["expert"], "marker": "o", "ls": ":", "mfc": "none"},
        ),
        "merged": (lambda case: case.merged, {"color": COLOURS["merged"], "ls": "-."}),
    }  # fmt: skip
    sizes = sorted({case.samples for merger_cases in panels.values() for case in merger_cases})
    with stacked(len(panels), 2.1 * len(panels) + 0.8, sharex=True) as (picture, all_axes):
        for axes, (merger, merger_cases) in zip(all_axes, panels.items(), strict=True):
            merger_cases.sort(key=lambda case: case.samples)
            for name, (score_of, style) in lines.items():
                scores = ((case.samples, score_of(case)) for case in merger_cases)
                points = [(samples, score.mean) for samples, score in scores if score]
                axes.plot(*zip(*points, strict=True), label=name, lw=2, ms=8, **style)
            axes.set_xscale("log", base=2)
            axes.set_title(f"after {MERGERS.get(merger, merger)}", loc="left")
            axes.set_xticks(sizes, map(str, sizes))
        picture.supylabel("average score (%)", size=13)
        axes.set_xlabel("samples per task")
        picture.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        return figure_output(picture, title)


def mean_seconds(data: Evidence, samples: int | None = None) -> pd.Series:
    """Return the mean seconds of every calibration, over all runs or those with `samples`."""
    runs = data.record("default").get("cost", [])
    rows = [run["seconds"] for run in runs if samples in (None, run["samples"])]
    return pd.DataFrame(rows).mean()


def costs(suite: str) -> PageOutput:
    """List the seconds of every calibration."""
    rows = []
    for source in EXPERIMENTS:
        data = Evidence(suite, *source)
        for n in dict.fromkeys(data.table("default")["samples"]):
            by_way = mean_seconds(data, n)
            by_way["adapters"] = by_way.get("surgery", math.nan) + by_way.get("prob_surgery", 0.0)
            times = [by_way.get(name, math.nan) for name in ("paper", "auto", "adapters")]
            cells = ("–" if math.isnan(time) else f"{time:.0f}" for time in times)
            rows.append([MODELS[source[0]], str(n), *cells])
    head = ["Model", "Samples per task", "Printed settings", "Default", "Both adapters"]
    caption = "Seconds of one core, mean over mergers and draws; adapters: all trials, without computing features; –: not measured"
    return tabulate(head, rows, caption, missing=MISSING)


def dropped() -> PageOutput:
    """List the scores of ideas that were tried and dropped, from rows kept with the report."""
    frozen, pools = read_scores(DROPPED), dict(EXPERIMENTS)

    def dropped_score(role: str, merger: str, variant: str) -> Estimate | None:
        columns = {"role": role, "pool": pools[role], "upstream": merger, "variant": variant}
        return estimate(select(frozen, columns))

    columns = [(role, m) for role, m in product(pools, MERGERS) if dropped_score(role, m, "suite")]
    rows = []
    for variant in dict.fromkeys(v for v in frozen["variant"] if v.endswith(IDEAS)):
        cells = []
        for model in columns:
            idea, without = dropped_score(*model, variant), variant.rpartition(", ")[0] or "suite"
            cells.append(change(idea, dropped_score(*model, without)) if idea else "–")
        rows.append([variant, *cells])
    head = ["Variant", *(f"{MODELS[role]}, {MERGERS[merger]}" for role, merger in columns)]
    caption = "Change of the average (points) from the same settings without the idea, one draw"
    return tabulate(head, rows, caption, "fc-long")
