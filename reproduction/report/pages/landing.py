"""Build the landing page: verdict words by source, the gain over each merger, and the averages behind both.

The printed settings have the paper's numbers of samples; the default's rows are those of its own
study, whose adapters were tuned on the same samples. A comparison is decided when its difference
exceeds two standard errors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from reproduction.report import paper
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import INK, one_panel, shown
from reproduction.report.html import NOT_RUN, PageOutput, estimated, listed
from reproduction.report.pages.default import Place, places, seconds
from reproduction.report.statistics import Estimate, estimate, highest, lead
from reproduction.report.tables import ADAPTERS, MERGERS, UPSTREAMS, average, share
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

    @cached_property
    def defaults(self) -> dict[str, Place]:
        """Return the study of the default by merger."""
        role = self.evidence.role if self.file == "scores" else paper.SECOND
        own, several = (role, self.evidence.pool), places(self.evidence.suite, most_drawn=True)
        return {one.merger: one for one in several if (one.ours.role, one.ours.pool) == own}

    def score(self, merger: str, method: str, setting: str = "") -> Estimate | None:
        """Return the mean of one row; with DEFAULT of the default's study, which has its own models."""
        if setting != DEFAULT:
            row = (merger, method, "" if method == "merged" else setting)
            return average(self.evidence, row, self.file)
        place = self.defaults.get(merger)
        return place and place.score(method, DEFAULT if method == "featcal" else "")

    @property
    def mergers(self) -> list[str]:
        """Return the mergers from which FeatCal was run."""
        calibrated = set(select(self.evidence.table(self.file), {"method": "featcal"})["upstream"])
        return [merger for merger in MERGERS if merger in calibrated | set(self.defaults)]

    def way(self, merger: str) -> float | None:
        """Return the share of the way from base to experts that a merger covers, in percent."""
        start = self.score(merger, "merged") or self.score(merger, "merged", DEFAULT)
        ends = (self.score("", "base"), start, self.score("", "expert"))
        return share(*(one and one.mean for one in ends))

    def pair(self, merger: str, setting: str) -> EstimatePair:
        """Pair FeatCal with the merger that it starts from."""
        return self.score(merger, "featcal", setting), self.score(merger, "merged", setting)

    def change(self, merger: str, setting: str) -> tuple[float, float] | None:
        """Return what FeatCal changes after a merger, and two standard errors of it."""
        ours, start = self.pair(merger, setting)
        return lead(ours, start) if ours and start else None

    def lowered(self, setting: str) -> Iterator[str]:
        """Name each merger that FeatCal lowers by more than two standard errors, and by how much."""
        for merger in self.mergers:
            found = self.change(merger, setting)
            if found and sum(found) < 0:
                words = f"{MERGERS[merger]}, {self.name}: {found[0]:+.1f} ± {found[1]:.1f}"
                yield f"<small>{words}</small>"

    def adapters(self, setting: str) -> Iterator[EstimatePair]:
        """Pair FeatCal with each adapter after the same merger.

        At the printed settings adapters have the published size, where it was run, else the suite's.
        """
        for merger, adapter in product(self.mergers, ADAPTERS):
            theirs = self.score(merger, adapter, setting)
            if setting != DEFAULT:
                theirs = theirs or self.score(merger, adapter, "suite")
            yield self.score(merger, "featcal", setting), theirs

    def few(self, setting: str) -> Iterator[EstimatePair]:
        """Pair FeatCal with each adapter from few samples, after all mergers that the study has."""
        study, own = ("default", "") if setting == DEFAULT else ("samples", setting)
        few = select(self.evidence.table(study), {"samples": FEW})
        mergers = dict.fromkeys(few["upstream"]) if self.file == "scores" else ()
        for merger, adapter in product(mergers, ADAPTERS):
            rows = select(few, {"upstream": merger})
            theirs = estimate(select(rows, {"method": adapter, "setting": own}))
            theirs = theirs or estimate(select(rows, {"method": adapter, "setting": "suite"}))
            yield estimate(select(rows, {"method": "featcal", "setting": setting})), theirs

    def times(self, procedure: str, setting: str) -> Iterator[EstimatePair]:
        """Pair the seconds of each adapter with FeatCal's; of the default, with all trials of both."""
        study = next(iter(self.defaults.values()), None)  # the same for all mergers
        if setting == DEFAULT:
            spent = seconds(study.ours) if study and procedure == "once" else {}
            ours = spent.get(DEFAULT)
        else:
            runs = self.evidence.table("cost.run")
            spent = select(runs, {"encode": procedure}).groupby("method")["seconds"].mean()
            ours = select(runs, {"method": "featcal"})["seconds"].mean()
        for adapter in ADAPTERS if self.file == "scores" or setting == DEFAULT else ():
            if adapter in spent and ours is not None and ours > 0:  # NaN: not run
                yield exactly(spent[adapter]), exactly(ours)


def models(suite: str) -> dict[str, list[ModelEvidence]]:
    """Return the models of a suite by source."""
    texts = Evidence(suite, paper.REAL, "8")
    own = [ModelEvidence(Evidence(suite, *place), name) for place, name in NAMES.items()]
    images, chats = Evidence(suite, paper.VISION, "8"), Evidence(suite, *paper.LANGUAGE)
    real = [ModelEvidence(images, "ViT-S/14"), ModelEvidence(texts, "MiniLM")]
    real += [ModelEvidence(texts, "MPNet", "second_encoder"), ModelEvidence(chats, "SmolLM2")]
    return {"Real models": real, TITLES.get(suite, suite): own}


def exactly(value: float) -> Estimate:
    """Return a number whose error is not known."""
    return Estimate(float(value), None, 0)


def is_weak(way: float | None) -> bool:
    """Decide whether a merger is weak: less than half of the way to the experts, or not known."""
    return way is None or way < 50


def words(suite: str) -> PageOutput:
    """Show the questions of the front page with a verdict word by source and setting."""
    columns, head = [printed_pairs()], ["Does FeatCal …", "The paper, as printed"]
    weak, strong, *_ = columns[0].values()
    clear = all(lead(*pair)[0] >= 0 for pair in weak + strong)
    lowered = ["none" if clear else "some"]
    for (name, own), (setting, label) in product(models(suite).items(), SETTINGS.items()):
        columns.append(measured_pairs(own, setting))
        lowered.append("".join(one for model in own for one in model.lowered(setting)) or "none")
        head.append(f"{name}, {label}")
    rows = [[asked, *(verdict(column[asked]) for column in columns)] for asked in columns[0]]
    rows.insert(2, ["lower a merger?", *lowered])
    caption = (
        "Verdicts by source. Small: comparisons decided for FeatCal · against it · all of them"
    )
    return listed(head, rows, caption, "fc-words")


def measured_pairs(own: list[ModelEvidence], setting: str) -> dict[str, list[EstimatePair]]:
    """Return the comparisons behind each question, of one source at one setting."""
    found: dict[str, list[EstimatePair]] = {question: [] for question in QUESTIONS}
    weak, strong, adapters, few, cost, kept = found.values()
    for model in own:
        for merger in model.mergers:
            (weak if is_weak(model.way(merger)) else strong).append(model.pair(merger, setting))
        adapters += model.adapters(setting)
        few += model.few(setting)
        cost += model.times("each_step", setting)
        kept += model.times("once", setting)
    return found


def printed_pairs() -> dict[str, list[EstimatePair]]:
    """Return the same comparisons from the paper's printed averages, which have no error."""
    found: dict[str, list[EstimatePair]] = {question: [] for question in QUESTIONS}
    weak, strong, adapters, few, cost, _ = found.values()
    for number in dict.fromkeys((paper.PRINTED | paper.TEXT_PRINTED).values()):
        frame = paper.paper_table(number)
        averages = frame[frame["task"] == paper.AVERAGE]
        for _, own in averages.groupby("model", sort=False):
            printed = own.set_index(["upstream", "method"])["value"]
            value = {key: exactly(one) for key, one in printed.items()}
            for merger in (m for m in UPSTREAMS if (m, "featcal") in value):
                ours, merged = value[merger, "featcal"], value[merger, "merged"]
                ends = (value.get(("", "base")), merged, value.get(("", "expert")))
                way = share(*(one and one.mean for one in ends))
                (weak if is_weak(way) else strong).append((ours, merged))
                adapters += [(ours, value[merger, adapter]) for adapter in ADAPTERS]
    times = paper.paper_table("table05").set_index("method")["seconds"]
    budgets = paper.paper_table("table12")
    means = budgets[budgets["samples_per_task"] == FEW].set_index("method")["mean"]
    for adapter in ADAPTERS:
        few.append((exactly(means["featcal"]), exactly(means[adapter])))
        cost.append((exactly(times[adapter]), exactly(times["featcal"])))
    return found


def verdict(pairs: Iterable[EstimatePair]) -> str:
    """Return the word for some comparisons, with the numbers above and below behind it."""
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
    """Draw what FeatCal changes against how much of the way the merger had already covered."""
    what = "gains over mergers"
    points: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for source, own in models(suite).items():
        for model, setting in product(own, SETTINGS):
            name = model.name if source == "Real models" else ""
            for merger in model.mergers:
                way, change = model.way(merger), model.change(merger, setting)
                if change and way is not None:
                    points.setdefault((name, setting), []).append((way, *change))
    if not points:
        return shown(None, what)
    with one_panel(4.4) as (figure, axes):
        for (name, setting), several in points.items():
            marker, colour = LOOKS[name]
            look = {"fmt": marker, "color": colour, "elinewidth": 1, "markersize": 8}
            look["markerfacecolor"] = colour if setting != "paper" else "white"
            x, y, bars = zip(*several, strict=True)
            label = f"{name or 'synthetic'}, {SETTINGS[setting]}"
            axes.errorbar(x, y, yerr=bars, label=label, **look)
        axes.axhline(0, color=INK, lw=1.2)
        axes.axvline(50, color=INK, lw=1, ls=":")
        axes.set_xlabel("way from base to experts covered by the merger (%)")
        axes.set_ylabel("change by FeatCal (points)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, fontsize="small")
        return shown(figure, what)


def averages(suite: str) -> PageOutput:
    """List the averages behind the verdict words: merged, FeatCal, and the better adapter of each kind."""
    rows = []
    for model in (model for own in models(suite).values() for model in own):
        for merger in model.mergers:
            as_run = (model.score(merger, a, s) for a in ADAPTERS for s in ("paper", "suite"))
            tuned = (model.score(merger, a, DEFAULT) for a in ADAPTERS)
            cells = [model.score(merger, "merged") or model.score(merger, "merged", DEFAULT)]
            cells += [model.score(merger, "featcal", setting) for setting in SETTINGS]
            cells += [highest(as_run), highest(tuned), model.score("", "expert")]
            name = f"{model.name}<small>{MERGERS[merger]}</small>"
            rows.append([name, *map(estimated, cells)])
    head = ["Model, merged with", "Merged", "FeatCal, printed settings", "FeatCal, default"]
    head += [
        "Better adapter, as published or in proportion",
        "Better adapter, tuned",
        "Experts (Llama: or base)",
    ]
    caption = "Average score (%) on test samples, by model and merger"
    return listed(head, rows, caption, "fc-long", "no scores")
