"""What the gain is made of: the controls beside a merger, as rows of a table and against FeatCal.

Adapters on other images and of another size, a constant vector per task as the plainest of them,
FeatCal without each ingredient, its anchor alone, the merger at its best scale, and the mergers
that look at the same training images.
"""

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, estimated, fold, note, standing, table
from reproduction.report.page import Page, label
from reproduction.report.paper import SIZES
from reproduction.report.tables import (
    MERGERS,
    METHODS,
    SETTING_LABELS,
    SHIFT,
    Key,
    Row,
    accuracy_table,
    average,
    measured_cells,
    settings_shown,
    with_changes,
)

UPSTREAMS = ("task_arithmetic", "wudi")  # those that have every control
OTHERS = (
    "wudi_closed_form",
    "adamerging_1000",
    "average",
    "adamerging",
)  # those that have adapters on other images
INGREDIENTS = {
    "without_bias": "w/ FeatCal, biases left", "without_norm": "w/ FeatCal, LayerNorms left",
    "without_task_weights": "w/ FeatCal, tasks not weighted", "without_forward_order": "w/ FeatCal, on the merger’s features",
    "without_interpolation": "w/ FeatCal, α = 1", "without_extrapolation": "w/ FeatCal, ρ = 1",
}  # fmt: skip
ADAPTERS = {
    "suite": "in proportion, unlabelled", "suite_train": "in proportion, training",
    "suite_scored": "in proportion, unlabelled and scored",
    "paper": "published code’s size, unlabelled", "paper_train": "published code’s size, training",
}  # fmt: skip
SHIFTED = "w/ mean shift, one constant vector per task"
UNLABELLED = (
    "Unlabelled: test images, which are scored too; of the real encoder texts that are not scored."
)


def controls_of(suite: str, upstream: str) -> dict[Key, str]:
    """What stands beside one merger, and how a row is called; the merger itself and FeatCal come
    first.
    """
    main, *others = settings_shown(suite)
    rows = {(upstream, "merged", ""): MERGERS[upstream], (upstream, "featcal", main): "w/ FeatCal"}
    rows |= {(upstream, "featcal", name): f"w/ FeatCal, {SETTING_LABELS[name]}" for name in others}
    if upstream in UPSTREAMS:
        rows |= {(upstream, "anchor", ""): "The anchor alone, ρ times the merger’s change"}
        rows |= {(upstream, "rescaled", ""): f"{MERGERS[upstream]} at its best scale"}
        rows |= {
            (name, "merged", ""): f"{MERGERS[name]}, FeatCal’s images"
            for name in ("regmean", "regmean_plus_plus")
        }
        rows |= {(upstream, "featcal", name): words for name, words in INGREDIENTS.items()}
    rows |= {(upstream, SHIFT, main): f"{SHIFTED}, unlabelled"}
    rows |= {(upstream, SHIFT, f"{main}_train"): f"{SHIFTED}, training"}
    for method in ("surgery", "prob_surgery"):
        rows |= {
            (upstream, method, name): f"{METHODS[method]}, {words}"
            for name, words in ADAPTERS.items()
        }
    return rows


def block(ours: Evidence, upstream: str) -> list[Row]:
    """The rows of one merger's controls with their changes against it; what the suite does not run
    is left out.
    """
    rows: list[Row] = []
    for key, name in controls_of(ours.suite, upstream).items():
        cells, one_run = measured_cells(ours, key)
        if cells:
            rows.append(Row(name, "calibrated" if rows else "merger", upstream, cells, one_run))
    return [with_changes(row, rows[0]) for row in rows] if rows and rows[0].kind == "merger" else []


def folded(page: Page) -> PageOutput:
    """The page's controls, one click away."""
    ours = page.evidence
    rows = [row for upstream in (*UPSTREAMS, *OTHERS) for row in block(ours, upstream)]
    if not rows:
        return PageOutput(
            fold(
                "Controls that the paper lacks",
                note(f"○ not run: no controls in the results of the {page.label}."),
            )
        )
    caption = f"Controls, top-1 accuracy (%) on test {page.inputs} — {page.label}. Arrows: against the block’s merger. sd: seeds."
    html, _ = accuracy_table(rows, ours.tasks, [ours.title(t) for t in ours.tasks], caption)
    return PageOutput(fold("Controls that the paper lacks: what the gain is made of", html))


def summary(suite: str) -> PageOutput:
    """Averages of all controls, both sizes, and where each stands against FeatCal at the suite's
    main settings.
    """
    own, others = (
        "".join(_averages(suite, upstream) for upstream in group) for group in (UPSTREAMS, OTHERS)
    )
    return PageOutput(
        own + (fold("The same of the other mergers", others) if others else "") + scales(suite)
    )


def _averages(suite: str, upstream: str) -> str:
    """The table of one merger; of OTHERS only what was run."""
    rows = []
    for key, name in controls_of(suite, upstream).items():
        places = [Evidence(suite, role, "8") for role in SIZES]
        if (upstream in UPSTREAMS and not key[2].endswith("_scored")) or any(
            average(ours, key) for ours in places
        ):
            cells = [cell for ours in places for cell in _against(ours, key, upstream)]
            rows.append(
                ("fc-merger" if key[1] == "merged" and key[0] == upstream else "", [name, *cells])
            )
    head = [
        "",
        *(cell for size in SIZES.values() for cell in (size.capitalize(), "against FeatCal")),
    ]
    caption = f"{MERGERS[upstream]}: average top-1 accuracy (%) of its controls — {label(suite)}. {UNLABELLED}"
    return table(head, rows, caption, "fc-long") if rows else ""


def _against(ours: Evidence, key: Key, upstream: str) -> list[str]:
    """Average of one control, and above, below or within noise of FeatCal behind the same
    merger.
    """
    found, featcal = (
        average(ours, key),
        average(ours, (upstream, "featcal", main_setting(ours.suite))),
    )
    same = key == (upstream, "featcal", main_setting(ours.suite))
    if found is None or featcal is None or same:
        return [estimated(found) if found else '<span class="fc-none">not run</span>', "–"]
    return [estimated(found), standing(found, featcal)]


def scales(suite: str) -> str:
    """The sweeps behind `at its best scale`: average on images that are no test images, by factor
    on the merger's change.
    """
    rows, factors = [], []
    for role, size in SIZES.items():
        swept = Evidence(suite, role, "8").table("scales")
        for upstream in UPSTREAMS:
            own = select(swept, {"upstream": upstream})
            if not own.empty:
                factors = [f"× {factor:g}" for factor in own["factor"]]
                values = zip(own["value"], own["chosen"], strict=True)
                cells = [
                    f"<strong>{value:.1f}</strong>" if chosen else f"{value:.1f}"
                    for value, chosen in values
                ]
                rows.append(("", [f"{MERGERS[upstream]}, {size}", *cells]))
    caption = f"Average (%) by factor on the merger’s change, on images that are no test images; bold: chosen — {label(suite)}"
    return fold(
        "How the best scale was chosen",
        table(["", *factors], rows, caption) if rows else note("○ not run."),
    )
