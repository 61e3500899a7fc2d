"""Results in a form that other programs read: the headline experiment as DVC's metrics and plots,
and every claim as data.
"""

import math
from typing import Any

import pandas as pd

from reproduction.report.claims import INSIDE, Claim, claims, main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.statistics import estimate
from reproduction.report.tables import UPSTREAMS, average
from reproduction.report.verdicts import Verdict, judged, rows_of

ROLE, POOL, MERGER = (
    "clip_b32",
    "8",
    "task_arithmetic",
)  # Table 1; the merger that its curves are about
TASKS, BLOCKS = ("task", "merged", "featcal", "expert"), ("block", "merged", "featcal")


def metrics(ours: Evidence) -> dict[str, Any]:
    """Averages over tasks: by merger `merged` and `featcal` at the suite's main settings, and the
    experts'; only what was run.
    """
    found = {}
    for upstream in UPSTREAMS:
        keys = ((upstream, "merged", ""), (upstream, "featcal", main_setting(ours.suite)))
        found[upstream] = {
            key[1]: round(one.mean, 4) for key in keys if (one := average(ours, key))
        }
    expert = average(ours, ("", "expert", ""))
    return {name: values for name, values in found.items() if values} | (
        {"expert": round(expert.mean, 4)} if expert else {}
    )


def by_task(ours: Evidence) -> list[dict[str, Any]]:
    """Scores of each task: merged, calibrated and expert; only tasks that all three have."""
    scores = ours.table("scores")
    means = {
        method: select(scores, _of(method, ours)).groupby("task")["value"].mean()
        for method in TASKS[1:]
    }
    shared = pd.DataFrame(means).dropna().round(4).to_dict("index")
    return [{"task": task} | shared[task] for task in ours.tasks if task in shared]


def by_block(ours: Evidence) -> list[dict[str, Any]]:
    """Relative drift after each block, the mean over tasks, of the merged and the calibrated
    model.
    """
    drift = ours.table("drift")
    means = {
        m: select(drift, _of(m, ours)).groupby("block")["relative_drift"].mean() for m in BLOCKS[1:]
    }
    blocks = [
        block
        for block in means["merged"].index
        if block not in INSIDE and block in means["featcal"].index
    ]
    return [
        {"block": int(block) + 1} | {m: round(float(v[block]), 6) for m, v in means.items()}
        for block in sorted(blocks)
    ]


def _of(method: str, ours: Evidence) -> dict[str, str]:
    """The rows of one method at its main setting."""
    setting = main_setting(ours.suite) if method == "featcal" else ""
    return {"upstream": "" if method == "expert" else MERGER, "method": method, "setting": setting}


def claims_as_data(suite: str) -> dict[str, Any]:
    """Every claim with its verdict, margin and noise, by id, at the suite's main settings."""
    setting = main_setting(suite)
    return {
        "suite": suite,
        "setting": setting,
        "claims": {v.claim.id: _entry(v, suite) for v in judged(claims(), suite, setting)},
    }


def _entry(verdict: Verdict, suite: str) -> dict[str, Any]:
    """One claim; what is not known is null. Of a claim about several, margin and noise are those of
    the part that decided it.
    """
    claim = verdict.claim
    about = {
        "place": claim.place,
        "sentence": " ".join(claim.sentence.split()),
        "source": claim.source,
    }
    noise = {"total": _known(verdict.noise)} | _by_source(verdict, suite)
    said = {
        "verdict": verdict.word,
        "margin": _known(verdict.margin),
        "noise": noise,
        "drawn_once": verdict.one_run,
    }
    return (
        about
        | {"headline": claim.headline, "group": claim.group}
        | said
        | {"detail": verdict.detail}
    )


def _by_source(verdict: Verdict, suite: str) -> dict[str, float | None]:
    """Two standard errors of the margin by source, the draws and the test samples; their squares
    add up to the total's.
    """
    claim = verdict.claim
    if not _is_one_sum(claim) or not math.isfinite(verdict.noise):
        return {}
    ours = Evidence(suite, claim.role, claim.pool)
    several = [
        (w, estimate(rows_of(claim, side, main_setting(suite), ours), claim.measure))
        for w, side in claim.terms
    ]
    drawn = 4 * math.fsum(weight**2 * one.seed_variance for weight, one in several if one)
    return {
        "draws": _known(math.sqrt(drawn)),
        "test_samples": _known(math.sqrt(max(verdict.noise**2 - drawn, 0.0))),
    }


def _is_one_sum(claim: Claim) -> bool:
    """Whether the margin is one weighted sum of means, with an error of its own."""
    return (
        not claim.over
        and not claim.each
        and claim.kind in ("above", "gain", "closer", "falls", "level")
    )


def _known(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
