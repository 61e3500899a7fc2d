"""The theory page: every numbered statement of the paper with its worst case, and the plots behind them."""

import re
from functools import cache
from html import escape
from importlib.resources import files

import pandas as pd
import yaml

from reproduction.report.claims import main_setting
from reproduction.report.evidence import select
from reproduction.report.markup import PageOutput, chip, note, table
from reproduction.report.pages import Page
from reproduction.report.verdicts import judge


@cache
def statements() -> dict[str, dict[str, str]]:
    """Every statement in plain words, by the name it has in results."""
    text = files("reproduction.report").joinpath("statements.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = yaml.safe_load(text)
    return found


def rows(page: Page) -> pd.DataFrame:
    """All lines of the study, without the calibrated model's at other settings than the suite's main one."""
    found = page.evidence.table("theory")
    return found[found["setting"].isin(["", main_setting(page.suite)])]


def checks(page: Page) -> PageOutput:
    """One row per statement: what it says, on what it was checked, its worst case, how tight it is, and the verdict."""
    found, setting = rows(page), main_setting(page.suite)
    own = [claim.on_texts if page.role else claim for claim in page.claims]
    verdicts = {claim.id: judge(claim, page.suite, setting) for claim in own if claim}
    head = ["Statement", "In plain words", "Checked on", "Worst case, merged", "Worst case, calibrated", "Verdict"]
    body = []
    for name, told in statements().items():
        own = found[found["statement"] == name]
        remark = filled(told["note"], own) if "note" in told and not own.empty else by_nodes(own)
        words = [f"{told['name']}<small>{told['section']}</small>", escape(told["says"])]
        words += [escape(told["checked"]) + (f"<small>{escape(remark)}</small>" if remark else "")]
        worst = [worst_case(own, method, told["quantity"]) for method in ("merged", "featcal")]
        body.append(("", [*words, *worst, chip(verdicts[told["claim"]].word)]))
    caption = (
        f"The numbered statements — {page.label}. Equations: digits that both sides share, of the 16 that float64 holds. "
        "Inequalities: by how much the larger side exceeds the smaller where they come closest, and, as tightness, the smaller "
        "side in percent of the larger, median."
    )
    return PageOutput(table(head, body, caption, "fc-words")) + PageOutput(
        "" if len(found) else note("○ not run: no results of this study.")
    )


def worst_case(own: pd.DataFrame, method: str, quantity: str) -> str:
    """Digits of an equation; room and tightness of an inequality; how many cases."""
    ours = own[(own["method"] == method) & (own["block"] == "")]
    worst = ours[(ours["quantity"] == quantity) & (ours["task"] == "")]
    if worst.empty:
        return '<span class="fc-none">–</span>'
    value, count = float(worst["value"].iloc[0]), int(worst["count"].iloc[0])
    if quantity == "digits":
        return f"{value:.1f} digits<small>{count:,} cases</small>"
    tight = ours[ours["quantity"] == "tightness"]["value"]
    close = f" · tightness {tight.mean():.2g} %" if len(tight) else ""
    return (
        f"+{value:,.1f} %<small>{count:,} cases{close}</small>" if value >= 0 else f"{value:.1f} %<small>{count:,} cases</small>"
    )


def by_nodes(own: pd.DataFrame) -> str:
    """Digits of the merged model's worst task by number of quadrature nodes; nothing where no block was integrated over."""
    rows = select(own, {"quantity": "unrolled_digits", "method": "merged"})
    worst = rows[rows["task"] != ""].groupby("nodes")["value"].min()
    told = ", ".join(f"{value:.1f} with {nodes:.0f}" for nodes, value in worst.items())
    return f"Digits by number of nodes, merged: {told}." if told else ""


def filled(text: str, own: pd.DataFrame) -> str:
    """A note with every {quantity:model} replaced by its mean over tasks."""

    def mean(match: re.Match[str]) -> str:
        chosen = select(own, {"quantity": match[1], "method": match[2], "block": ""})["value"]
        return f"{chosen.mean():.1f}" if len(chosen) else "–"

    return re.sub(r"\{(\w+):(\w+)\}", mean, text)


def figure(panel: str, page: Page) -> PageOutput:
    """One figure of the page, or a note that it was not run."""
    from reproduction.report import theory_figures  # matplotlib takes a second to import; only pages with figures pay

    points = page.evidence.table("theory_points")
    if rows(page).empty or points.empty:
        return PageOutput(note(f"○ not run: no result files for this figure in the {page.label}."))
    return page.drawn(
        theory_figures.PANELS[panel](rows(page), points[points["setting"].isin(["", main_setting(page.suite)])]), panel
    )
