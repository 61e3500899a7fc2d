"""Ideas beyond the paper: which was chosen on validation samples, what each gives, and how it stands against adapters.

Differences of two scores come with two standard errors, paired row by row. Of each adapter the best setting by test labels is
shown among those whose training rows are not scored: that favours the adapter.
"""

from dataclasses import dataclass
from functools import cache

import pandas as pd

from reproduction.report.estimate import Estimate, estimate, noise
from reproduction.report.evidence import Evidence, read_json, select
from reproduction.report.markup import PageOutput, note, table
from reproduction.report.pages import label
from reproduction.report.tables import MERGERS

MODELS = {("minilm", "8"): "MiniLM, 8 tasks of real texts", ("clip_b32", "8"): "CLIP ViT-B/32, 8 tasks"}
ADAPTERS = {"surgery": "Surgery", "prob_surgery": "ProbSurgery"}
OWN = {"merged": "merged", "paper": "FeatCal, the paper’s λ, ρ, α", "suite": "FeatCal, the suite’s λ, ρ, α"}


@dataclass(frozen=True)
class Study:
    """What one study found."""

    ours: Evidence
    rows: pd.DataFrame
    chosen: str
    validation: dict[str, float]
    seeds: tuple[str, ...]
    samples: int
    few: int
    chosen_on: tuple[str, ...]  # mergers from which every variant was run

    @property
    def upstreams(self) -> list[str]:
        return list(dict.fromkeys(self.rows["upstream"]))

    def score(self, upstream: str, variant: str, samples: int | None = None, seed: str | None = None) -> Estimate | None:
        """Of a variant on test samples, over all seeds it was run with or one of them; with the usual number of samples."""
        drawn = 0 if variant == "merged" else samples or self.samples
        wanted = {"upstream": upstream, "variant": variant, "samples": drawn} | ({"seed": seed} if seed else {})
        return estimate(select(self.rows, wanted))

    def adapter(self, upstream: str, method: str) -> Estimate | None:
        """The best of an adapter's settings whose training rows are not scored."""
        scores = select(self.ours.table("scores"), {"upstream": upstream, "method": method})
        apart = [s for s in dict.fromkeys(scores["setting"]) if not self.sees_scored_rows(s)]
        found = [estimate(select(scores, {"setting": setting})) for setting in apart]
        return max((one for one in found if one), key=lambda one: one.mean, default=None)

    def sees_scored_rows(self, setting: str) -> bool:
        """Whether an adapter of this setting was trained on rows that are scored: of images unless told otherwise."""
        return setting.endswith("_scored") if self.ours.role == "minilm" else not setting.endswith("_train")


@cache
def study(role: str, pool: str, suite: str) -> Study | None:
    """The results of one model; None where the study was not run."""
    ours = Evidence(suite, role, pool)
    rows, told = ours.table("beyond"), read_json(ours.folder / f"{role}-{pool}.beyond.settings.json")
    if rows.empty or not told:
        return None
    used = told["study"]
    seeds = tuple(str(seed) for seed in used["seeds"])
    return Study(ours, rows, told["chosen"], told["validation"], seeds, used["samples"], used["few"], tuple(used["chosen_on"]))


def signed(value: float, sure: float) -> str:
    """A difference with two standard errors."""
    return f"{value:+.1f}<small>± {sure:.1f}</small>"


def gap(left: Estimate | None, right: Estimate | None) -> str:
    """left − right, or a dash where one is missing."""
    return signed(left.mean - right.mean, noise(left, right)) if left and right else "–"


def mean(value: Estimate | None) -> str:
    """A score, with the spread over seeds where there are several."""
    if value is None:
        return "–"
    return f"{value.mean:.1f}" + (f"<small>± {value.spread:.1f}</small>" if value.spread is not None else "")


def summary(suite: str) -> PageOutput:
    """In words, for every model: what was chosen, from how many mergers it beats the paper's method and each adapter."""
    return PageOutput("".join(_summary(model, suite) for model in MODELS))


def _summary(model: tuple[str, str], suite: str) -> str:
    it = study(*model, suite)
    if it is None:
        return note(f"○ not run: {MODELS[model]}.")
    against = {"the paper’s method": [it.score(u, "suite") for u in it.upstreams]}
    against |= {words: [it.adapter(u, method) for u in it.upstreams] for method, words in ADAPTERS.items()}
    ours = [it.score(u, it.chosen) for u in it.upstreams]
    parts = []
    for words, theirs in against.items():
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
        ahead = sum(a.mean - b.mean > noise(a, b) for a, b in pairs)
        behind = sum(b.mean - a.mean > noise(a, b) for a, b in pairs)
        parts += [f"{words}: ahead from {ahead} of {len(pairs)} mergers, behind from {behind}"] if pairs else []
    told = f"Chosen on validation samples: <em>{it.chosen}</em>. Beyond two standard errors against {'; '.join(parts)}."
    return note(f"<strong>{MODELS[model]}.</strong> {told}")


def against(suite: str) -> PageOutput:
    """One row for each merger: the chosen variant beside the paper's method and the adapters on rows that none of them saw."""
    head = [
        "Merger", "Merged", "Paper’s method", "Chosen variant", "Over the paper’s method", *ADAPTERS.values(),
        *(f"Over {words}" for words in ADAPTERS.values()),
    ]  # fmt: skip
    parts = []
    for model, name in MODELS.items():
        it, rows = study(*model, suite), []
        for upstream in it.upstreams if it else ():
            assert it is not None
            ours, paper = it.score(upstream, it.chosen), it.score(upstream, "suite")
            rivals = [it.adapter(upstream, method) for method in ADAPTERS]
            cells = [mean(it.score(upstream, "merged")), mean(paper), mean(ours), gap(ours, paper), *map(mean, rivals)]
            rows.append(("", [MERGERS.get(upstream, upstream), *cells, *(gap(ours, rival) for rival in rivals)]))
        if it:
            several = " and ".join(MERGERS.get(upstream, upstream) for upstream in it.chosen_on)
            caption = (
                f"{name}: average score on test samples, {it.samples} samples of each task, "
                f"{len(it.seeds)} draw{'s' * (len(it.seeds) > 1)} from {several}"
            )
            parts.append(table(head, rows, f"{caption} — {label(suite)}"))
    return PageOutput("".join(parts) or note("○ not run: no such study in the results."))


def variants(suite: str) -> PageOutput:
    """Every variant with one draw: test scores from every merger, the mean on validation samples, what it costs."""
    parts = []
    for model, name in MODELS.items():
        it = study(*model, suite)
        if it is None:
            continue
        ratios, rows = cost_ratios(it), []
        for variant in (*OWN, *it.validation):
            seed = None if variant == "merged" else it.seeds[0]
            scores = [it.score(upstream, variant, seed=seed) for upstream in it.chosen_on]
            judged = f"{it.validation[variant]:.1f}" if variant in it.validation else "–"
            cost = f"{ratios[variant]:.1f}" if variant in ratios else "–"
            words = OWN.get(variant, variant) + (" ← chosen" if variant == it.chosen else "")
            rows.append(("", [words, *(f"{one.mean:.1f}" if one else "–" for one in scores), judged, cost]))
        mergers = [MERGERS.get(upstream, upstream) for upstream in it.chosen_on]
        head = ["Variant", *mergers, "Mean on validation samples", "Time, paper’s method = 1"]
        parts.append(table(head, rows, f"{name}: every variant, one draw — {label(suite)}"))
    return PageOutput("".join(parts) or note("○ not run: no such study in the results."))


def cost_ratios(it: Study) -> dict[str, float]:
    """Seconds of a variant over those of the paper's method, summed over mergers, with the first draw."""
    seconds = it.ours.record("beyond").get("cost", {})
    drawn = f"n={it.samples} seed={it.seeds[0]}"

    def total(variant: str) -> float:
        return float(sum(seconds.get(f"{upstream} {variant} {drawn}", 0.0) for upstream in it.chosen_on))

    own = total("suite")
    return {v: total(v) / own for v in ("paper", "suite", *it.validation) if own and total(v)}


def few(suite: str) -> PageOutput:
    """The chosen variant and the paper's method with few samples of each task."""
    parts = []
    for model, name in MODELS.items():
        it, rows = study(*model, suite), []
        for upstream in it.chosen_on if it else ():
            assert it is not None
            ours, paper = (it.score(upstream, variant, it.few) for variant in (it.chosen, "suite"))
            rows.append(("", [MERGERS.get(upstream, upstream), mean(paper), mean(ours), gap(ours, paper)]))
        if it:
            caption = f"{name}: {it.few} samples of each task, one draw — {label(suite)}"
            parts.append(table(["Merger", "Paper’s method", "Chosen variant", "Difference"], rows, caption))
    return PageOutput("".join(parts) or note("○ not run: no such study in the results."))
