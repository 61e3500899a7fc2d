"""Why adapters win here: the shares of the gap by number of tasks, ours and the paper's, drawn, in a table and in words.

Every sentence is made from the results it speaks of; where something was not run, it is said instead.
"""

import math
from typing import Any

from matplotlib.figure import Figure

from featcal.report import study
from featcal.report.claims import main_setting
from featcal.report.evidence import Evidence
from featcal.report.markup import Shown, link, note, table
from featcal.report.show import commands, label, run_rows
from featcal.report.studies import RIVALS, STREAMS
from featcal.report.tables import LARGER, SETTING_LABELS, UPSTREAMS
from featcal.report.task_counts import (
    MERGERS,
    PAPER,
    POOL,
    POOLS,
    ROLE,
    STUDY,
    TRAINED,
    Share,
    series,
    shares,
    studied,
)

NAMES = RIVALS | {"mean_shift": "Mean shift", "merged": "Task arithmetic", "expert": "Experts"}
KIND = "task_counts"
MARKS: dict[str, dict[str, Any]] = {  # of Okabe and Ito; told apart in grey by marker and line
    STUDY: {"color": "#0072B2", "marker": "o"}, POOLS: {"color": "#0072B2", "marker": "o", "markerfacecolor": "white"},
    PAPER: {"color": "#444444", "marker": "X", "ls": (0, (1, 2))},
}  # fmt: skip


def missing(suite: str) -> Shown:
    """What stands in the place of a piece whose study was not run."""
    return Shown(note(f"○ not run: the study of drawn parts is not in the results of the {label(suite)}."))


def ran(suite: str) -> bool:
    """Whether the study has rows."""
    return not studied(suite).empty


def way(method: str, setting: str) -> str:
    """A method with its setting in words."""
    if method == "featcal":
        return f"FeatCal, {SETTING_LABELS[setting]}"
    return f"{NAMES[method]}, {STREAMS['train' if setting.endswith('_train') else 'test_unlabelled']}"


def headline(suite: str) -> Shown:
    """What the page comes to: FeatCal's share beside the paper's, and the adapters' beside theirs."""
    if not ran(suite):
        return missing(suite)
    found = shares(suite)
    lines = []
    for upstream in MERGERS:
        ours, printed = (by_tasks(found, upstream, "featcal", main_setting(suite), paper) for paper in (False, True))
        counts = sorted(set(ours) & set(printed))
        if counts:
            apart = max(abs(ours[n] - printed[n]) for n in counts)
            told = (
                f"From {UPSTREAMS[upstream].lower()} with {listed(counts)} tasks FeatCal recovers {percent(ours, counts)} of the "
            )
            told += f"gap to the experts here, and {percent(printed, counts)} in the paper: {apart:.0f} points apart at most. "
            best, other = (better(found, upstream, suite, paper) for paper in (False, True))
            ahead = [sum(side[n] > theirs[n] for n in counts) for side, theirs in ((best, ours), (other, printed))]
            told += f"It is ahead of FeatCal at {ahead[0]} of these {len(counts)} numbers of tasks here, and at {ahead[1]} there."
            lines.append(note(told))
    return Shown("".join(lines)) if lines else missing(suite)


def by_tasks(found: list[Share], upstream: str, method: str, setting: str, paper: bool = False) -> dict[int, float]:
    """Shares by number of tasks: ours at one setting, or the paper's."""
    key = (upstream, method, "" if paper else setting)
    return {s.tasks: s.share for s in found if (s.upstream, s.method, s.setting) == key and (s.source == PAPER) == paper}


def better(found: list[Share], upstream: str, suite: str, paper: bool = False) -> dict[int, float]:
    """The larger share of the two trained adapters by number of tasks."""
    both = [by_tasks(found, upstream, method, main_setting(suite), paper) for method in TRAINED]
    return {n: max(own.get(n, -math.inf) for own in both) for n in sorted(set(both[0]) | set(both[1]))}


def percent(values: dict[int, float], counts: list[int]) -> str:
    """Shares at these numbers of tasks, as 70 / 58 / 41 %."""
    return " / ".join(f"{values[n]:.0f}" if n in values else "–" for n in counts) + " %"


def listed(words: list[Any]) -> str:
    """8, 14 and 20."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def by_number(suite: str) -> Shown:
    """Shares of everything by number of tasks as a table, ours and the paper's, and what they do from few tasks to many."""
    if not ran(suite):
        return missing(suite)
    found, parts = shares(suite), []
    counts = sorted({one.tasks for one in found})
    for upstream in MERGERS:
        rows = []
        for method, setting in series(suite):
            here = {one.tasks: one for one in found if (one.upstream, one.method, one.setting) == (upstream, method, setting)}
            rows.append(("", [way(method, setting), *(cell(here.get(n)) for n in counts)]))
        for method in ("featcal", *TRAINED):
            own = by_tasks(found, upstream, method, "", paper=True)
            cells = [f"{own[n]:.0f}" if n in own else "–" for n in counts]
            rows.append(("fc-reference", [f"{NAMES[method]}, in the paper", *cells]))
        caption = (
            f"{UPSTREAMS[upstream]}: share of the gap recovered (%) by number of tasks; small: least and most of the drawn parts"
        )
        parts.append(
            table(["", *map(str, counts)], rows, f"{caption} — {label(suite)}", "fc-long") + note(trend(found, upstream, suite))
        )
    return Shown("".join(parts))


def cell(one: Share | None) -> str:
    """A share, with its range where several parts were drawn."""
    if one is None:
        return "–"
    among = f"<small>{one.least:.0f} to {one.most:.0f}</small>" if one.least < one.most else ""
    return f"{one.share:.0f}{among}"


def trend(found: list[Share], upstream: str, suite: str) -> str:
    """In words, what FeatCal's share and the better adapter's do from the fewest tasks to the most."""
    ours, best = by_tasks(found, upstream, "featcal", main_setting(suite)), better(found, upstream, suite)
    counts = sorted(set(ours) & set(best))
    if len(counts) < 2:
        return "○ not run: one number of tasks only."
    few, many = counts[0], counts[-1]
    told = [
        f"{name} from {own[few]:.0f} to {own[many]:.0f} %" for name, own in (("FeatCal’s", ours), ("the better adapter’s", best))
    ]
    change = (best[many] - ours[many]) - (best[few] - ours[few])
    word = "grows" if change > 0 else "shrinks"
    behind = [n for n in counts if ours[n] > best[n]]
    where = f"at {listed(behind)} tasks" if behind else "at no number of tasks"
    told_lead = f"the adapter’s lead {word} by {abs(change):.0f} points of share"
    return f"From {few} to {many} tasks the share goes: {told[0]}, {told[1]}; {told_lead}. FeatCal is ahead {where}."


def panels(suite: str) -> Shown:
    """The shares drawn: a row per method, a column per merger."""
    return study.drawn(_panels(suite), "shares of the gap by number of tasks", suite)


def _panels(suite: str) -> Figure | None:
    from featcal.report.figures import WIDTH, drawing

    found = shares(suite) if ran(suite) else []
    if not found:
        return None
    methods = ("featcal", *TRAINED, "mean_shift")
    with drawing():
        figure = Figure(figsize=(WIDTH, 9.6))
        grid = figure.subplots(len(methods), len(MERGERS), sharex=True, sharey=True, squeeze=False)
        for line, method in zip(grid, methods, strict=True):
            for axes, upstream in zip(line, MERGERS, strict=True):
                for number, setting in enumerate([s for m, s in series(suite) if m == method]):
                    own = [s for s in found if (s.upstream, s.method, s.setting) == (upstream, method, setting)]
                    _curve(axes, own, "-" if number == 0 else "--")
                _points(axes, [s for s in found if (s.upstream, s.method, s.source) == (upstream, method, PAPER)], PAPER)
                axes.set_title(f"{NAMES[method]},\n{UPSTREAMS[upstream]}", fontsize=12)
                axes.axhline(0, color="#333333", lw=1)
        counts = sorted({one.tasks for one in found})
        for axes in grid[-1]:
            axes.set(xscale="log", xlabel="tasks")
            axes.set_xticks(counts, list(map(str, counts)))
            axes.minorticks_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("share (%)")
        figure.tight_layout()
        return figure


def _curve(axes: Any, own: list[Share], dashes: str) -> None:
    """One setting of ours through drawn parts and larger pools; bars reach from the least part to the most."""
    axes.plot([s.tasks for s in own], [s.share for s in own], dashes, color=MARKS[STUDY]["color"], lw=1.8)
    for source in (STUDY, POOLS):
        _points(axes, [s for s in own if s.source == source], source)


def _points(axes: Any, those: list[Share], source: str) -> None:
    if those:
        bars = [[s.share - s.least for s in those], [s.most - s.share for s in those]]
        look = {"ls": "", "markersize": 7, "elinewidth": 1.0, "zorder": 3} | MARKS[source]
        axes.errorbar([s.tasks for s in those], [s.share for s in those], yerr=bars, **look)


def provenance(suite: str) -> Shown:
    """Files, run records and commands behind the page."""
    rows: list[tuple[str, list[str]]] = []
    for pool in (POOL, *LARGER):
        ours = Evidence(suite, ROLE, pool)
        kinds = ("task_counts.csv", "task_counts.settings.json", "task_counts.run.json") if pool == POOL else ("csv", "run.json")
        there = [ours.folder / f"{ROLE}-{pool}.{kind}" for kind in kinds]
        listed_files = ", ".join(link(f"../results/{suite}/{file.name}", file.name) for file in there if file.is_file())
        record = ours.record(KIND) if pool == POOL else ours.run_record
        rows += [("", [f"Results, {pool} tasks", listed_files or "none yet"]), *run_rows(record)]
    return Shown(table(["", ""], rows + commands("why_adapters"), f"Provenance — {label(suite)}", "fc-words"))
