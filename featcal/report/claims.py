"""The paper's claims as sentences, and what the results say of each: holds, does not hold, within noise, not run.

A margin decides only when it exceeds two standard errors (estimate.py). Our numbers are never compared with the paper's.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from featcal.report.estimate import Estimate, estimate, noise
from featcal.report.evidence import Evidence, select
from featcal.report.values import AVERAGE, PAPER_MODELS, paper_table
from featcal.settings import from_mapping

WORDS = ("holds", "does not hold", "within noise", "not run")
CALIBRATED = ("featcal", "surgery", "prob_surgery")
INSIDE = ("embeddings", "features")  # rows of a drift file that are no blocks
DIGITS = {"value": 1, "seconds": 1, "memory_mib": 0}  # of a measure in words; others have three
PARTS = {"task": "tasks", "samples": "numbers of images"}  # what a claim may be about each of
SHARE = 0.1  # "drift appears in a block": at least a tenth of the largest, so that no single block carries it


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper and the comparison that answers it; the words are explained in claims.yaml."""

    id: str
    place: str
    role: str
    pool: str
    sentence: str
    source: str
    left: Any
    right: Any
    kind: str = "above"
    file: str = "scores"
    measure: str = "value"
    direction: str = "higher"
    each: str = ""
    start: Any = None
    where: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    paper: str = ""
    abstract: bool = False


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


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim of claims.yaml, in its order. Raises: UnknownKey or BadSetting for an entry of another shape."""
    sections = yaml.safe_load(files("featcal.report").joinpath("claims.yaml").read_text(encoding="utf-8"))
    found = []
    for place, section in sections.items():
        shared = {"place": place, "role": section["role"], "pool": str(section["pool"]), "table": section.get("table", "")}
        found += [from_mapping(Claim, shared | entry, f"claims.yaml {entry.get('id')}") for entry in section["claims"]]
    return tuple(found)


def main_setting(suite: str) -> str:
    """Which FeatCal settings a suite's verdicts are counted at: its own, or the paper's in the suite `paper`."""
    return "paper" if suite == "paper" else "suite"


def judge(claim: Claim, suite: str, setting: str, folder: Path | None = None) -> Verdict:
    """The verdict on one claim from the result files of one suite, with FeatCal at one of its settings."""
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
    if claim.kind == "most":
        return _most(claim, left, right, select(frame, _selector(claim.start, setting, frame)))
    if not claim.each:
        whole, machine = _compare(claim, left, right), evidence.machine(claim.file)
        return replace(whole, detail=f"{whole.detail}; {machine}") if machine else whole
    column = claim.each
    parts = {part: _compare(claim, left[left[column] == part], right[right[column] == part]) for part in left[column].unique()}
    return _every(claim, parts, evidence)


def judged(chosen: Iterable[Claim], suite: str, setting: str, folder: Path | None = None) -> list[Verdict]:
    """Verdicts on several claims."""
    return [judge(claim, suite, setting, folder) for claim in chosen]


def tables(suite: str, folder: Path | None = None) -> pd.DataFrame:
    """How many claims of each place of the paper hold, do not hold, are within noise, were not run."""
    counts: dict[str, Counter[str]] = {}
    for verdict in judged(claims(), suite, main_setting(suite), folder):
        counts.setdefault(verdict.claim.place, Counter())[verdict.word] += 1
    return pd.DataFrame([[counts[p][w] for w in WORDS] for p in counts], index=list(counts), columns=list(WORDS))


def paper_says(claim: Claim) -> str:
    """The paper's own numbers for a claim, from its printed tables; the typed words where they are in no table of one model."""
    if claim.paper or not claim.table:
        return claim.paper
    frame = paper_table(claim.table)
    if claim.role in PAPER_MODELS and frame["model"].nunique() > 1:
        frame = frame[frame["model"] == PAPER_MODELS[claim.role]]
    pair = [select(frame, _selector(side, "", frame)).set_index("task")["value"] for side in (claim.left, claim.right)]
    if claim.each:
        met = (pair[0] > pair[1]).drop(AVERAGE)
        return f"{met.sum()} of {len(met)} tasks"
    return f"{pair[0][AVERAGE]:.1f} against {pair[1][AVERAGE]:.1f}"


def _selector(side: Any, setting: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Column values of one side; FeatCal and adapters are told apart by their settings where the file has them."""
    wanted = dict(side) if isinstance(side, dict) else dict(zip(("upstream", "method"), side, strict=True))
    if wanted["method"] in CALIBRATED and "setting" in frame:
        wanted["setting"] = setting
    return wanted


def _where(claim: Claim, evidence: Evidence) -> dict[str, Any]:
    """The claim's extra columns, with `shown` and `last` filled in from the files and `all` left out."""
    wanted = dict(claim.where)
    if wanted.get("task") == "shown":
        projection = evidence.table("projection")
        wanted["task"] = "" if projection.empty else projection["task"].iloc[0]
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
    word = "holds" if margin > allowed else "does not hold" if margin < -allowed else "within noise"
    digits = DIGITS.get(claim.measure, 3)
    detail = f"{ours.mean:.{digits}f} against {theirs.mean:.{digits}f}"
    if claim.direction == "lower" and theirs.mean:
        detail += f", {abs(1 - ours.mean / theirs.mean):.0%} {'lower' if ours.mean < theirs.mean else 'higher'}"
    return Verdict(claim, word, margin, allowed, ours.one_run or theirs.one_run, detail)


def _most(claim: Claim, left: pd.DataFrame, right: pd.DataFrame, start: pd.DataFrame) -> Verdict:
    """Holds when the left side lies beyond the middle between the start and the right side."""
    ours, whole, before = (estimate(rows, claim.measure) for rows in (left, right, start))
    if ours is None or whole is None or before is None:
        return Verdict(claim, "not run")
    middle = Estimate((whole.mean + before.mean) / 2, (whole.variance + before.variance) / 4, None, whole.seeds)
    margin, allowed = ours.mean - middle.mean, noise(ours, middle)
    word = "holds" if margin > allowed else "does not hold" if margin < -allowed else "within noise"
    gains = f"{ours.mean - before.mean:+.1f} of {whole.mean - before.mean:+.1f} points"
    return Verdict(claim, word, margin, allowed, ours.one_run or whole.one_run, gains)


def _every(claim: Claim, parts: dict[Any, Verdict], evidence: Evidence) -> Verdict:
    """Holds when it holds on every part (task, number of images), does not hold when one part clearly says so."""
    words = Counter(part.word for part in parts.values())
    whole = "does not hold" if words["does not hold"] else "holds" if words["holds"] == len(parts) else "within noise"
    part, worst = min(parts.items(), key=lambda item: item[1].margin - item[1].noise)
    name = evidence.title(part) if claim.each == "task" else f"n = {part}"
    least = f"{name}, {worst.margin:+.{DIGITS.get(claim.measure, 3)}f}"
    detail = f"clear of noise on {words['holds']} of {len(parts)} {PARTS[claim.each]}; least clear: {least}"
    return Verdict(claim, whole, worst.margin, worst.noise, any(part.one_run for part in parts.values()), detail)


def _spreads(claim: Claim, rows: pd.DataFrame) -> Verdict:
    """Holds when more than half of the blocks have at least a tenth of the largest block's drift."""
    blocks = rows.groupby("block")[claim.measure].mean()
    seen = int((blocks >= SHARE * blocks.max()).sum())
    word = "holds" if 2 * seen > len(blocks) else "does not hold"
    return Verdict(claim, word, seen - len(blocks) / 2, 0.0, False, f"{seen} of {len(blocks)} blocks")
