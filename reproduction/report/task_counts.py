"""Shares of the gap that are recovered, by number of tasks, task and classes; and final drift split
into its mean and the rest.

Numbers only: ours out of the study task_counts and the results of the larger pools, the paper's out
of its printed tables. Pages and sentences are in why_adapters.py and task_leads.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.page import Page
from reproduction.report.paper import AVERAGE, IMAGES, PRINTED, paper_row
from reproduction.report.statistics import Estimate, estimate, noise
from reproduction.report.studies import samples
from reproduction.report.tables import LARGER, average, paper_recovered, settings_shown

POOL = "8"
MERGERS = ("average", "task_arithmetic")
TRAINED = ("surgery", "prob_surgery")
ADAPTERS = ("mean_shift", *TRAINED)
STUDY, POOLS, PAPER = "drawn parts", "whole pool", "the paper"  # where a share comes from
SHARE = ["source", "upstream", "method", "setting", "tasks", "share", "least", "most", "mean"]


def studied(page: Page) -> pd.DataFrame:
    """Rows of the study; empty where it was not run."""
    return page.evidence.table("task_counts")


def classes(page: Page) -> dict[str, int]:
    """How many classes each task has, as the study found them."""
    return dict(
        Evidence(page.suite, page.place[0], POOL).settings("task_counts").get("classes", {})
    )


def series(page: Page) -> list[tuple[str, str]]:
    """Method and setting of everything whose share is told, the main setting of each method
    first.
    """
    main = main_setting(page.suite)
    featcal = [("featcal", setting) for setting in settings_shown(page.suite)]
    return featcal + [
        (method, main + stream) for method in (*TRAINED, "mean_shift") for stream in ("", "_train")
    ]


def fewer(page: Page) -> bool:
    """Whether the study had another number of samples than the pools: its parts are then no measure
    of what more tasks do.
    """
    drawn, pools = samples(page, "task_counts"), samples(page)
    return None not in (drawn, pools) and drawn != pools


def shares(page: Page) -> pd.DataFrame:
    """Every share there is: of drawn parts, of whole pools, and of the paper's tables, corrected
    where that can be told.

    The pool of eight is the study's own, on samples that no adapter saw; where the study had fewer
    samples, the main results'.

    Returns: columns of SHARE. share: which part of the way from merged model to experts one model
    goes, in percent, of averages
             over tasks. tasks: how many were merged. least, most: among the drawn parts, else the
             share itself. mean: of the model's accuracy; None for the paper's, whose error is not
             known.
    """
    found, rows = [], studied(page)
    pools = (POOL, *LARGER) if fewer(page) else LARGER
    counts = [count for count in sorted(set(rows["tasks"])) if not fewer(page) or count < int(POOL)]
    for upstream in MERGERS:
        for method, setting in series(page):
            found += [
                part
                for count in counts
                for part in _of_parts(rows, count, upstream, method, setting)
            ]
            for pool in pools:
                found += _of_pool(
                    Evidence(page.suite, page.place[0], pool), upstream, method, setting
                )
        for method in ("featcal", *TRAINED):
            for (role, pool), number in PRINTED.items():
                share = (
                    paper_recovered(number, upstream, corrected=True, method=method)
                    if role == IMAGES
                    else None
                )
                if share is not None:
                    found.append(
                        (PAPER, upstream, method, "", int(pool), share, share, share, None)
                    )
    return pd.DataFrame(found, columns=SHARE)


def _of_parts(
    rows: pd.DataFrame, count: int, upstream: str, method: str, setting: str
) -> list[tuple[Any, ...]]:
    """One model at one number of tasks of the study; nothing where it was not run."""
    sides = _sides(rows, upstream, method, setting, tasks=count)
    whole = _share(*(side["value"].mean() for side in sides))
    if math.isnan(whole):
        return []
    draws = sorted(set(select(rows, {"tasks": count})["draw"]))
    drawn = [_sides(rows, upstream, method, setting, tasks=count, draw=draw) for draw in draws]
    each = [_share(*(side["value"].mean() for side in own)) for own in drawn]
    return [
        (
            STUDY,
            upstream,
            method,
            setting,
            int(count),
            whole,
            min(each),
            max(each),
            estimate(sides[0]),
        )
    ]


def _of_pool(ours: Evidence, upstream: str, method: str, setting: str) -> list[tuple[Any, ...]]:
    """One model of a whole pool, scored on the whole test split, of images those that its adapters
    saw among them.
    """
    keys = [(upstream, method, setting), (upstream, "merged", ""), ("", "expert", "")]
    means = [average(ours, key) for key in keys]
    if any(mean is None for mean in means):
        return []
    share = _share(*(mean.mean for mean in means if mean))
    return [(POOLS, upstream, method, setting, int(ours.pool), share, share, share, means[0])]


def _sides(
    rows: pd.DataFrame, upstream: str, method: str, setting: str, **part: int
) -> list[pd.DataFrame]:
    """Rows of a model, of its merger and of the experts.   part: the number of tasks and the draw,
    where not all are meant.
    """
    model = {"upstream": upstream, "method": method, "setting": setting}
    return [
        select(rows, key | part)
        for key in (model, {"upstream": upstream, "method": "merged"}, {"method": "expert"})
    ]


def _share(value: float, merged: float, expert: float) -> float:
    """(value − merged) / (expert − merged) in percent; nan without a gap."""
    return 100 * (value - merged) / (expert - merged) if expert > merged else math.nan


def whole_pool(page: Page) -> pd.DataFrame:
    """Rows of the study on task arithmetic of all tasks of the pool, and those of the experts."""
    rows = studied(page)
    rows = select(rows, {"tasks": rows["tasks"].max()})
    return rows[rows["upstream"].isin(["", "task_arithmetic"])]


def accuracies(
    page: Page, method: str, setting: str, measure: str = "value", task: str = ""
) -> Estimate | None:
    """Mean accuracy of one model on task arithmetic of the whole pool, among the classes that
    `measure` says (value or union).
    """
    key = {"method": method, "setting": setting} | ({"task": task} if task else {})
    rows = select(whole_pool(page), key)
    return estimate(rows.assign(value=rows[measure]))


def lead(left: Estimate | None, right: Estimate | None) -> tuple[float, float]:
    """How far one mean is above another, and two standard errors of that."""
    return (left.mean - right.mean, noise(left, right)) if left and right else (math.nan, math.nan)


def better_adapter(page: Page, task: str = "", measure: str = "value") -> Estimate | None:
    """The better one of the two trained adapters at the suite's main settings."""
    found = [
        accuracies(page, method, main_setting(page.suite), measure, task) for method in TRAINED
    ]
    return max((one for one in found if one), key=lambda one: one.mean, default=None)


def share_of_task(page: Page, method: str, task: str) -> float:
    """The share of one task's gap on task arithmetic of the whole pool, at the suite's main
    settings.
    """
    rows = select(whole_pool(page), {"task": task})
    return _share(
        *(
            side["value"].mean()
            for side in _sides(rows, "task_arithmetic", method, main_setting(page.suite))
        )
    )


def printed_leads() -> dict[str, float]:
    """By task, how far FeatCal stands above the better adapter on task arithmetic in the paper's
    Table 1, in points.
    """
    featcal, *rivals = (
        paper_row("table01", "task_arithmetic", method).drop(AVERAGE)
        for method in ("featcal", *TRAINED)
    )
    return (featcal - np.maximum(*rivals)).to_dict()


def drifts(page: Page, tasks: Sequence[str] = ()) -> pd.DataFrame:
    """Squared drift of final features on task arithmetic of the whole pool, mean over tasks: its
    per-task mean, and the rest.

    Returns: a row per method at its main settings, columns method, drift, mean_drift, rest; none
    where the study was not run.
    """
    found = []
    for method in ("merged", "featcal", *ADAPTERS):
        rows = select(
            whole_pool(page),
            {"method": method, "setting": "" if method == "merged" else main_setting(page.suite)},
        )
        rows = rows[rows["task"].isin(tasks)] if tasks else rows
        if len(rows):
            whole, mean = rows["drift"].mean(), rows["mean_drift"].mean()
            found.append(
                {"method": method, "drift": whole, "mean_drift": mean, "rest": whole - mean}
            )
    return pd.DataFrame(found, columns=["method", "drift", "mean_drift", "rest"])
