"""Build the landing page: verdict words by source, the gain over each merger, and all averages.

The printed settings have the paper's numbers of samples; the default has its own study, whose
adapters were tuned on the same samples. A comparison is decided when its difference exceeds two
standard errors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

from reproduction.report import paper
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import INK, figure_output, one_panel
from reproduction.report.html import NOT_RUN, PageOutput, estimate_cell, tabulate
from reproduction.report.pages.default import Case, cases, mean_seconds
from reproduction.report.statistics import Estimate, estimate, highest, lead
from reproduction.report.tables import ADAPTERS, MERGERS, UPSTREAMS, average, gap_share
from reproduction.report.verdicts import TITLES

DEFAULT = "auto"
SETTINGS = {"paper": "printed settings", DEFAULT: "default"}
FEW = 8  # samples per task
QUESTIONS = (
    "raise weak mergers?", "raise strong mergers?", "beat both adapters?", f"beat them with {FEW} samples?",
    "cost less time than adapters as published?", "cost less time than adapters with kept features?",
)  # fmt: skip
NAMES = {
    (paper.IMAGES, "8"): "CLIP, smaller", ("clip_l14", "8"): "CLIP, larger",
    ("flan_t5_base", "glue"): "T5, smaller", ("flan_t5_large", "glue"): "T5, larger",
    ("llama_3b", "mergebench"): "Llama, smaller", ("llama_8b", "mergebench"): "Llama, larger",
}  # fmt: skip
LOOKS = {
    "MiniLM": ("o", "#009E73"), "MPNet": ("s", "#D55E00"), "ViT-S/14": ("D", "#CC79A7"),
    "SmolLM2": ("v", "#E69F00"), "": ("^", "#0072B2"),
}  # fmt: skip  # Okabe and Ito
EstimatePair = tuple[Estimate | None, Estimate | None]  # the first is claimed to be above


@dataclass(frozen=True)
class ModelEvidence:
    """One model whose mergers are compared: its results, their file, and its name."""

    evidence: Evidence
    name: str
    file: str = "scores"

    @property
    def default_evidence(self) -> Evidence:
        """Return the results that have the study of the default."""
        role = self.evidence.role if self.file == "scores" else paper.SECOND
        return Evidence(self.evidence.suite, role, self.evidence.pool)

    @cached_property
    def defaults(self) -> dict[str, Case]:
        """Return the study of the default by merger."""
        data, studied = self.default_evidence, cases(self.evidence.suite, most_drawn=True)
        model = (data.role, data.pool)
        return {case.merger: case for case in studied if (case.data.role, case.data.pool) == model}

    def score(self, merger: str, method: str, setting: str = "") -> Estimate | None:
        """Return the mean of one row, with DEFAULT the one in the default's own study."""
        if setting != DEFAULT:
            row = (merger, method, "" if method == "merged" else setting)
            return average(self.evidence, row, self.file)
        case = self.defaults.get(merger)
        return case and case.score(method, DEFAULT if method == "featcal" else "")

    @property
    def mergers(self) -> list[str]:
        """Return the mergers from which FeatCal was run."""
        calibrated = set(select(self.evidence.table(self.file), {"method": "featcal"})["upstream"])
        return [merger for merger in MERGERS if merger in calibrated | set(self.defaults)]

    def covered(self, merger: str) -> float | None:
        """Return the share of the gap from base to experts that a merger covers, in percent."""
        merged = self.score(merger, "merged") or self.score(merger, "merged", DEFAULT)
        scores = (self.score("", "base"), merged, self.score("", "expert"))
        return gap_share(*(score and score.mean for score in scores))

    def merger_pair(self, merger: str, setting: str) -> EstimatePair:
        return self.score(merger, "featcal", setting), self.score(merger, "merged", setting)

    def change(self, merger: str, setting: str) -> tuple[float, float] | None:
        """Return FeatCal's change of a merger's score, and two standard errors of it."""
        featcal, merged = self.merger_pair(merger, setting)
        return lead(featcal, merged) if featcal and merged else None

    def losses(self, setting: str) -> list[float]:
        """Return the changes of mergers that FeatCal lowers by more than two standard errors."""
        changes = (self.change(merger, setting) for merger in self.mergers)
        return [change[0] for change in changes if change and sum(change) < 0]

    def adapter_pairs(self, setting: str) -> Iterator[EstimatePair]:
        """Pair FeatCal with each adapter after the same merger.

        At the printed settings adapters have the published size, or the suite's if not run.
        """
        for merger, adapter in product(self.mergers, ADAPTERS):
            baseline = self.score(merger, adapter, setting)
            if setting != DEFAULT:
                baseline = baseline or self.score(merger, adapter, "suite")
            yield self.score(merger, "featcal", setting), baseline

    def few_sample_pairs(self, setting: str) -> Iterator[EstimatePair]:
        """Pair FeatCal with each adapter from few samples, after all mergers that the study has."""
        data, study, adapter_setting = self.evidence, "samples", setting
        if setting == DEFAULT:
            data, study, adapter_setting = self.default_evidence, "default", ""
        elif self.file != "scores":
            return
        score = partial(average, data, file=study, samples=FEW)
        mergers = dict.fromkeys(select(data.table(study), {"samples": FEW})["upstream"])
        for merger, adapter in product(mergers, ADAPTERS):
            baseline = score((merger, adapter, adapter_setting)) or score(
                (merger, adapter, "suite")
            )
            yield score((merger, "featcal", setting)), baseline

    def second_pairs(self, procedure: str, setting: str) -> Iterator[EstimatePair]:
        """Pair the seconds of each adapter with FeatCal's; with DEFAULT, of all trials.

        At the printed settings, with features kept ("once"), over all numbers of samples.
        """
        if setting == DEFAULT:
            by_method = mean_seconds(self.default_evidence) if procedure == "once" else {}
            means = {method: exact_estimate(mean) for method, mean in by_method.items()}
            yield from ((means.get(adapter), means.get(DEFAULT)) for adapter in ADAPTERS)
        elif self.file == "scores":
            runs = self.evidence.table("samples.run" if procedure == "once" else "cost.run")
            featcal = estimate(select(runs, {"method": "featcal"}), "seconds")
            for adapter in ADAPTERS:
                adapted = select(runs, {"method": adapter, "encode": procedure})
                yield estimate(adapted, "seconds"), featcal


def models(suite: str) -> dict[str, list[ModelEvidence]]:
    """Return the models of a suite by source."""
    texts = Evidence(suite, paper.REAL, "8")
    synthetic = [ModelEvidence(Evidence(suite, *key), name) for key, name in NAMES.items()]
    images, chats = Evidence(suite, paper.VISION, "8"), Evidence(suite, *paper.LANGUAGE)
    real = [ModelEvidence(images, "ViT-S/14"), ModelEvidence(texts, "MiniLM")]
    real += [ModelEvidence(texts, "MPNet", "second_encoder"), ModelEvidence(chats, "SmolLM2")]
    return {"Real models": real, TITLES.get(suite, suite): synthetic}


def exact_estimate(value: float) -> Estimate:
    """Return an estimate without an error."""
    return Estimate(float(value), None, 0)


def is_weak(covered: float | None) -> bool:
    """Return True for a merger that covers less than half of the gap, or an unknown share."""
    return covered is None or covered < 50


def answers(suite: str) -> PageOutput:
    """Show the questions of the front page with a verdict word by source and setting."""
    printed = printed_pairs()
    changes = [lead(*pair)[0] for question in QUESTIONS[:2] for pair in printed[question]]
    sources = {"The paper, as printed": (printed, [change for change in changes if change < 0])}
    for (name, source_models), (setting, label) in product(models(suite).items(), SETTINGS.items()):
        losses = [loss for model in source_models for loss in model.losses(setting)]
        sources[f"{name}, {label}"] = measured_pairs(source_models, setting), losses
    rows = []
    for source, (pairs, losses) in sources.items():
        cells = [verdict_cell(pairs[question]) for question in QUESTIONS]
        rows.append([source, *cells[:2], loss_cell(losses), *cells[2:]])
    head = ["Does FeatCal …", *QUESTIONS[:2], "lower a merger?", *QUESTIONS[2:]]
    caption = (
        "Verdicts by source. Small: comparisons decided for FeatCal · against it · all of them"
    )
    return tabulate(head, rows, caption, "fc-words fc-tight")


def loss_cell(losses: list[float]) -> str:
    """Return the number of lowered mergers, and the largest loss."""
    if not losses:
        return "none"
    return f"<strong>{len(losses)}</strong><small>by up to {-min(losses):.1f}</small>"


def measured_pairs(models: list[ModelEvidence], setting: str) -> dict[str, list[EstimatePair]]:
    """Return the comparisons that answer each question, of one source at one setting."""
    pairs: dict[str, list[EstimatePair]] = {question: [] for question in QUESTIONS}
    weak, strong, adapters, few, cost, kept = pairs.values()
    for model in models:
        for merger in model.mergers:
            group = weak if is_weak(model.covered(merger)) else strong
            group.append(model.merger_pair(merger, setting))
        adapters += model.adapter_pairs(setting)
        few += model.few_sample_pairs(setting)
        cost += model.second_pairs("each_step", setting)
        kept += model.second_pairs("once", setting)
    return pairs


def printed_pairs() -> dict[str, list[EstimatePair]]:
    """Return the same comparisons from the paper's printed averages, which have no error."""
    pairs: dict[str, list[EstimatePair]] = {question: [] for question in QUESTIONS}
    weak, strong, adapters, few, cost, _ = pairs.values()
    for number in dict.fromkeys(paper.PRINTED.values()):
        frame = paper.paper_table(number)
        averages = frame[frame["task"] == paper.AVERAGE]
        for _, model_rows in averages.groupby("model", sort=False):
            printed = model_rows.set_index(["upstream", "method"])["value"]
            means = {key: exact_estimate(mean) for key, mean in printed.items()}
            for merger in (m for m in UPSTREAMS if (m, "featcal") in means):
                featcal, merged = means[merger, "featcal"], means[merger, "merged"]
                ends = (printed.get(("", "base")), merged.mean, printed.get(("", "expert")))
                (weak if is_weak(gap_share(*ends)) else strong).append((featcal, merged))
                adapters += [(featcal, means[merger, adapter]) for adapter in ADAPTERS]
    times = paper.paper_table("table05").set_index("method")["seconds"]
    budgets = paper.paper_table("table12")
    means = budgets[budgets["samples_per_task"] == FEW].set_index("method")["mean"]
    for adapter in ADAPTERS:
        few.append((exact_estimate(means["featcal"]), exact_estimate(means[adapter])))
        cost.append((exact_estimate(times[adapter]), exact_estimate(times["featcal"])))
    return pairs


def verdict_cell(pairs: Iterable[EstimatePair]) -> str:
    """Return the word for some comparisons, with the counts above, below and in total."""
    gaps = [lead(first, second) for first, second in pairs if first and second]
    above, below = sum(gap > room for gap, room in gaps), sum(-gap > room for gap, room in gaps)
    if not gaps:
        return NOT_RUN
    word = "no" if below else "unclear"
    if above == len(gaps):
        word = "yes"
    elif above and below:
        word = "sometimes"
    elif 2 * above > len(gaps):
        word = "mostly"
    return f"<strong>{word}</strong><small>{above} · {below} · {len(gaps)}</small>"


def gains(suite: str) -> PageOutput:
    """Draw FeatCal's change against the share of the gap that the merger had already covered."""
    title = "gains over mergers"
    points: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for source, source_models in models(suite).items():
        for model, setting in product(source_models, SETTINGS):
            name = model.name if source == "Real models" else ""
            for merger in model.mergers:
                covered, change = model.covered(merger), model.change(merger, setting)
                if change and covered is not None:
                    points.setdefault((name, setting), []).append((covered, *change))
    if not points:
        return figure_output(None, title)
    with one_panel(1.8) as (figure, axes):
        for (name, setting), model_points in points.items():
            marker, colour = LOOKS[name]
            style = {"fmt": marker, "color": colour, "elinewidth": 1, "markersize": 8}
            style["markerfacecolor"] = colour if setting != "paper" else "white"
            x, y, bars = zip(*model_points, strict=True)
            last = setting == DEFAULT or (name, DEFAULT) not in points
            axes.errorbar(x, y, yerr=bars, label=(name or "synthetic") if last else None, **style)
        axes.axhline(0, color=INK, lw=1.2)
        axes.axvline(50, color=INK, lw=1, ls=":")
        axes.set_xlabel("way from base to experts covered by the merger (%)")
        axes.set_ylabel("change (points)")
        above = {"loc": "lower center", "bbox_to_anchor": (0.48, 1.0), "ncols": 5}
        axes.legend(**above, columnspacing=1, handletextpad=0.2, fontsize="small")
        return figure_output(figure, title)


def averages(suite: str) -> PageOutput:
    """List the averages that the verdicts compare: merged, FeatCal, and the better adapters."""
    rows = []
    for model in (model for source_models in models(suite).values() for model in source_models):
        for merger in model.mergers:
            as_run = (model.score(merger, a, s) for a in ADAPTERS for s in ("paper", "suite"))
            tuned = (model.score(merger, a, DEFAULT) for a in ADAPTERS)
            cells = [model.score(merger, "merged") or model.score(merger, "merged", DEFAULT)]
            cells += [model.score(merger, "featcal", setting) for setting in SETTINGS]
            cells += [highest(as_run), highest(tuned), model.score("", "expert")]
            name = f"{model.name}<small>{MERGERS[merger]}</small>"
            rows.append([name, *map(estimate_cell, cells)])
    head = ["Model, merged with", "Merged", "FeatCal, printed settings", "FeatCal, default"]
    head += [
        "Better adapter, as published or in proportion",
        "Better adapter, tuned",
        "Experts (Llama: or base)",
    ]
    caption = "Average score (%) on test samples, by model and merger; sd: over seeds or draws"
    return tabulate(head, rows, caption, "fc-long", "no scores")
