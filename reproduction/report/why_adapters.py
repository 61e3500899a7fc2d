"""Why adapters win here: the shares of the gap by number of tasks, ours and the paper's, drawn, in
a table and in words.

Every sentence is made from the results it speaks of; where something was not run, it is said
instead.
"""

from typing import Any

import pandas as pd

from reproduction.report.claims import main_setting
from reproduction.report.evidence import select
from reproduction.report.html import PageOutput, note, table
from reproduction.report.page import Page
from reproduction.report.paper import IMAGES, PRINTED
from reproduction.report.studies import RIVALS, samples
from reproduction.report.tables import SETTING_LABELS, UPSTREAMS, paper_recovered
from reproduction.report.task_counts import (
    MERGERS,
    PAPER,
    POOLS,
    TRAINED,
    fewer,
    lead,
    series,
    shares,
    studied,
)

NAMES = RIVALS | {"mean_shift": "Mean shift", "merged": "Task arithmetic", "expert": "Experts"}
KIND = "task_counts"
MISPRINT = 5  # points of share from which a correction of the paper’s averages is told


def missing(page: Page) -> PageOutput:
    """What stands in the place of a piece whose study was not run."""
    return PageOutput(
        note(f"○ not run: the study of drawn parts is not in the results of the {page.label}.")
    )


def ran(page: Page) -> bool:
    """Whether the study has rows."""
    return not studied(page).empty


def way(method: str, setting: str) -> str:
    """A method with its setting in words."""
    if method == "featcal":
        return f"FeatCal, {SETTING_LABELS[setting]}"
    return f"{NAMES[method]}, {'training inputs' if setting.endswith('_train') else 'unlabelled inputs'}"


def headline(page: Page) -> PageOutput:
    """What the page comes to: FeatCal's share beside the paper's, and the adapters' beside
    theirs.
    """
    if not ran(page):
        return missing(page)
    found, lines = shares(page), []
    for upstream in MERGERS:
        sides = [_own(found, upstream, "featcal", page, paper) for paper in (False, True)]
        sides += [better(found, upstream, page, paper) for paper in (False, True)]
        ours, printed, best, other = ({n: one.share for n, one in side.items()} for side in sides)
        counts = sorted(set(ours) & set(printed))
        if counts:
            apart = max(abs(ours[n] - printed[n]) for n in counts)
            ahead = [
                sum(side[n] > theirs[n] for n in counts)
                for side, theirs in ((best, ours), (other, printed))
            ]
            told = (
                f"From {UPSTREAMS[upstream].lower()} with {listed(counts)} tasks FeatCal recovers {percent(ours, counts)} of the "
                f"gap here and {percent(printed, counts)} in the paper: {apart:.0f} points apart at most. The better of Surgery "
                f"and ProbSurgery recovers {percent(best, counts)} here and {percent(other, counts)} there; of these "
                f"{len(counts)} numbers of tasks it is ahead of FeatCal at {ahead[0]} here, and at {ahead[1]} there."
            )
            lines.append(
                note(
                    f"<strong>{page.label[0].upper()}{page.label[1:]}.</strong> {told}{misprinted(upstream)}"
                )
            )
    return PageOutput("".join(lines)) if lines else missing(page)


def misprinted(upstream: str) -> str:
    """Shares that the paper's averages give as printed, where corrected ones give quite another."""
    told = ""
    for (role, pool), number in PRINTED.items():
        for method in ("featcal", *TRAINED) if role == IMAGES else ():
            printed, mended = (
                paper_recovered(number, upstream, corrected, method=method)
                for corrected in (False, True)
            )
            if printed is not None and mended is not None and abs(printed - mended) > MISPRINT:
                told += f" As printed, the paper’s averages would give {NAMES[method]} {printed:.0f} % with {pool} tasks "
                told += f"instead of {mended:.0f} %."
    return told


def better(found: pd.DataFrame, upstream: str, page: Page, paper: bool = False) -> dict[int, Any]:
    """The larger share of the two trained adapters by number of tasks: ours, or the paper's."""
    best: dict[int, Any] = {}
    for method in TRAINED:
        for count, one in _own(found, upstream, method, page, paper).items():
            best[count] = max(best.get(count, one), one, key=lambda share: share.share)
    return best


def _own(
    found: pd.DataFrame, upstream: str, method: str, page: Page, paper: bool = False
) -> dict[int, Any]:
    """A method's share by number of tasks at the main settings: ours, or the paper's."""
    own = {
        "upstream": upstream,
        "method": method,
        "setting": "" if paper else main_setting(page.suite),
    }
    return {
        one.tasks: one
        for one in select(found[(found["source"] == PAPER) == paper], own).itertuples()
    }


def percent(values: dict[int, float], counts: list[int]) -> str:
    """Shares at these numbers of tasks, as 70 / 58 / 41 %."""
    return " / ".join(f"{values[n]:.0f}" if n in values else "–" for n in counts) + " %"


def listed(words: list[Any]) -> str:
    """8, 14 and 20."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def by_number(page: Page) -> PageOutput:
    """Shares of everything by number of tasks as a table, ours and the paper's, and what they do
    from few tasks to many.
    """
    if not ran(page):
        return missing(page)
    found, parts = shares(page), []
    counts = sorted(set(found["tasks"]))
    for upstream in MERGERS:
        rows = []
        for method, setting in series(page):
            own = select(found, {"upstream": upstream, "method": method, "setting": setting})
            here = {one.tasks: one for one in own.itertuples()}
            rows.append(("", [way(method, setting), *(cell(here.get(n)) for n in counts)]))
        for method in ("featcal", *TRAINED):
            there = _own(found, upstream, method, page, paper=True)
            rows.append(
                (
                    "fc-reference",
                    [f"{NAMES[method]}, in the paper", *(cell(there.get(n)) for n in counts)],
                )
            )
        caption = f"{UPSTREAMS[upstream]}: share of the gap recovered (%) by number of tasks; small: least and most of the drawn "
        parts.append(
            table(["", *map(str, counts)], rows, f"{caption}parts — {page.label}", "fc-long")
        )
        parts.append(note(trend(found, upstream, page)))
    if fewer(page):
        drawn, pools = samples(page, KIND), samples(page)
        told = f"Drawn parts had {drawn} {page.inputs} of each task, whole pools {pools}: only pools compare with one another."
        parts.append(note(f"{told} What stands further below is of {drawn}."))
    return PageOutput("".join(parts))


def cell(one: Any) -> str:
    """A share, with its range where several parts were drawn."""
    if one is None:
        return "–"
    among = f"<small>{one.least:.0f} to {one.most:.0f}</small>" if one.least < one.most else ""
    return f"{one.share:.0f}{among}"


def trend(found: pd.DataFrame, upstream: str, page: Page) -> str:
    """In words, what FeatCal's share and the better adapter's do from the fewest tasks to the most,
    and who is ahead where.
    """
    ours, best = _own(found, upstream, "featcal", page), better(found, upstream, page)
    counts = sorted(set(ours) & set(best))
    alike = [count for count in counts if ours[count].source == POOLS] if fewer(page) else counts
    if len(alike) < 2:
        return "○ not run: one number of tasks only."
    few, many = alike[0], alike[-1]
    both = {"FeatCal’s": ours, "the better adapter’s": best}
    told = [
        f"{name} from {own[few].share:.0f} to {own[many].share:.0f} %" for name, own in both.items()
    ]
    ahead: dict[str, list[int]] = {"FeatCal": [], "the better adapter": [], "neither": []}
    for count in counts:
        margin, room = lead(ours[count].mean, best[count].mean)
        ahead[
            "FeatCal" if margin > room else "the better adapter" if margin < -room else "neither"
        ].append(count)
    where = [f"{name} at {listed(those)}" for name, those in ahead.items() if those]
    clear = f"Ahead by more than two standard errors: {'; '.join(where)} tasks."
    return f"From {few} to {many} tasks the share goes: {listed(told)}. {clear}"
