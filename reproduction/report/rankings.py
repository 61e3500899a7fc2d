"""How mergers, adapters and FeatCal rank here and in the paper: averages, ranks, the order on every
merger, pairs in agreement.

Beside them the loss curves of what was trained. Ranks are compared, values are not. Every function
works without results.
"""

from dataclasses import dataclass
from html import escape
from itertools import combinations

from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import COLOURS, one_panel
from reproduction.report.html import PageOutput, chip, estimated, note, table
from reproduction.report.page import drawn, label
from reproduction.report.paper import IMAGES, REAL, SIZES, paper_value
from reproduction.report.statistics import Estimate, noise
from reproduction.report.tables import MERGERS, NAMES, UPSTREAMS, average, row_name, setting_label

TABLES = {REAL: "table01", IMAGES: "table01", "clip_l14": "table07"}
SHORT = {"merged": "the merger alone"} | NAMES


@dataclass(frozen=True)
class Ranked:
    """One row of the paper's table: what was measured here, and what is printed there."""

    upstream: str
    method: str
    ours: Estimate
    paper: float


def ranked(suite: str, role: str) -> list[Ranked]:
    """The rows of the paper's table that were run, best first here."""
    evidence, found = Evidence(suite, role, "8"), []
    for upstream in UPSTREAMS:
        for method in SHORT:
            ours = average(
                evidence, (upstream, method, "" if method == "merged" else main_setting(suite))
            )
            paper = paper_value(TABLES[role], upstream, method)
            if ours is not None and paper is not None:
                found.append(Ranked(upstream, method, ours, paper))
    return sorted(found, key=lambda row: -row.ours.mean)


def ranks(values: list[float]) -> list[int]:
    """1 for the highest; equal to one decimal is equal."""
    printed = [round(value, 1) for value in values]
    return [1 + sum(other > value for other in printed) for value in printed]


def ranking(suite: str) -> PageOutput:
    """The paper's sixteen rows, both sizes, at the suite's main settings."""
    return PageOutput("".join(_ranking(suite, role) for role in SIZES))


def _ranking(suite: str, role: str) -> str:
    rows = ranked(suite, role)
    if not rows:
        return note(f"○ not run: no scores of the {SIZES[role]} in the {label(suite)}.")
    here, there = ranks([row.ours.mean for row in rows]), ranks([row.paper for row in rows])
    body = []
    for i, row in enumerate(rows):
        following = rows[i + 1] if i + 1 < len(rows) else None
        clear = "–" if following is None else "✓" if _clear(row, following) else "≈"
        one = ' <small class="fc-run">one seed</small>' if row.ours.one_run else ""
        name = escape(row_name(row.upstream, row.method)) + one
        cells = [name, str(here[i]), estimated(row.ours), clear, str(there[i]), f"{row.paper:.1f}"]
        body.append(("fc-merger" if row.method == "merged" else "", cells))
    head = [
        "Method",
        "Rank here",
        "Average here (%)",
        "Clear of the next",
        "Rank in the paper",
        "Its average (%)",
    ]
    whose = f"{SIZES[role].capitalize()}, 8 tasks, {setting_label(main_setting(suite))} — {label(suite)}"
    return table(
        head, body, f"{whose}; the paper: Table {int(TABLES[role][-2:])}, other models and data"
    )


def orders(suite: str) -> PageOutput:
    """On every merger, the order of the methods here and in the paper; ≈ joins neighbours that
    noise cannot tell apart.
    """
    rows = []
    for role, size in SIZES.items():
        found = ranked(suite, role)
        for upstream in UPSTREAMS:
            own = [row for row in found if row.upstream == upstream]
            if len(own) > 1:
                printed = sorted(own, key=lambda row: -row.paper)
                there = " &gt; ".join(SHORT[row.method] for row in printed)
                rows.append(("", [f"{UPSTREAMS[upstream]}, {size}", _order(own), there]))
    if not rows:
        return PageOutput(note(f"○ not run: no mergers with rivals in the {label(suite)}."))
    caption = f"Best first; ≈: closer than two standard errors — {label(suite)}"
    return PageOutput(table(["On", "Here", "In the paper"], rows, caption, "fc-words"))


def _clear(row: Ranked, following: Ranked) -> bool:
    """Whether one row is above another by more than two standard errors."""
    return row.ours.mean - following.ours.mean > noise(row.ours, following.ours)


def _order(rows: list[Ranked]) -> str:
    words = SHORT[rows[0].method]
    for row, following in zip(rows, rows[1:], strict=False):
        sign = "&gt;" if _clear(row, following) else "≈"
        words += f" {sign} {SHORT[following.method]}"
    return words


def agreement(suite: str) -> PageOutput:
    """How many pairs of rows stand in the paper's order."""
    rows = []
    for role, size in SIZES.items():
        counts = {"holds": 0, "does not hold": 0, "within noise": 0}
        for left, right in combinations(ranked(suite, role), 2):
            margin = (left.ours.mean - right.ours.mean) * (1 if left.paper > right.paper else -1)
            room = noise(left.ours, right.ours)
            if left.paper != right.paper:
                counts[
                    "holds"
                    if margin > room
                    else "does not hold"
                    if margin < -room
                    else "within noise"
                ] += 1
        if sum(counts.values()):
            rows.append(("", [size.capitalize(), *map(str, counts.values())]))
    if not rows:
        return PageOutput(note(f"○ not run: no pairs to compare in the {label(suite)}."))
    words = (
        f"{chip('holds')} the paper’s order",
        f"{chip('does not hold')} the other order",
        chip("within noise"),
    )
    caption = f"Every two rows of the table above, held against the paper’s order — {label(suite)}"
    return PageOutput(table(["Pairs of rows", *words], rows, caption))


def mergers(suite: str) -> PageOutput:
    """Every merger on its own, those that the paper has no row for included."""
    body = []
    found = {
        role: {name: average(Evidence(suite, role, "8"), (name, "merged", "")) for name in MERGERS}
        for role in SIZES
    }
    first = next((own for own in found.values() if any(own.values())), found[IMAGES])
    for name in sorted(MERGERS, key=lambda word: -(e.mean if (e := first[word]) else 0)):
        cells = [escape(MERGERS[name])]
        for role in SIZES:
            printed = paper_value(TABLES[role], name, "merged")
            cells += [estimated(found[role][name]), "–" if printed is None else f"{printed:.1f}"]
        body.append(("", cells))
    missing = "" if any(first.values()) else note("○ not run: no merged model yet.")
    head = [
        "Merger",
        *(
            cell
            for size in SIZES.values()
            for cell in (f"{size.capitalize()}, here", "in the paper")
        ),
    ]
    caption = f"Mergers alone, average top-1 accuracy (%) — {label(suite)}"
    return PageOutput(table(head, body, caption) + missing + _objective(suite))


def _objective(suite: str) -> str:
    """How far WUDI's steps bring its objective, beside the minimum."""
    told = []
    for role, size in SIZES.items():
        losses = Evidence(suite, role, "8").table("curves")
        steps, closed = (
            select(losses, {"upstream": name, "method": "merged"})["loss"]
            for name in ("wudi", "wudi_closed_form")
        )
        if len(steps) and len(closed):
            start, end, least = closed.iloc[0], steps.iloc[-1], closed.iloc[-1]
            told.append(
                f"{size}: {start:.2f} at the start, {end:.2f} in its last steps, {least:.2f} at the minimum"
            )
    return note(f"WUDI’s objective — {'; '.join(told)}.") if told else ""


def losses(panel: str, suite: str) -> PageOutput:
    """A plot of loss curves of the smaller model, or a note that nothing was trained."""
    picture = {"adamerging": adamerging, "adapters": adapters}[panel](Evidence(suite, IMAGES, "8"))
    if picture is None:
        return PageOutput(note(f"○ not run: no loss curves in the results of the {label(suite)}."))
    return drawn(picture, panel, label(suite))


def adamerging(evidence: Evidence) -> Figure | None:
    """Entropy of the answers, summed over tasks, by step."""
    rows = select(evidence.table("curves"), {"upstream": "adamerging", "method": "merged"})
    if rows.empty:
        return None
    with one_panel(3.0) as (figure, axes):
        axes.plot(
            rows["step"], rows["loss"], color=COLOURS["merged"], marker="o", markersize=4, lw=2
        )
        axes.set(xlabel="step", ylabel="entropy, all tasks (nats)")
        return figure


def adapters(evidence: Evidence) -> Figure | None:
    """Loss of Surgery and ProbSurgery as a share of its start, mean over tasks and seeds; the two
    losses have no common unit.
    """
    found = select(
        evidence.table("curves"),
        {"upstream": "task_arithmetic", "setting": main_setting(evidence.suite)},
    )
    means = {
        m: select(found, {"method": m}).groupby("step")["loss"].mean()
        for m in ("surgery", "prob_surgery")
    }
    if all(curve.empty for curve in means.values()):
        return None
    with one_panel(3.0) as (figure, axes):
        for (method, curve), dashes in zip(means.items(), ("-", "--"), strict=True):
            if len(curve):
                axes.plot(
                    curve.index,
                    curve / curve.iloc[0],
                    dashes,
                    color=COLOURS[method],
                    lw=2,
                    label=SHORT[method],
                )
        axes.set(xlabel="step", ylabel="loss, share of its start")
        axes.set_ylim(0, None)
        axes.legend()
        return figure
