"""Judge the paper's claims by the results: a margin decides when it exceeds two standard errors."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.report import statistics
from reproduction.report.claims import (
    CALIBRATED,
    DIGITS,
    INSIDE,
    Claim,
    claims,
    means_text,
    side_columns,
    studied_setting,
)
from reproduction.report.evidence import RUN_RECORD, Evidence, select
from reproduction.report.paper import PRINTED, REAL, VISION
from reproduction.report.tables import UPSTREAMS, settings_shown

WORDS = ("holds", "does not hold", "within noise", "one run", "vacuous", "not run")
DECIDED = ("holds", "does not hold")
_VALUE_TITLES: dict[str, Callable[[Any], str]] = {
    "samples": "n = {:g}".format,
    "corruption": lambda kind: str(kind).replace("_", " "),
}
PAPER = "paper"
TITLES = {"mini": "Synthetic images and texts", PAPER: "The paper’s checkpoints"}  # of sources
STATED = {  # text for a theorem's values, by the quantity of its rows
    "digits": "both sides share {:.1f} digits, {:.0f} required", "room": "the sides are {:.1f} % apart where they come closest",
}  # fmt: skip
# "drift appears in a block": at least a tenth of the largest, so that no single block carries it
SHARE = 0.1
FEWEST = 4  # tasks from which a correlation is reported


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim; `one run` has no known error, only the direction of the margin."""

    claim: Claim
    word: str
    margin: float = math.nan  # positive where the claim is met
    noise: float = math.nan  # two standard errors
    one_run: bool = False  # whether a side was drawn with one seed only
    pairing: str = ""  # where errors were added as if models had different test rows
    detail: str = ""  # the numbers
    # of a single sum of means: the noise's parts from seeds, and from trainings of the experts
    parts_of_noise: tuple[float, float] | None = None

    @property
    def fragile(self) -> bool:
        """Return True if the verdict is decided, but by less than three standard errors."""
        return self.word in DECIDED and 0 < abs(self.margin) < 1.5 * self.noise

    @property
    def met(self) -> bool:
        """Return True if the margin points the claimed way, whatever its error."""
        return self.margin > 0

    def share_of(self, whole: Claim) -> str:
        """Return how many parts of a claim about several rows were run, empty if all were."""
        parts, count = len(self.claim.parts), len(whole.parts)
        return f"here: {parts} of {count}" if 0 < parts < count and self.word != "not run" else ""


@dataclass(frozen=True)
class EvidenceSource:
    """The results that verdicts come from."""

    key: str  # its name in claims.json
    title: str
    suite: str
    settings: tuple[str, ...]  # at which it was run, the printed ones first
    counterpart: Callable[[Claim], Claim | None] = lambda claim: claim  # for this source's models

    def judged(self, chosen: Iterable[Claim]) -> list[list[Verdict | None]]:
        """Return the verdicts on each claim, one for each setting; None without a counterpart."""
        mapped = map(self.counterpart, chosen)
        return [
            [claim and judge(claim, self.suite, at) for at in self.settings] for claim in mapped
        ]


# by source, claim and setting, the printed one first
Verdicts = dict[EvidenceSource, list[list[Verdict | None]]]


def judged(suite: str, chosen: Sequence[Claim] | None = None) -> Verdicts:
    """Return the verdicts of every source on some claims, or on all."""
    chosen = claims() if chosen is None else chosen
    return {source: source.judged(chosen) for source in sources(suite)}


def sources(suite: str) -> tuple[EvidenceSource, ...]:
    """Return the real models, the suite's own, and the paper's checkpoints if run."""
    printed, both = (PAPER,), settings_shown(suite)
    images, texts = (partial(Claim.on_real_model, real=role) for role in (VISION, REAL))
    result = [
        EvidenceSource("real_images", "ViT-S/14, real images", suite, printed, images),
        EvidenceSource("real_encoder", "MiniLM, real texts", suite, both, texts),
        EvidenceSource("second_encoder", "MPNet, real texts", suite, both, Claim.on_second_encoder),
        EvidenceSource("real_language", "SmolLM2, chats", suite, printed, Claim.on_language_model),
        EvidenceSource(suite, TITLES.get(suite, f"{suite} suite"), suite, both),
    ]
    if suite != PAPER and any(Evidence(PAPER, role, pool).was_run for role, pool in PRINTED):
        result.append(EvidenceSource(PAPER, TITLES[PAPER], PAPER, printed))
    return tuple(result)


def judge(claim: Claim, suite: str, setting: str, folder: Path | None = None) -> Verdict:
    """Return the verdict on one claim from the results of a suite, with FeatCal at one setting."""
    parts = _parts(claim, suite, setting, folder)
    if parts is not None:
        verdicts = {name: judge(part, suite, setting, folder) for name, part in parts.items()}
        return _judge_parts(claim, verdicts)
    evidence = Evidence(suite, claim.role, claim.pool, folder)
    if claim.kind == "spreads":
        return _judge_spread(claim, side_rows(claim, side_columns(claim.left), setting, evidence))
    if claim.kind in ("together", "apart"):
        return _judge_gains(claim, setting, evidence)
    compared = measured_sum(claim, setting, evidence)
    if compared is None:
        return Verdict(claim, "not run")
    margin = compared.value - claim.by
    if claim.kind == "level":
        margin = claim.within - abs(compared.value)
    word = _word(margin, 0.0 if claim.kind == "checked" else compared.noise)
    detail = _detail(claim, compared, evidence.machine(claim.file))
    if claim.kind == "checked":
        wanted = {"statement": claim.where.get("statement", ""), "quantity": "applies"}
        wanted["method"] = side_columns(claim.left).get("method")
        applies = select(evidence.table(claim.file), wanted)
        never = len(applies) and not applies["value"].any()  # its condition was met in no case
        word = "vacuous" if never else "holds" if margin >= 0 else word
        return Verdict(claim, word, margin, compared.noise, False, compared.pairing, detail)
    return Verdict(
        claim, word if compared.has_error else "one run", margin, compared.noise, compared.one_run,
        compared.pairing, detail,
        (2 * math.sqrt(compared.seed_variance), 2 * math.sqrt(compared.training_variance)),
    )  # fmt: skip


def _judge_gains(claim: Claim, setting: str, evidence: Evidence) -> Verdict:
    """Judge if gains in cosine and accuracy go together over tasks, or clearly apart on some task.

    Together: Pearson's r is positive by two standard errors, 2 √((1 − r²)/(T − 2)).
    """
    frame, sides = evidence.table(claim.file), []
    for side in map(side_columns, (claim.left, claim.right)):
        run_at = _setting_run(frame, side["method"], setting, claim.kind, claim.file)
        sides.append(side | {"setting": run_at})
    gains = evidence.gains(*sides)
    if gains.empty:
        return Verdict(claim, "not run")
    if claim.kind == "apart":
        return _judge_opposition(claim, gains, evidence.title)
    r = float(gains["cosine"].corr(gains["accuracy"])) if len(gains) >= FEWEST else math.nan
    if math.isnan(r):
        text = f"{len(gains)} tasks are too few for a correlation"
        return Verdict(claim, "within noise", one_run=True, detail=text)
    room = 2 * math.sqrt((1 - r * r) / (len(gains) - 2))
    text = f"correlation {r:+.2f} over {len(gains)} tasks"
    return Verdict(claim, _word(r, room), r, room, one_run=True, detail=text)


def _judge_opposition(claim: Claim, gains: pd.DataFrame, title: Callable[[str], str]) -> Verdict:
    """Judge if accuracy clearly rises while cosine clearly falls on some task."""
    slightly = gains[(gains["accuracy"] > 0) & (gains["cosine"] < 0)]
    higher = slightly["accuracy"] > slightly["accuracy_noise"]
    clearly = slightly[higher & (-slightly["cosine"] > slightly["cosine_noise"])]
    never = gains["cosine"] > gains["cosine_noise"]
    never |= -gains["accuracy"] > gains["accuracy_noise"]
    word = "holds" if len(clearly) else "does not hold" if never.all() else "within noise"
    in_order = (clearly if len(clearly) else slightly).sort_values("cosine").itertuples()
    cases = [f"{title(row.task)} {row.cosine:+.3f} and {row.accuracy:+.1f}" for row in in_order]
    text = f"cosine and accuracy: {'; '.join(cases)}" if cases else "no task of that kind"
    return Verdict(claim, word, one_run=True, detail=text)


def _word(margin: float, room: float) -> str:
    """Return the verdict on a margin that is decided beyond `room`, two standard errors."""
    return "holds" if margin > room else "does not hold" if margin < -room else "within noise"


def _parts(claim: Claim, suite: str, setting: str, folder: Path | None) -> dict[str, Claim] | None:
    """Return the single claims of a claim about several, by name; None for any other claim."""
    if claim.over:
        parts = {}
        for name, part in claim.parts.items():
            inner = _parts(part, suite, setting, folder) or {"": part}
            parts |= {", ".join(filter(None, (name, n))): single for n, single in inner.items()}
        return parts
    if claim.kind in ("order", "weaker"):
        return _merger_pairs(claim, suite, setting, folder)
    if not claim.each:
        return None
    evidence = Evidence(suite, claim.role, claim.pool, folder)
    title = _VALUE_TITLES.get(claim.each, evidence.title)
    if claim.each in _VALUE_TITLES:
        sides = [side for _, side in claim.terms if claim.each not in side]
        frames = [side_rows(claim, side, setting, evidence) for side in sides]
        values = list(dict.fromkeys(value for rows in frames for value in rows[claim.each]))
    else:
        values = evidence.tasks
    return {title(value): claim.for_value(value) for value in values if claim.includes(value)}


def _merger_pairs(claim: Claim, suite: str, setting: str, folder: Path | None) -> dict[str, Claim]:
    """Return a claim for each two mergers that are clearly unequal; none where one was not run."""
    pairs = {}
    for first, second in combinations(UPSTREAMS, 2):
        merged = replace(claim, kind="above", left=[first, "merged"], right=[second, "merged"])
        before = judge(merged, suite, setting, folder)
        if before.word == "not run":
            return {}
        is_order = claim.kind == "order"
        left, right = (first, second) if before.met == is_order else (second, first)
        if before.word != "within noise":
            kind = "above" if is_order else "gain"
            sides = {"left": (left, "featcal"), "right": (right, "featcal")}
            name = f"{UPSTREAMS[left]} over {UPSTREAMS[right]}"
            pairs[name] = replace(claim, kind=kind, **sides)
    return pairs


def measured_sum(claim: Claim, setting: str, evidence: Evidence) -> statistics.WeightedSum | None:
    """Return the weighted sum of means; None if one has no rows, or sides have different tasks."""
    estimates: list[tuple[float, statistics.Estimate]] = []
    tasks: dict[Any, set[str]] = {}
    for weight, side in claim.terms:
        rows = side_rows(claim, side, setting, evidence)
        mean = statistics.estimate(rows, claim.measure)
        if mean is None:
            return None
        if "task" in rows and "task" not in side:
            side_tasks = set(rows["task"])
            if tasks.setdefault((side.get("role"), side.get("pool")), side_tasks) != side_tasks:
                return None
        estimates.append((weight, mean))
    return statistics.difference(estimates)


def side_rows(claim: Claim, side: dict[str, Any], setting: str, evidence: Evidence) -> pd.DataFrame:
    """Return the rows of one side, from the experiment and file that it names, or the claim's."""
    columns = dict(side)
    experiment = (columns.pop("role", evidence.role), columns.pop("pool", evidence.pool))
    kind = columns.pop("file", claim.file)
    if experiment != (evidence.role, evidence.pool):
        evidence = Evidence(evidence.suite, *experiment, evidence.folder)
    frame = evidence.table(kind)
    wanted = claim.where | columns
    if wanted.get("task") == "shown":
        wanted["task"] = evidence.shown_task
    if wanted.get("block") == "last":
        wanted["block"] = max((b for b in frame["block"].unique() if b not in INSIDE), default="")
    if wanted.get("setting") == "studied":
        main = studied_setting(evidence.suite, evidence.role)
        wanted["setting"] = main if setting == main else "not run"
    if wanted.get("method") in CALIBRATED and "setting" in frame:
        run_at = _setting_run(frame, wanted["method"], setting, claim.kind, kind)
        wanted.setdefault("setting", run_at)
    rows = select(frame, {column: value for column, value in wanted.items() if value != "all"})
    if wanted.get("block") == "all":
        rows = rows[~rows["block"].isin(INSIDE)]
    if claim.measure not in rows:
        return rows.iloc[:0]
    measured = rows[claim.measure].notna()  # energy without a GPU: not measured
    return rows if measured.all() else rows[measured]


def _setting_run(frame: pd.DataFrame, method: str, setting: str, kind: str, file: str) -> str:
    """Return FeatCal's setting, or the tuned one where it alone was run and does not matter.

    λ, ρ and α change neither a time nor an exact statement. Adapters are not tuned: they have the
    published size, or the one in proportion where it alone was run.
    """
    if method == "featcal" and kind != "checked" and not file.endswith(RUN_RECORD):
        return setting
    run = set(select(frame, {"method": method})["setting"])
    wanted = (setting,) if method == "featcal" else ("paper", setting)
    return next((name for name in (*wanted, "suite") if name in run), setting)


def _detail(claim: Claim, compared: statistics.WeightedSum, machine: str) -> str:
    """Return the means as text, the claimed size, and the machine of a measured file."""
    if claim.where.get("quantity") in STATED:
        return STATED[claim.where["quantity"]].format(*compared.means)
    detail = means_text(claim.kind, compared.means, DIGITS.get(claim.measure, 3))
    left, right = compared.means[:2]
    if claim.times != 1:
        detail += f": {right / left:.1f} times, {claim.times:g} claimed"
    elif claim.direction == "lower" and left != right != 0:
        detail += f", {abs(1 - left / right):.0%} {'lower' if left < right else 'higher'}"
    if claim.by:
        detail += f": {compared.value:+z.1f}, {claim.by:+g} required"
    if claim.kind == "level":
        detail += f": {compared.value:+z.1f}, allowed ±{claim.within:g}"
    return f"{detail}; {machine}" if machine else detail


def _judge_parts(claim: Claim, parts: dict[str, Verdict]) -> Verdict:
    """Judge a claim about several: it holds if each part holds, and fails if one part fails."""
    counts, count = Counter(part.word for part in parts.values()), len(parts)
    order = ("not run", "does not hold", "within noise", "one run", "holds")
    whole = next((word for word in order if counts[word]), "not run")
    if whole == "not run":
        run = count - counts["not run"]
        detail = f"{run} of {count} run, {counts['holds']} hold" if run else ""
        return Verdict(claim, whole, detail=detail)
    # the clearest failure, or the part that is least clear
    sign = 1 if whole == "does not hold" else -1
    deciding = {name: part for name, part in parts.items() if part.word == whole}
    name, part = min(deciding.items(), key=lambda item: item[1].margin + sign * item[1].noise)
    unit = "pairs of mergers" if claim.kind in ("order", "weaker") else claim.unit
    met = sum(v.met for v in parts.values())
    texts = {
        f"{counts['holds']} of {count} {unit}": counts["holds"] or not counts["one run"],
        f"as claimed on {met} of {count} {unit}": counts["one run"],
        f"fails on {counts['does not hold']}": counts["does not hold"],
        f"{counts['within noise']} within noise": counts["within noise"],
    }
    shown = [text for text, is_shown in texts.items() if is_shown]
    least = {"holds": "least clear", "one run": "least"}.get(whole, "decided by")
    detail = f"{', '.join(shown)}; {least}: {name}"
    one_run, pairings = any(v.one_run for v in parts.values()), {v.pairing for v in parts.values()}
    pairing = pairings.pop() if len(pairings) == 1 else "partly unpaired"
    return Verdict(claim, whole, part.margin, part.noise, one_run, pairing, detail)


def _judge_spread(claim: Claim, rows: pd.DataFrame) -> Verdict:
    """Judge if more than half of the blocks have at least a tenth of the largest block's drift."""
    if rows.empty:
        return Verdict(claim, "not run")
    blocks = rows.groupby("block")[claim.measure].mean()
    large, count = int((blocks >= SHARE * blocks.max()).sum()), len(blocks)
    detail = f"{large} of {count} blocks"
    return Verdict(claim, "one run", large - count / 2, 0.0, detail=detail)
