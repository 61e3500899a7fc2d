"""What the results say of each claim: holds, does not hold, within noise, one run, not run; of a
theorem also vacuous.

A margin decides only when it exceeds two standard errors (estimate.py). Our numbers are never
compared with the paper's.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.report.claims import (
    CALIBRATED,
    DIGITS,
    INSIDE,
    OTHER,
    Claim,
    named,
    studied_setting,
    told,
)
from reproduction.report.evidence import MEASURED, Evidence, results_folder, select
from reproduction.report.paper import PRINTED, TEXT_PRINTED
from reproduction.report.statistics import (
    Difference,
    Estimate,
    apart,
    difference,
    estimate,
    together,
)
from reproduction.report.tables import UPSTREAMS

WORDS = ("holds", "does not hold", "within noise", "one run", "vacuous", "not run")
DECIDED = ("holds", "does not hold")
_titled: dict[str, Callable[[Any], str]] = {
    "samples": "n = {:g}".format,
    "corruption": lambda kind: str(kind).replace("_", " "),
}
PAPER = "paper"
TITLES = {"mini": "Synthetic images and texts", PAPER: "The paper’s checkpoints"}  # of sources
STATED = {  # what a theorem's numbers are, by the quantity of its rows
    "digits": "both sides share {:.1f} digits, asked for {:.0f}", "room": "the sides are {:.1f} % apart where they come closest",
}  # fmt: skip
# "drift appears in a block": at least a tenth of the largest, so that no single block carries it
SHARE = 0.1


@dataclass(frozen=True)
class Verdict:
    """What the results say of one claim.

    margin: positive where the claim is met.   noise: two standard errors.   one_run: whether a side
    was drawn with one seed only.
    pairing: says where errors of models with the same test rows were added as if the rows were
    others.   detail: the numbers.
    Of the word `one run` no error is known; which way the margin points is all there is.
    """

    claim: Claim
    word: str
    margin: float = float("nan")
    noise: float = float("nan")
    one_run: bool = False
    pairing: str = ""
    detail: str = ""

    @property
    def fragile(self) -> bool:
        """Return True if the verdict is decided, but by less than three standard errors."""
        return self.word in DECIDED and 0 < abs(self.margin) < 1.5 * self.noise

    @property
    def met(self) -> bool:
        """Whether the margin points the claimed way, whatever its error."""
        return self.margin > 0


@dataclass(frozen=True)
class Source:
    """The results that verdicts come from.

    key: its name in claims.json.   counterpart: returns the claim about these models, or None.
    """

    key: str
    title: str
    suite: str
    counterpart: Callable[[Claim], Claim | None] = lambda claim: claim

    def judged(
        self, chosen: Iterable[Claim], setting: str = PAPER, folder: Path | None = None
    ) -> list[Verdict | None]:
        """Return verdicts at one setting; None for a claim without a counterpart."""
        own = [self.counterpart(claim) for claim in chosen]
        found = iter(judged((claim for claim in own if claim), self.suite, setting, folder))
        return [next(found) if claim else None for claim in own]


def sources(suite: str) -> tuple[Source, ...]:
    """Return both real encoders, the suite's own models, and the paper's checkpoints if run."""
    found = [
        Source("real_encoder", "MiniLM, real texts", suite, lambda claim: claim.on_texts),
        Source("second_encoder", "MPNet, real texts", suite, lambda claim: claim.on_second_encoder),
        Source(suite, TITLES.get(suite, f"{suite} suite"), suite),
    ]
    run = suite != PAPER and any(
        Evidence(PAPER, role, pool).was_run for role, pool in PRINTED | TEXT_PRINTED
    )
    return (*found, *([Source(PAPER, TITLES[PAPER], PAPER)] if run else []))


def judged(
    chosen: Iterable[Claim], suite: str, setting: str, folder: Path | None = None
) -> list[Verdict]:
    """Verdicts on several claims; a page asks of the same ones several times, so each is judged
    once while no file changes.
    """
    folder = (folder or results_folder(suite)).resolve()
    stats = {file: file.stat() for file in folder.glob("*/*/*")}  # of every experiment's folder
    known = _known(
        folder,
        frozenset((file, one.st_mtime_ns, one.st_size) for file, one in stats.items()),
        suite,
        setting,
    )
    found = []
    for claim in chosen:
        words = repr(
            claim
        )  # a claim about texts is put together anew each time, and holds dictionaries
        if words not in known:
            known[words] = judge(claim, suite, setting, folder)
        found.append(known[words])
    return found


@lru_cache(maxsize=32)
def _known(
    folder: Path, files: frozenset[tuple[Path, int, int]], suite: str, setting: str
) -> dict[str, Verdict]:
    """Verdicts by claim, of one state of the result files."""
    return {}


def judge(claim: Claim, suite: str, setting: str, folder: Path | None = None) -> Verdict:
    """The verdict on one claim from the result files of one suite, with FeatCal at one of its
    settings.
    """
    parts = _parts(claim, suite, setting, folder)
    if parts is not None:
        return _every(
            claim, {name: judge(part, suite, setting, folder) for name, part in parts.items()}
        )
    evidence = Evidence(suite, claim.role, claim.pool, folder)
    if claim.kind == "spreads":
        return _spreads(claim, rows_of(claim, named(claim.left), setting, evidence))
    if claim.kind in ("together", "apart"):
        return _gains(claim, evidence, setting)
    compared = measured_sum(claim, setting, evidence)
    if compared is None:
        return Verdict(claim, "not run")
    margin = (
        (claim.within - abs(compared.value)) if claim.kind == "level" else compared.value - claim.by
    )
    if claim.kind == "checked":
        word = (
            "vacuous"
            if _never_applies(claim, evidence)
            else "holds"
            if margin >= 0
            else "does not hold"
        )
    else:
        word = _word(margin, compared.noise) if compared.known else "one run"
    detail = _told(claim, compared, evidence.machine(claim.file))
    drawn = compared.one_run and claim.kind != "checked"
    return Verdict(claim, word, margin, compared.noise, drawn, compared.pairing, detail)


def _parts(claim: Claim, suite: str, setting: str, folder: Path | None) -> dict[str, Claim] | None:
    """A claim about several as one claim about each, by name; None for a claim about one thing."""
    if claim.over:
        inner = {
            name: (part, _parts(part, suite, setting, folder)) for name, part in claim.parts.items()
        }
        return {
            ", ".join(filter(None, (name, n))): p
            for name, (part, own) in inner.items()
            for n, p in (own or {"": part}).items()
        }
    evidence = Evidence(suite, claim.role, claim.pool, folder)
    if claim.kind in ("order", "weaker"):
        return _pairs(claim, suite, setting, folder)
    if not claim.each:
        return None
    if claim.each in ("task", OTHER):
        values, title = evidence.tasks, evidence.title  # type: list[Any], Callable[[Any], str]
    else:
        rows = [
            rows_of(claim, side, setting, evidence)
            for _, side in claim.terms
            if claim.each not in side
        ]
        values, title = (
            list(dict.fromkeys(v for one in rows for v in one[claim.each])),
            _titled[claim.each],
        )
    return {title(value): claim.of(value) for value in values if claim.is_about(value)}


def _pairs(claim: Claim, suite: str, setting: str, folder: Path | None) -> dict[str, Claim]:
    """Pairs of mergers that are clearly unequal before calibration, each with what is claimed of
    it; none where one was not run.

    order: the better merger is the better one after calibration.   weaker: the worse one gains
    more.
    """
    found = {}
    for one, other in combinations(UPSTREAMS, 2):
        before = judge(
            replace(claim, kind="above", left=[one, "merged"], right=[other, "merged"]),
            suite,
            setting,
            folder,
        )
        if before.word == "not run":
            return {}
        better, worse = ((u, "featcal") for u in ((one, other) if before.met else (other, one)))
        left, right = (better, worse) if claim.kind == "order" else (worse, better)
        if before.word != "within noise":
            kind = "above" if claim.kind == "order" else "gain"
            found[f"{UPSTREAMS[left[0]]} over {UPSTREAMS[right[0]]}"] = replace(
                claim, kind=kind, left=left, right=right
            )
    return found


def measured_sum(claim: Claim, setting: str, evidence: Evidence) -> Difference | None:
    """The claim's weighted sum of means; None where a model has no rows, or two of an experiment
    have other tasks.
    """
    found: list[tuple[float, Estimate]] = []
    tasks: dict[Any, set[str]] = {}
    for weight, side in claim.terms:
        rows = rows_of(claim, side, setting, evidence)
        place = (side.get("role"), side.get("pool"), "task" in rows and "task" not in side)
        one = estimate(rows, claim.measure)
        if one is None or (
            place[2] and tasks.setdefault(place, set(rows["task"])) != set(rows["task"])
        ):
            return None
        found.append((weight, one))
    return difference(found)


def rows_of(claim: Claim, side: dict[str, Any], setting: str, evidence: Evidence) -> pd.DataFrame:
    """The rows of one side, of the experiment and file it names (default: the claim's).

    FeatCal and adapters are told apart by their settings where the file has them, unless the side
    or the claim names one.
    """
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
        wanted["setting"] = studied_setting(evidence.suite)
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
    """Return the setting asked for, or the tuned one where it alone was run and does not matter.

    λ, ρ and α change neither a time nor an exact statement; adapters then have their other size.
    """
    run = set(select(frame, {"method": method})["setting"])
    free = method != "featcal" or kind == "checked" or file.endswith(MEASURED)
    return "suite" if free and setting not in run and "suite" in run else setting


def _word(margin: float, allowed: float) -> str:
    return "holds" if margin > allowed else "does not hold" if margin < -allowed else "within noise"


def _told(claim: Claim, compared: Difference, machine: str) -> str:
    """The means in words, what was asked for beyond them, and the machine of a measured file."""
    if claim.where.get("quantity") in STATED:
        return STATED[claim.where["quantity"]].format(*compared.means)
    detail = told(claim.kind, compared.means, DIGITS.get(claim.measure, 3))
    ours, theirs = compared.means[:2]
    if claim.times != 1:
        detail += f": {theirs / ours:.1f} times, asked for {claim.times:g}"
    elif claim.direction == "lower" and ours != theirs != 0:
        detail += f", {abs(1 - ours / theirs):.0%} {'lower' if ours < theirs else 'higher'}"
    if claim.by:
        detail += f": {compared.value:+.1f}, asked for {claim.by:+g}"
    if claim.kind == "level":
        detail += f": {compared.value:+.1f}, allowed ±{claim.within:g}"
    return f"{detail}; {machine}" if machine else detail


def _never_applies(claim: Claim, evidence: Evidence) -> bool:
    """Whether a statement's condition was looked for and met in no case at all."""
    wanted = {
        "statement": claim.where.get("statement", ""),
        "quantity": "applies",
        "method": named(claim.left).get("method"),
    }
    share = select(evidence.table(claim.file), wanted)
    return bool(len(share)) and not share["value"].any()


def _every(claim: Claim, parts: dict[str, Verdict]) -> Verdict:
    """Holds when it holds in every part, does not hold when one part clearly says so; shown is the
    part that decided it.
    """
    words = Counter(part.word for part in parts.values())
    whole = next(
        (w for w in ("not run", "does not hold", "within noise", "one run", "holds") if words[w]),
        "not run",
    )
    if whole == "not run":
        run = len(parts) - words["not run"]
        told = f"{run} of {len(parts)} run, {words['holds']} hold" if run else ""
        return Verdict(claim, whole, detail=told)
    deciding = {name: part for name, part in parts.items() if part.word == whole}
    sign = (
        1 if whole == "does not hold" else -1
    )  # the clearest failure, or the part that is least clear
    name, part = min(deciding.items(), key=lambda item: item[1].margin + sign * item[1].noise)
    unit = "pairs of mergers" if claim.kind in ("order", "weaker") else claim.unit
    counted = (
        [f"{words['holds']} of {len(parts)} {unit}"]
        if words["holds"] or not words["one run"]
        else []
    )
    counted += (
        [f"as claimed on {sum(v.met for v in parts.values())} of {len(parts)} {unit}"]
        if words["one run"]
        else []
    )
    counted += [f"fails on {words['does not hold']}"] if words["does not hold"] else []
    counted += [f"{words['within noise']} within noise"] if words["within noise"] else []
    least = "least clear" if whole == "holds" else "least" if whole == "one run" else "decided by"
    detail = f"{', '.join(counted)}; {least}: {name}"
    one_run, pairings = any(v.one_run for v in parts.values()), {v.pairing for v in parts.values()}
    pairing = pairings.pop() if len(pairings) == 1 else "partly unpaired"
    return Verdict(claim, whole, part.margin, part.noise, one_run, pairing, detail)


def _spreads(claim: Claim, rows: pd.DataFrame) -> Verdict:
    """Whether more than half of the blocks have at least a tenth of the largest block's drift."""
    if rows.empty:
        return Verdict(claim, "not run")
    blocks = rows.groupby("block")[claim.measure].mean()
    seen = int((blocks >= SHARE * blocks.max()).sum())
    return Verdict(
        claim, "one run", seen - len(blocks) / 2, 0.0, False, "", f"{seen} of {len(blocks)} blocks"
    )


def _gains(claim: Claim, evidence: Evidence, setting: str) -> Verdict:
    """Of two gains, cosine and accuracy: whether they go together over tasks, or one comes without
    the other.
    """
    sides = (named(side) | {"setting": setting} for side in (claim.left, claim.right))
    found = evidence.gains(*sides)
    if found.empty:
        return Verdict(claim, "not run")
    word, margin, allowed, detail = (
        together(found) if claim.kind == "together" else apart(found, evidence.title)
    )
    return Verdict(claim, word, margin, allowed, True, "", detail)
