"""Shares of the gap between a merger and the experts, by number of tasks, beside the paper's own:
the table of the front page.

The paper's shares are computed from the printed cells of its rows, not from the printed averages,
one of which is not its row's.
"""

from reproduction.report.evidence import Evidence
from reproduction.report.html import PageOutput, note, table
from reproduction.report.page import Page
from reproduction.report.paper import (
    AVERAGE,
    IMAGES,
    PRINTED,
    SIZES,
    corrected_table,
    paper_row,
    paper_table,
)
from reproduction.report.tables import (
    NAMES,
    SETTING_LABELS,
    UPSTREAMS,
    average,
    settings_shown,
    share,
)

POOLS = {
    pool: table for (role, pool), table in PRINTED.items() if role == IMAGES
}  # number of tasks → the paper's table of it
STARTS = ("average", "task_arithmetic")
ORDER = ("featcal", "surgery", "prob_surgery")


def by_tasks(page: Page) -> PageOutput:
    """A row per merger and method, FeatCal's at every setting: the share with 8, 14 and 20 tasks
    here, and in the paper.
    """
    rows = []
    for upstream in STARTS:
        for method in ORDER:
            for setting in (
                settings_shown(page.suite)
                if method == "featcal"
                else settings_shown(page.suite)[:1]
            ):
                ours = [_said(measured(page, pool, upstream, method, setting)) for pool in POOLS]
                theirs = (
                    [_printed(number, upstream, method) for number in POOLS.values()]
                    if _main(page, setting)
                    else [""] * 3
                )
                name = f"{NAMES[method]}<small>{UPSTREAMS[upstream]}, {SETTING_LABELS[setting]}</small>"
                rows.append(
                    ("" if _main(page, setting) else "fc-reference", [name, *ours, *theirs])
                )
    head = [
        "From, at",
        *(f"{pool} tasks, here" for pool in POOLS),
        *(f"{pool} tasks, the paper" for pool in POOLS),
    ]
    caption = f"Share of the gap between merger and experts that is recovered, {SIZES[page.place[0]]} — {page.label}"
    return PageOutput(table(head, rows, caption, "fc-long") + note(words(page)))


def words(page: Page) -> str:
    """What the table says of FeatCal and of the adapters, from both mergers, in numbers of its
    own.
    """
    said = []
    for upstream in STARTS:
        apart = {method: _apart(page, upstream, method) for method in ORDER}
        if any(None in one for one in apart.values()):
            return "○ not run: a share needs the merger, what calibrates it, and the experts."
        adapters = [*apart["surgery"], *apart["prob_surgery"]]
        said.append(
            f"From {UPSTREAMS[upstream].lower()}, FeatCal’s shares at the {SETTING_LABELS[settings_shown(page.suite)[0]]} differ "
            f"from the paper’s by {_signed(apart['featcal'])} points, the adapters’ by {_signed(adapters)}."
        )
    return " ".join(said)


def measured(page: Page, pool: str, upstream: str, method: str, setting: str) -> float | None:
    """The share that one method recovers here; None where a model was not run."""
    keys = ((upstream, "merged", ""), (upstream, method, setting), ("", "expert", ""))
    found = [average(Evidence(page.suite, page.place[0], pool), key) for key in keys]
    return share(*(one and one.mean for one in found))


def printed(table: str, upstream: str, method: str, corrected: bool = False) -> float | None:
    """The same from the printed cells of the paper's rows; corrected: with what fits in place of
    what cannot be right.
    """
    keys, read = (
        ((upstream, "merged"), (upstream, method), ("", "expert")),
        corrected_table if corrected else paper_table,
    )
    return share(*(paper_row(table, *key, read=read).drop(AVERAGE).mean() for key in keys))


def _apart(page: Page, upstream: str, method: str) -> list[float | None]:
    """By how many points the share here is above the paper's, per number of tasks, at the main
    setting.
    """
    found: list[float | None] = []
    for pool, number in POOLS.items():
        here = measured(page, pool, upstream, method, settings_shown(page.suite)[0])
        there = printed(number, upstream, method)
        found.append(None if here is None or there is None else here - there)
    return found


def _main(page: Page, setting: str) -> bool:
    return setting == settings_shown(page.suite)[0]


def _printed(number: str, upstream: str, method: str) -> str:
    """As the printed cells have it, and below with cells corrected where that changes it."""
    said, mended = (
        _said(printed(number, upstream, method, corrected)) for corrected in (False, True)
    )
    return said if said == mended else f"{said}<small>{mended} corrected</small>"


def _said(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


def _signed(several: list[float | None]) -> str:
    values = [value for value in several if value is not None]
    low, high = (f"{value:+.1f}".replace("-", "−") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
