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

from reproduction.report.claims import (
    CALIBRATED,
    DIGITS,
    INSIDE,
    Claim,
    claims,
    in_words,
    named,
    studied_setting,
)
from reproduction.report.evidence import MEASURED, Evidence, select
from reproduction.report.paper import PRINTED, REAL, TEXT_PRINTED, VISION
from reproduction.report.statistics import (
    Estimate,
    WeightedSum,
    apart,
    difference,
    estimate,
    together,
)
from reproduction.report.tables import UPSTREAMS, settings_shown

WORDS = ("holds", "does not hold", "within noise", "one run", "vacuous", "not run")
DECIDED = ("holds", "does not hold")
_titled: dict[str, Callable[[Any], str]] = {
    "samples": "n = {:g}".format,
    "corruption": lambda kind: str(kind).replace("_", " "),
}
PAPER = "paper"
TITLES = {"mini": "Synthetic images and texts", PAPER: "The paper’s checkpoints"}  # of sources
STATED = {  # what a theorem's numbers are, by the quantity of its rows
    "digits": "both sides share {:.1f} digits, {:.0f} required", "room": "the sides are {:.1f} % apart where they come closest",
}  # fmt: skip
# "drift appears in a block": at least a tenth of the largest, so that no single block carries it
SHARE = 0.1


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim; of `one run` no error is known, only the direction of the margin."""

    claim: Claim
    word: str
    margin: float = math.nan  # positive where the claim is met
    noise: float = math.nan  # two standard errors
    one_run: bool = False  # whether a side was drawn with one seed only
    pairing: str = ""  # where errors were added as if models had different test rows
    detail: str = ""  # the numbers
    drawn: float | None = None  # the noise's part from seeds, of a single sum of means

    @property
    def fragile(self) -> bool:
        """Return True if the verdict is decided, but by less than three standard errors."""
        return self.word in DECIDED and 0 < abs(self.margin) < 1.5 * self.noise

    @property
    def met(self) -> bool:
        """Return True if the margin points the claimed way, whatever its error."""
        return self.margin > 0


@dataclass(frozen=True)
class EvidenceSource:
    """The results that verdicts come from."""

    key: str  # its name in claims.json
    title: str
    suite: str
    settings: tuple[str, ...]  # at which it was run, the printed ones first
    counterpart: Callable[[Claim], Claim | None] = lambda claim: claim  # about these models

    def judged(self, chosen: Iterable[Claim]) -> list[list[Verdict | None]]:
        """Return verdicts at each setting, the printed one first; None for a claim without a counterpart."""
        own = [self.counterpart(claim) for claim in chosen]
        return [[claim and judge(claim, self.suite, at) for claim in own] for at in self.settings]


# by source and setting, the printed one first
Verdicts = dict[EvidenceSource, list[list[Verdict | None]]]


def judged(suite: str, chosen: Sequence[Claim] | None = None) -> Verdicts:
    """Return the verdicts of every source on some claims, or on all."""
    found = claims() if chosen is None else chosen
    return {source: source.judged(found) for source in sources(suite)}


def sources(suite: str) -> tuple[EvidenceSource, ...]:
    """Return the real models, the suite's own, and the paper's checkpoints if run."""
    printed, both = (PAPER,), settings_shown(suite)
    found = [
        EvidenceSource(
            "real_images", "ViT-S/14, real images", suite, printed, lambda one: one.on(VISION)
        ),
        EvidenceSource("real_encoder", "MiniLM, real texts", suite, both, lambda one: one.on(REAL)),
        EvidenceSource("second_encoder", "MPNet, real texts", suite, both, Claim.on_second_encoder),
        EvidenceSource("real_language", "SmolLM2, chats", suite, printed, Claim.on_language_model),
        EvidenceSource(suite, TITLES.get(suite, f"{suite} suite"), suite, both),
    ]
    places = (PRINTED | TEXT_PRINTED) if suite != PAPER else {}
    run = any(Evidence(PAPER, role, pool).was_run for role, pool in places)
    return (*found, *([EvidenceSource(PAPER, TITLES[PAPER], PAPER, printed)] if run else []))


def judge(claim: Claim, suite: str, setting: str, folder: Path | None = None) -> Verdict:
    """Return the verdict on one claim from the results of a suite, with FeatCal at one setting."""
    parts = _parts(claim, suite, setting, folder)
    if parts is not None:
        return _every(claim, {n: judge(part, suite, setting, folder) for n, part in parts.items()})
    evidence = Evidence(suite, claim.role, claim.pool, folder)
    if claim.kind == "spreads":
        return _spreads(claim, rows_of(claim, named(claim.left), setting, evidence))
    if claim.kind in ("together", "apart"):
        given = {"setting": setting, "kind": claim.kind, "file": claim.file}
        run_at = partial(_run_at, evidence.table(claim.file), **given)
        sides = map(named, (claim.left, claim.right))
        found = evidence.gains(*(one | {"setting": run_at(one["method"])} for one in sides))
        if found.empty:
            return Verdict(claim, "not run")
        both = together(found) if claim.kind == "together" else apart(found, evidence.title)
        word, margin, allowed, detail = both
        return Verdict(claim, word, margin, allowed, True, "", detail)
    compared = measured_sum(claim, setting, evidence)
    if compared is None:
        return Verdict(claim, "not run")
    margin = compared.value - claim.by
    if claim.kind == "level":
        margin = claim.within - abs(compared.value)
    room = 0.0 if claim.kind == "checked" else compared.noise
    word = "holds" if margin > room else "does not hold" if margin < -room else "within noise"
    detail = _detail(claim, compared, evidence.machine(claim.file))
    if claim.kind == "checked":
        wanted = {"statement": claim.where.get("statement", ""), "quantity": "applies"}
        wanted["method"] = named(claim.left).get("method")
        share = select(evidence.table(claim.file), wanted)
        never = len(share) and not share["value"].any()  # its condition was met in no case
        word = "vacuous" if never else "holds" if margin >= 0 else word
        return Verdict(claim, word, margin, compared.noise, False, compared.pairing, detail)
    return Verdict(
        claim, word if compared.known else "one run", margin, compared.noise, compared.one_run,
        compared.pairing, detail, drawn=2 * math.sqrt(compared.drawn),
    )  # fmt: skip


def _parts(claim: Claim, suite: str, setting: str, folder: Path | None) -> dict[str, Claim] | None:
    """Return one claim about each, by name, of a claim about several; None for any other claim."""
    if claim.over:
        found = {}
        for name, part in claim.parts.items():
            inner = _parts(part, suite, setting, folder) or {"": part}
            found |= {", ".join(filter(None, (name, n))): one for n, one in inner.items()}
        return found
    if claim.kind in ("order", "weaker"):
        return _pairs(claim, suite, setting, folder)
    if not claim.each:
        return None
    evidence = Evidence(suite, claim.role, claim.pool, folder)
    title = _titled.get(claim.each, evidence.title)
    if claim.each in _titled:
        sides = [side for _, side in claim.terms if claim.each not in side]
        rows = [rows_of(claim, side, setting, evidence) for side in sides]
        values = list(dict.fromkeys(value for own in rows for value in own[claim.each]))
    else:
        values = evidence.tasks
    return {title(value): claim.of(value) for value in values if claim.is_about(value)}


def _pairs(claim: Claim, suite: str, setting: str, folder: Path | None) -> dict[str, Claim]:
    """Return a claim for each two mergers that are clearly unequal; none where one was not run."""
    found = {}
    for one, other in combinations(UPSTREAMS, 2):
        merged = replace(claim, kind="above", left=[one, "merged"], right=[other, "merged"])
        before = judge(merged, suite, setting, folder)
        if before.word == "not run":
            return {}
        first, second = (one, other) if before.met == (claim.kind == "order") else (other, one)
        if before.word != "within noise":
            kind = "above" if claim.kind == "order" else "gain"
            sides = {"left": (first, "featcal"), "right": (second, "featcal")}
            name = f"{UPSTREAMS[first]} over {UPSTREAMS[second]}"
            found[name] = replace(claim, kind=kind, **sides)
    return found


def measured_sum(claim: Claim, setting: str, evidence: Evidence) -> WeightedSum | None:
    """Return the weighted sum of means; None where one has no rows, or tasks differ in an experiment."""
    found: list[tuple[float, Estimate]] = []
    tasks: dict[Any, set[str]] = {}
    for weight, side in claim.terms:
        rows = rows_of(claim, side, setting, evidence)
        one = estimate(rows, claim.measure)
        if one is None:
            return None
        if "task" in rows and "task" not in side:
            own = set(rows["task"])
            if tasks.setdefault((side.get("role"), side.get("pool")), own) != own:
                return None
        found.append((weight, one))
    return difference(found)


def rows_of(claim: Claim, side: dict[str, Any], setting: str, evidence: Evidence) -> pd.DataFrame:
    """Return the rows of one side, from the experiment and file that it names, or the claim's."""
    own = dict(side)
    place = (own.pop("role", evidence.role), own.pop("pool", evidence.pool))
    kind = own.pop("file", claim.file)
    if place != (evidence.role, evidence.pool):
        evidence = Evidence(evidence.suite, *place, evidence.folder)
    frame = evidence.table(kind)
    wanted = claim.where | own
    if wanted.get("task") == "shown":
        wanted["task"] = evidence.shown
    if wanted.get("block") == "last":
        wanted["block"] = max((b for b in frame["block"].unique() if b not in INSIDE), default="")
    if wanted.get("setting") == "studied":
        main = studied_setting(evidence.suite, evidence.role)
        wanted["setting"] = main if setting == main else "not run"
    if wanted.get("method") in CALIBRATED and "setting" in frame:
        wanted.setdefault("setting", _run_at(frame, wanted["method"], setting, claim.kind, kind))
    rows = select(frame, {column: value for column, value in wanted.items() if value != "all"})
    if wanted.get("block") == "all":
        rows = rows[~rows["block"].isin(INSIDE)]
    if claim.measure not in rows:
        return rows.iloc[:0]
    measured = rows[claim.measure].notna()  # energy without a GPU: not measured
    return rows if measured.all() else rows[measured]


def _run_at(frame: pd.DataFrame, method: str, setting: str, kind: str, file: str) -> str:
    """Return FeatCal's setting, or the tuned one where it alone was run and does not matter.

    λ, ρ and α change neither a time nor an exact statement. Adapters are not tuned: they have the
    published size, or the one in proportion where it alone was run.
    """
    if method == "featcal" and kind != "checked" and not file.endswith(MEASURED):
        return setting
    run = set(select(frame, {"method": method})["setting"])
    wanted = (setting,) if method == "featcal" else ("paper", setting)
    return next((one for one in (*wanted, "suite") if one in run), setting)


def _detail(claim: Claim, compared: WeightedSum, machine: str) -> str:
    """Return the means in words, the claimed size, and the machine of a measured file."""
    if claim.where.get("quantity") in STATED:
        return STATED[claim.where["quantity"]].format(*compared.means)
    detail = in_words(claim.kind, compared.means, DIGITS.get(claim.measure, 3))
    ours, theirs = compared.means[:2]
    if claim.times != 1:
        detail += f": {theirs / ours:.1f} times, {claim.times:g} claimed"
    elif claim.direction == "lower" and ours != theirs != 0:
        detail += f", {abs(1 - ours / theirs):.0%} {'lower' if ours < theirs else 'higher'}"
    if claim.by:
        detail += f": {compared.value:+.1f}, {claim.by:+g} required"
    if claim.kind == "level":
        detail += f": {compared.value:+.1f}, allowed ±{claim.within:g}"
    return f"{detail}; {machine}" if machine else detail


def _every(claim: Claim, parts: dict[str, Verdict]) -> Verdict:
    """Judge a claim about several: it holds if each part holds, and fails if one part fails."""
    words, count = Counter(part.word for part in parts.values()), len(parts)
    order = ("not run", "does not hold", "within noise", "one run", "holds")
    whole = next((word for word in order if words[word]), "not run")
    if whole == "not run":
        run = count - words["not run"]
        detail = f"{run} of {count} run, {words['holds']} hold" if run else ""
        return Verdict(claim, whole, detail=detail)
    # the clearest failure, or the part that is least clear
    sign = 1 if whole == "does not hold" else -1
    deciding = {name: part for name, part in parts.items() if part.word == whole}
    name, part = min(deciding.items(), key=lambda item: item[1].margin + sign * item[1].noise)
    unit = "pairs of mergers" if claim.kind in ("order", "weaker") else claim.unit
    met = sum(v.met for v in parts.values())
    said = {
        f"{words['holds']} of {count} {unit}": words["holds"] or not words["one run"],
        f"as claimed on {met} of {count} {unit}": words["one run"],
        f"fails on {words['does not hold']}": words["does not hold"],
        f"{words['within noise']} within noise": words["within noise"],
    }
    counted = [text for text, shown in said.items() if shown]
    least = {"holds": "least clear", "one run": "least"}.get(whole, "decided by")
    detail = f"{', '.join(counted)}; {least}: {name}"
    one_run, pairings = any(v.one_run for v in parts.values()), {v.pairing for v in parts.values()}
    pairing = pairings.pop() if len(pairings) == 1 else "partly unpaired"
    return Verdict(claim, whole, part.margin, part.noise, one_run, pairing, detail)


def _spreads(claim: Claim, rows: pd.DataFrame) -> Verdict:
    """Judge if more than half of the blocks have at least a tenth of the largest block's drift."""
    if rows.empty:
        return Verdict(claim, "not run")
    blocks = rows.groupby("block")[claim.measure].mean()
    seen, count = int((blocks >= SHARE * blocks.max()).sum()), len(blocks)
    return Verdict(claim, "one run", seen - count / 2, 0.0, False, "", f"{seen} of {count} blocks")
