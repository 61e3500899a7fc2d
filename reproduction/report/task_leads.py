"""Why adapters win here, task by task: final drift and its mean, shares against the number of
classes, the paper's own lead.

All on task arithmetic of the whole pool, at the suite's main settings. Every sentence is made from
the results it speaks of.
"""

from html import escape
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence
from reproduction.report.figures import one_panel
from reproduction.report.gains import correlation
from reproduction.report.html import PageOutput, fold, note, table
from reproduction.report.page import Page
from reproduction.report.task_counts import (
    ADAPTERS,
    TRAINED,
    accuracies,
    better_adapter,
    classes,
    drifts,
    lead,
    printed_leads,
    share_of_task,
    whole_pool,
)
from reproduction.report.why_adapters import NAMES, listed, missing, ran

MOST = 3  # tasks in which a lead is said to sit


def tasks_of(page: Page) -> list[str]:
    """Tasks of the pool, in the suite's order."""
    return list(dict.fromkeys(whole_pool(page)["task"]))


def drift_parts(page: Page) -> PageOutput:
    """The squared drift of final features split into its per-task mean and the rest, and who undoes
    which part.
    """
    found = {row.method: row for row in drifts(page).itertuples()} if ran(page) else {}
    if not found:
        return missing(page)
    rows = []
    for method, row in found.items():
        values = [f"{value:.4f}" for value in (row.drift, row.mean_drift, row.rest)]
        rows.append(("", [NAMES[method], *values, f"{100 * row.mean_drift / row.drift:.0f} %"]))
    head = ["", "Squared drift", "its per-task mean", "the rest", "mean’s part"]
    caption = f"Squared distance of unit-length final features to the expert’s, mean over tasks — {page.label}"
    return PageOutput(
        table(head, rows, caption, "fc-long") + note(undone(found)) + _each_task(page, list(found))
    )


def undone(found: dict[str, Any]) -> str:
    """In words, how much of each part of the merged model's drift each method undoes, and which
    part tells them apart.
    """
    start, told = found["merged"], []
    left = {
        method: (row.mean_drift / start.mean_drift, row.rest / start.rest)
        for method, row in found.items()
    }
    for method in [m for m in ("featcal", *ADAPTERS) if m in found]:
        mean, rest = (100 * (1 - part) for part in left[method])
        told.append(f"{NAMES[method]} {mean:.0f} % of the mean and {rest:.0f} % of the rest")
    share = 100 * start.mean_drift / start.drift
    text = f"The per-task mean is {share:.0f} % of the merged model’s squared drift. Undone of it: {'; '.join(told)}."
    for method in [m for m in TRAINED if m in found and "featcal" in found]:
        parts = [
            name
            for name, i in (("the mean", 0), ("the rest", 1))
            if left[method][i] < left["featcal"][i]
        ]
        text += f" {NAMES[method]} undoes more than FeatCal of {listed(parts) if parts else 'neither part'}."
    return f"{text} Drift was measured once, so no error is known of these shares."


def _each_task(page: Page, methods: list[str]) -> str:
    """The mean's part and the whole of every task, one click away."""
    ours, rows = page.evidence, []
    for task in tasks_of(page):
        by_method = {row.method: row for row in drifts(page, [task]).itertuples()}
        cells = [
            f"{by_method[m].drift:.3f}<small>{by_method[m].mean_drift:.3f} mean</small>"
            for m in methods
        ]
        rows.append(("", [escape(ours.title(task)), *cells]))
    caption = f"Squared drift by task, and its mean’s part — {page.label}"
    return fold("Task by task", table(["", *(NAMES[m] for m in methods)], rows, caption))


def drift_bars(page: Page) -> PageOutput:
    """The same drawn: what is left of the mean, and of the rest."""
    return page.drawn(_drift_bars(page), "squared drift in two parts")


def _drift_bars(page: Page) -> Figure | None:
    found = drifts(page)
    if found.empty:
        return None
    with one_panel(0.5 * len(found) + 1.4) as (figure, axes):
        names = [NAMES[method] for method in found["method"]]
        axes.barh(names, found["mean_drift"], color="#D55E00", label="per-task mean")
        look: dict[str, Any] = {
            "color": "#BBBBBB",
            "hatch": "//",
            "edgecolor": "white",
            "label": "the rest",
        }
        axes.barh(names, found["rest"], left=found["mean_drift"], **look)
        axes.invert_yaxis()
        axes.set(xlabel="squared drift of unit-length features (no unit)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
        return figure


def by_classes(page: Page) -> PageOutput:
    """Shares of every task's gap beside its number of classes, and whether the adapters' lead goes
    with that number.
    """
    if not ran(page):
        return missing(page)
    ours, counts = page.evidence, classes(page)
    methods = ("featcal", *TRAINED, "mean_shift")
    own = {
        task: [share_of_task(page, method, task) for method in methods] for task in tasks_of(page)
    }
    rows = []
    for task in sorted(own, key=lambda task: counts.get(task, 0)):
        cells = [f"{share:.0f}" if share == share else "–" for share in own[task]]
        rows.append(("", [escape(ours.title(task)), str(counts.get(task, "–")), *cells]))
    caption = f"Share of each task’s gap recovered (%), tasks by number of classes — {page.label}"
    head = ["", "Classes", *(NAMES[method] for method in methods)]
    return PageOutput(table(head, rows, caption) + note(with_classes(own, counts)))


def with_classes(own: dict[str, list[float]], counts: dict[str, int]) -> str:
    """In words, how the lead of the better trained adapter over FeatCal goes with the number of
    classes.
    """
    pairs = [
        (counts[task], max(shares[1:3]) - shares[0])
        for task, shares in own.items()
        if task in counts
    ]
    several = pd.DataFrame(pairs, columns=["classes", "lead"]).dropna()
    r, room = correlation(several["classes"], several["lead"])
    if room != room:
        return "○ not run: too few tasks for a correlation."
    word = (
        "grows with" if r > room else "shrinks with" if r < -room else "shows no clear relation to"
    )
    return (
        f"The better adapter’s lead over FeatCal, in share of a task’s gap, {word} the task’s number of classes: "
        f"correlation {r:+.2f} over {len(own)} tasks, two standard errors {room:.2f}."
    )


def among_all(page: Page) -> PageOutput:
    """Accuracy among the task's own classes and among those of all tasks of the pool."""
    if not ran(page):
        return missing(page)
    main = main_setting(page.suite)
    rows, measures = [], ("value", "union")
    for method in ("merged", "featcal", *TRAINED, "mean_shift", "expert"):
        pair = [
            accuracies(page, method, main if method in ("featcal", *ADAPTERS) else "", measure)
            for measure in measures
        ]
        rows.append(("", [NAMES[method], *(f"{one.mean:.1f}" if one else "–" for one in pair)]))
    total = sum(classes(page).values())
    head = ["", "Own classes", f"All {total} classes" if total else "All classes"]
    caption = (
        f"Average top-1 accuracy (%), among the classes of the task and of all tasks — {page.label}"
    )
    return PageOutput(table(head, rows, caption) + note(crowded(page)))


def crowded(page: Page) -> str:
    """In words, what becomes of the better adapter's lead where the answer may be a class of any
    task.
    """
    main = main_setting(page.suite)
    leads = [
        lead(better_adapter(page, measure=m), accuracies(page, "featcal", main, m))
        for m in ("value", "union")
    ]
    sure = ["beyond" if abs(margin) > room else "within" for margin, room in leads]
    told = [
        f"{margin:+.1f} points ({word} two standard errors)"
        for (margin, _), word in zip(leads, sure, strict=True)
    ]
    word = "larger" if leads[1][0] > leads[0][0] else "smaller"
    return (
        f"The better trained adapter stands at {told[0]} against FeatCal among the task’s own classes, at {told[1]} among all: "
        f"the margin is {word} where being told the task also keeps an adapter from the classes of the others."
    )


def paper_lead(page: Page) -> PageOutput:
    """By task, how far FeatCal stands above the better adapter on task arithmetic: in the paper's
    Table 1, and here.
    """
    ours, printed = page.evidence, printed_leads()
    main = main_setting(page.suite)
    here = {
        task: lead(accuracies(page, "featcal", main, task=task), better_adapter(page, task))
        for task in printed
    }
    rows = []
    for task in sorted(printed, key=lambda task: -printed[task]):
        margin, room = here[task]
        measured = (
            f"{margin:+.1f}<small>± {room:.1f}</small>"
            if margin == margin
            else '<span class="fc-none">not run</span>'
        )
        rows.append(("", [escape(ours.title(task)), f"{printed[task]:+.1f}", measured]))
    head = ["", "In the paper", "Here, ± two standard errors"]
    caption = f"FeatCal above the better of Surgery and ProbSurgery on task arithmetic (points) — {page.label}"
    return PageOutput(
        table(head, rows, caption)
        + note(sits(printed, {t: m for t, (m, _) in here.items() if m == m}, ours))
    )


def sits(printed: dict[str, float], here: dict[str, float], ours: Evidence) -> str:
    """In words, in which tasks the paper's lead sits, and what stands there here."""
    first = sorted(printed, key=lambda task: -printed[task])[:MOST]
    part = 100 * sum(printed[task] for task in first) / sum(printed.values())
    text = f"In the paper the lead is {sum(printed.values()) / len(printed):.1f} points on average over tasks; "
    text += f"{listed([ours.title(task) for task in first])} make up {part:.0f} % of it."
    if not set(first) <= set(here):
        return text + " ○ not run in results."
    others = [task for task in here if task not in first]
    means = [sum(here[task] for task in group) / len(group) for group in (first, others) if group]
    text += f" Here FeatCal stands {means[0]:+.1f} points against the better adapter on the tasks that play these"
    return text + (f", and {means[1]:+.1f} on the others." if others else ".")
