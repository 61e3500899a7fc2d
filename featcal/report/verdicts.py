"""What the results say of each claim: holds, does not hold, within noise, not run.

A margin decides only when it exceeds two standard errors (estimate.py). Our numbers are never compared with the paper's.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from featcal.report import gains
from featcal.report.claims import DIGITS, INSIDE, Claim, claims, main_setting
from featcal.report.estimate import estimate, noise
from featcal.report.evidence import Evidence, select
from featcal.report.margins import MARGINS, Side, named
from featcal.report.values import place_name

WORDS = ("holds", "does not hold", "within noise", "not run")
CALIBRATED = ("featcal", "surgery", "prob_surgery")
PARTS = {"task": "tasks", "samples": "numbers of images"}  # what a claim may be about each of
SHARE = 0.1  # "drift appears in a block": at least a tenth of the largest, so that no single block carries it


@dataclass(frozen=True)
class Verdict:
    """What the results say of one claim.

    margin: left minus right, positive where the claim's direction is met.  noise: two standard errors.  detail: the numbers.
    """

    claim: Claim
    word: str
    margin: float = float("nan")
    noise: float = float("nan")
    one_run: bool = False
    detail: str = ""


def judged(chosen: Iterable[Claim], suite: str, setting: str, folder: Path | None = None) -> list[Verdict]:
    """Verdicts on several claims."""
    return [judge(claim, suite, setting, folder) for claim in chosen]


def tables(suite: str, folder: Path | None = None) -> pd.DataFrame:
    """How many claims of each place of the paper hold, do not hold, are within noise, were not run."""
    counts: dict[str, Counter[str]] = {}
    for verdict in judged(claims(), suite, main_setting(suite), folder):
        counts.setdefault(verdict.claim.place, Counter())[verdict.word] += 1
    return pd.DataFrame([[counts[p][w] for w in WORDS] for p in counts], index=list(counts), columns=list(WORDS))


def judge(claim: Claim, suite: str, setting: str, folder: Path | None = None) -> Verdict:
    """The verdict on one claim from the result files of one suite, with FeatCal at one of its settings."""
    if claim.over:
        return _everywhere(claim, suite, setting, folder)
    if claim.kind in MARGINS:
        return _of_several(claim, suite, setting, folder)
    evidence = Evidence(suite, claim.role, claim.pool, folder)
    frame = select(evidence.table(claim.file), _where(claim, evidence))
    if claim.measure in frame:
        frame = frame.dropna(subset=[claim.measure])  # energy without a GPU: not measured
    if claim.where.get("block") == "all" and not frame.empty:
        frame = frame[~frame["block"].isin(INSIDE)]
    left, right = (select(frame, _selector(side, setting, frame)) for side in (claim.left, claim.right))
    if left.empty or right.empty or ("task" in frame and set(left["task"]) != set(right["task"])):
        return Verdict(claim, "not run")
    if claim.kind == "spreads":
        return _spreads(claim, left)
    if claim.kind == "falls":
        return _falls(claim, frame, left, right)
    if claim.kind == "level":
        return _level(_compare(claim, left, right))
    if claim.kind in ("together", "apart"):
        return _gains(claim, evidence, *(_selector(side, setting, frame) for side in (claim.left, claim.right)))
    if not claim.each:
        whole, machine = _compare(claim, left, right), evidence.machine(claim.file)
        return replace(whole, detail=f"{whole.detail}; {machine}") if machine else whole
    column = claim.each
    parts = {part: _compare(claim, left[left[column] == part], right[right[column] == part]) for part in left[column].unique()}
    return _every(claim, parts, PARTS[column], evidence.title if column == "task" else "n = {}".format)


def _selector(side: Side, setting: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Column values of one side; FeatCal and adapters are told apart by their settings where the file has them."""
    wanted = named(side)
    if wanted["method"] in CALIBRATED and "setting" in frame:
        wanted["setting"] = setting
    return wanted


def _where(claim: Claim, evidence: Evidence) -> dict[str, Any]:
    """The claim's extra columns, with `shown` and `last` filled in from the files and `all` left out."""
    wanted = dict(claim.where)
    if wanted.get("task") == "shown":
        wanted["task"] = evidence.shown
    if wanted.get("block") == "last":
        blocks = [b for b in evidence.table(claim.file)["block"].unique() if b not in INSIDE]
        wanted["block"] = max(blocks, default="")
    return {column: value for column, value in wanted.items() if value != "all"}


def _compare(claim: Claim, left: pd.DataFrame, right: pd.DataFrame) -> Verdict:
    ours, theirs = estimate(left, claim.measure), estimate(right, claim.measure)
    if ours is None or theirs is None:
        return Verdict(claim, "not run")
    margin = (ours.mean - theirs.mean) * (-1 if claim.direction == "lower" else 1)
    allowed = noise(ours, theirs)
    digits = DIGITS.get(claim.measure, 3)
    detail = f"{ours.mean:.{digits}f} against {theirs.mean:.{digits}f}"
    if claim.direction == "lower" and theirs.mean:
        detail += f", {abs(1 - ours.mean / theirs.mean):.0%} {'lower' if ours.mean < theirs.mean else 'higher'}"
    return Verdict(claim, _word(margin, allowed), margin, allowed, ours.one_run or theirs.one_run, detail)


def _word(margin: float, allowed: float) -> str:
    return "holds" if margin > allowed else "does not hold" if margin < -allowed else "within noise"


def _of_several(claim: Claim, suite: str, setting: str, folder: Path | None) -> Verdict:
    """A claim about more than two models, each read from the experiment that its side names (default: the claim's)."""
    margin_of = MARGINS[claim.kind]
    found, tasks = [], []
    for side in margin_of.models(claim.left, claim.right, claim.than):
        place = {"role": claim.role, "pool": claim.pool} | named(side)
        frame = Evidence(suite, place["role"], place["pool"], folder).table(claim.file)
        rows = select(frame, _selector(place, setting, frame))
        found.append(estimate(rows, claim.measure))
        if "task" not in place:
            tasks.append((place["role"], str(place["pool"]), frozenset(rows["task"])))
    known = [e for e in found if e is not None]
    if len(known) < len(found) or len(set(tasks)) > len({t[:2] for t in tasks}):
        return Verdict(claim, "not run")
    margin = margin_of.margin([e.mean for e in known])
    allowed = margin_of.noise(known)
    detail = margin_of.words([e.mean for e in known])
    return Verdict(claim, _word(margin, allowed), margin, allowed, any(e.one_run for e in known), detail)


def _everywhere(claim: Claim, suite: str, setting: str, folder: Path | None) -> Verdict:
    """A claim about several experiments: holds when it holds in each, does not hold when one clearly says so."""
    parts = {
        place_name(role, str(pool)): judge(replace(claim, role=role, pool=str(pool), over=[]), suite, setting, folder)
        for role, pool in claim.over
    }
    if any(part.word == "not run" for part in parts.values()):
        return Verdict(claim, "not run")
    return _every(claim, parts, claim.parts, str)


def _every(claim: Claim, parts: dict[Any, Verdict], unit: str, title: Callable[[Any], str]) -> Verdict:
    """Holds when it holds in every part, does not hold when one part clearly says so."""
    words = Counter(part.word for part in parts.values())
    whole = "does not hold" if words["does not hold"] else "holds" if words["holds"] == len(parts) else "within noise"
    name, worst = min(parts.items(), key=lambda item: item[1].margin - item[1].noise)
    digits = DIGITS.get(claim.measure, 3)
    least = f"{title(name)}, {worst.margin:+.{digits}f}"
    detail = f"clear of noise on {words['holds']} of {len(parts)} {unit}; least clear: {least}"
    return Verdict(claim, whole, worst.margin, worst.noise, any(part.one_run for part in parts.values()), detail)


def _level(compared: Verdict) -> Verdict:
    """Holds when the two sides differ by no more than noise, either way."""
    return replace(compared, word="holds" if compared.word == "within noise" else "does not hold")


def _falls(claim: Claim, frame: pd.DataFrame, left: pd.DataFrame, right: pd.DataFrame) -> Verdict:
    """Holds when the left point of a sweep lies further below its curve's chosen value than the right one below its own."""
    ends = []
    for rows in (left, right):
        curve = select(frame, {name: rows[name].iloc[0] for name in ("upstream", "setting", "parameter")})
        ends += [estimate(select(curve, {"chosen": 1})), estimate(rows)]
    found = [end for end in ends if end is not None]
    if len(found) < len(ends):
        return Verdict(claim, "not run")
    ours, theirs = found[0].mean - found[1].mean, found[2].mean - found[3].mean
    margin, allowed = ours - theirs, 2 * math.sqrt(sum(end.variance for end in found))
    one_run = any(end.one_run for end in found)
    return Verdict(claim, _word(margin, allowed), margin, allowed, one_run, f"falls by {ours:.1f} against {theirs:.1f}")


def _spreads(claim: Claim, rows: pd.DataFrame) -> Verdict:
    """Holds when more than half of the blocks have at least a tenth of the largest block's drift."""
    blocks = rows.groupby("block")[claim.measure].mean()
    seen = int((blocks >= SHARE * blocks.max()).sum())
    word = "holds" if 2 * seen > len(blocks) else "does not hold"
    return Verdict(claim, word, seen - len(blocks) / 2, 0.0, False, f"{seen} of {len(blocks)} blocks")


def _gains(claim: Claim, evidence: Evidence, left: dict[str, Any], right: dict[str, Any]) -> Verdict:
    """Of two gains, cosine and accuracy: whether they go together over tasks, or one comes without the other."""
    found = gains.gains(evidence, left, right)
    if found.empty:
        return Verdict(claim, "not run")
    word, margin, allowed, detail = gains.together(found) if claim.kind == "together" else gains.apart(found, evidence)
    return Verdict(claim, word, margin, allowed, True, detail)
