"""Settings chosen without labels: what was found, how far from the best of the same candidates,
what it cost.

Differences of two scores come with two standard errors of the difference, their variances added
although all models answer the
same test samples: cautious, as everywhere in this report. The best candidate by test labels is the
largest of several noisy scores, so its lead is flattered; the distance is an upper estimate.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from reproduction.report.evidence import Evidence
from reproduction.report.figures import COLOURS, WIDTH, drawing
from reproduction.report.html import PageOutput, compact, fold, note, table
from reproduction.report.page import drawn, label
from reproduction.report.paper import REAL
from reproduction.report.statistics import Estimate, estimate, noise

MODELS = {
    (REAL, "8"): "Real encoder, 8 tasks",
    ("clip_b32", "8"): "CLIP ViT-B/32, 8 tasks",
    ("clip_l14", "8"): "CLIP ViT-L/14, 8 tasks",
    ("clip_b32", "14"): "CLIP ViT-B/32, 14 tasks",
    ("clip_b32", "20"): "CLIP ViT-B/32, 20 tasks",
    ("flan_t5_base", "glue"): "FLAN-T5-base on GLUE",
    ("llama_3b", "mergebench"): "Llama-3B on MergeBench",
}
SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α"}
ACROSS = 2  # drawings side by side
ORIGINS = {
    "start": "the paper’s",
    "path": "the path’s λ",
    "search": "search",
    "reference": "chosen on labels",
}


@dataclass(frozen=True)
class Tried:
    """One calibrated model: its settings, its divergence from the experts without labels, its score
    on test samples.
    """

    trial: int
    origin: str
    chosen: bool
    settings: dict[str, float]
    divergence: float
    score: Estimate

    @property
    def words(self) -> str:
        """λ, ρ and α as one reads them."""
        return ", ".join(
            f"{symbol} {compact(self.settings[name])}" for name, symbol in SYMBOLS.items()
        )


def tried(ours: Evidence) -> list[Tried]:
    """Every candidate in the order of trials, then the reference; empty where the study was not
    run.
    """
    found = []
    for trial, rows in ours.table("tune").groupby("trial", sort=True):
        first, score = rows.iloc[0], estimate(rows)
        assert score is not None
        settings = {name: float(first[name]) for name in SYMBOLS}
        found.append(
            Tried(
                int(str(trial)),
                first["origin"],
                bool(first["chosen"]),
                settings,
                float(first["divergence"]),
                score,
            )
        )
    return found


@dataclass(frozen=True)
class Found:
    """What one search came to.

    best: of the candidates, by test labels.   reference: settings chosen on labelled validation
    samples, no candidate; or None.
    """

    start: Tried
    chosen: Tried
    best: Tried
    reference: Tried | None
    candidates: tuple[Tried, ...]

    @property
    def distance(self) -> tuple[float, float]:
        """How far the chosen one is below the best, and two standard errors of that."""
        return self.best.score.mean - self.chosen.score.mean, noise(
            self.best.score, self.chosen.score
        )

    @property
    def gain(self) -> tuple[float, float]:
        """How far the chosen one is above the paper's settings, and two standard errors of that."""
        return self.chosen.score.mean - self.start.score.mean, noise(
            self.chosen.score, self.start.score
        )

    @property
    def agreement(self) -> float:
        """Rank correlation of smaller divergence with higher score over the candidates: 1 where
        both put them in one order.
        """
        pairs = pd.DataFrame([(-one.divergence, one.score.mean) for one in self.candidates])
        return float(pairs[0].corr(pairs[1], method="spearman"))


def found(ours: Evidence) -> Found | None:
    """The outcome of one search; None where it was not run."""
    every = tried(ours)
    if not every:
        return None
    candidates = tuple(one for one in every if one.origin != "reference")
    chosen, best = (
        next(one for one in candidates if one.chosen),
        max(candidates, key=lambda one: one.score.mean),
    )
    reference = next((one for one in every if one.origin == "reference"), None)
    return Found(candidates[0], chosen, best, reference, candidates)


def evidence(model: tuple[str, str], suite: str) -> Evidence:
    """The results of one model."""
    return Evidence(suite, *model)


def summary(suite: str) -> PageOutput:
    """In words, for every model: the distance to the best, and the gain over the paper's
    settings.
    """
    return PageOutput("".join(_summary(model, suite) for model in MODELS))


def _summary(model: tuple[str, str], suite: str) -> str:
    it = found(evidence(model, suite))
    if it is None:
        return note(f"○ not run: {MODELS[model]}.")
    (distance, sure), (gain, doubt) = it.distance, it.gain
    near = "within" if distance <= sure else "not within"
    told = (
        f"What is chosen without labels lies {distance:.1f} points below the best candidate by test labels, {near} two standard "
        f"errors ({sure:.1f}). Its score differs from that of the paper’s settings by {gain:+.1f} points, "
        f"{'beyond' if abs(gain) > doubt else 'within'} two standard errors ({doubt:.1f})."
    )
    return note(f"<strong>{MODELS[model]}.</strong> {told}")


def values(suite: str) -> PageOutput:
    """One row for each model: chosen settings and scores, beside the paper's, the best by labels,
    and those chosen on labels.
    """
    head = [
        "Model", "Chosen without labels", "At the paper’s settings", "Gain", "Best candidate by test labels", "Distance",
        "Chosen on labelled validation samples", "Rank correlation",
    ]  # fmt: skip
    rows = []
    for model, name in MODELS.items():
        it = found(evidence(model, suite))
        if it is not None:
            gain, distance = (
                f"{value:+.1f}<small>± {sure:.1f}</small>" for value, sure in (it.gain, it.distance)
            )
            cells = [
                _scored(it.chosen),
                _scored(it.start),
                gain,
                _scored(it.best),
                distance.replace("+-", "-"),
            ]
            rows.append(("", [name, *cells, _scored(it.reference), f"{it.agreement:.2f}"]))
    caption = (
        f"Average score on test samples, all models calibrated on the same samples — {label(suite)}"
    )
    return PageOutput(
        table(head, rows, caption, "fc-words")
        if rows
        else note("○ not run: no such study in the results.")
    )


def _scored(one: Tried | None) -> str:
    return f"{one.score.mean:.1f}<small>{one.words}</small>" if one else "–"


def panel(suite: str) -> PageOutput:
    """Divergence and score of every candidate, one drawing for each model, or a note where there is
    none.
    """
    return drawn(_panel(suite), "search for settings", label(suite))


def _panel(suite: str) -> Figure | None:
    every = {
        name: it
        for model, name in MODELS.items()
        if (it := found(evidence(model, suite))) is not None
    }
    if not every:
        return None
    with drawing():
        lines = -(-len(every) // ACROSS)
        figure = Figure(figsize=(WIDTH, 0.6 + 2.6 * lines), layout="constrained")
        spots = figure.subplots(lines, ACROSS, squeeze=False).flatten()
        for axes in spots[len(every) :]:
            axes.remove()
        for axes, (name, it) in zip(spots, every.items(), strict=False):
            rest = [one for one in it.candidates if one not in (it.chosen, it.best, it.start)]
            groups: list[tuple[list[Tried | None], str, str, str]] = [
                (list(rest), "o", COLOURS["expert"], "candidate"), ([it.start], "s", COLOURS["merged"], "the paper’s settings"),
                ([it.reference], "D", COLOURS["expert"], "chosen on labels"),
                ([it.best], "^", COLOURS["featcal"], "best by test labels"), ([it.chosen], "x", "black", "chosen without labels"),
            ]  # fmt: skip
            for those, marker, colour, words in groups:
                there = [one for one in those if one is not None]
                face = (
                    {}
                    if marker == "x"
                    else {"facecolors": "none" if marker in "oD" else colour, "edgecolors": colour}
                )
                look: dict[str, Any] = {
                    "marker": marker,
                    "s": 70,
                    "label": words,
                    **(face or {"color": colour}),
                }
                if not there:
                    continue
                axes.scatter(
                    [one.divergence for one in there], [one.score.mean for one in there], **look
                )
            axes.set(
                xscale="log",
                ylabel="average score (%)" if axes in spots[::ACROSS] else "",
                title=name,
            )
            plain_ticks(axes)
        figure.supxlabel("divergence from the experts (nats), without labels", fontsize="medium")
        handles, words_of_them = axes.get_legend_handles_labels()
        if handles:  # above, where it hides no mark
            figure.legend(
                handles, words_of_them, loc="outside upper center", ncols=3, fontsize="small"
            )
        return figure


def plain_ticks(axes: Any) -> None:
    """A few numbers written out along a logarithmic axis, whether it spans decades or a part of
    one.
    """
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(
        LogLocator() if high > 10 * low else MaxNLocator(4, steps=[1, 2, 5, 10])
    )
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def trials(suite: str) -> PageOutput:
    """Every candidate with its settings, one click away."""
    parts = []
    for model, name in MODELS.items():
        rows = []
        for one in tried(evidence(model, suite)):
            mark = ORIGINS[one.origin] + (", chosen" if one.chosen else "")
            number = "–" if one.origin == "reference" else str(one.trial + 1)
            cells = [
                *(compact(one.settings[key]) for key in SYMBOLS),
                f"{one.divergence:.4f}",
                f"{one.score.mean:.1f}",
                mark,
            ]
            rows.append(("", [number, *cells]))
        head = ["Trial", *SYMBOLS.values(), "Divergence", "Score", "Where it comes from"]
        parts += (
            [fold(f"Every candidate, {name}", table(head, rows, f"{name} — {label(suite)}"))]
            if rows
            else []
        )
    return PageOutput("".join(parts) or note("○ not run: no such study in the results."))


def cost(suite: str) -> PageOutput:
    """Seconds of one pass along the path, of one trial, and of the whole search, in one process at
    a time.
    """
    rows = []
    for model, name in MODELS.items():
        seconds = evidence(model, suite).record("tune").get("cost", {})
        each = [value for key, value in seconds.items() if key != "path"]
        if each:
            told = [
                f"{seconds['path']:.0f}",
                str(len(each)),
                f"{sum(each) / len(each):.0f}",
                f"{sum(seconds.values()):.0f}",
            ]
            rows.append(("", [name, *told]))
    head = ["Model", "Path, s", "Trials", "Mean of a trial, s", "All, s"]
    caption = f"Seconds of one core, two trials side by side — {label(suite)}"
    return PageOutput(
        table(head, rows, caption) if rows else note("○ not run: no run record of this study.")
    )


def drawn_from(suite: str) -> PageOutput:
    """How many samples and trials, what was held out, and the λ of the path, of each model."""
    rows = []
    for model, name in MODELS.items():
        ours = evidence(model, suite)
        told = ours.settings("tune")
        if told:
            used = told["study"]
            cells = [str(used[key]) for key in ("samples", "holdout", "trials", "seed")]
            rows.append(("", [name, *cells, compact(float(f"{told['path']:.2g}"))]))
    head = ["Model", "Samples per task", "Share held out", "Trials", "Seed", "λ of the path"]
    return PageOutput(
        table(head, rows, f"The search — {label(suite)}")
        if rows
        else note("○ not run: no settings file yet.")
    )
