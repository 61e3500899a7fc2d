"""What FeatCal's gain is made of: the controls' gains over their merger as dots, and the questions
they answer.

The table of all controls is in controls.py.
"""

from html import escape
from typing import Any

from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.controls import INGREDIENTS, UPSTREAMS, controls_of
from reproduction.report.evidence import Evidence
from reproduction.report.figures import INK, one_panel
from reproduction.report.html import PageOutput, margin, note, standing, table
from reproduction.report.page import drawn, label
from reproduction.report.paper import IMAGES, REAL, SIZES
from reproduction.report.statistics import Estimate, noise
from reproduction.report.tables import MERGERS, SETTING_LABELS, SHIFT, Key, average, settings_shown

SHORT = {
    "anchor": "anchor alone", "rescaled": "merger at best scale", "regmean": "RegMean, same images",
    "regmean_plus_plus": "RegMean++, same images", "without_bias": "biases left", "without_norm": "LayerNorms left",
    "without_task_weights": "tasks not weighted", "without_forward_order": "merger’s features", "without_interpolation": "α = 1",
    "without_extrapolation": "ρ = 1", "surgery": "Surgery", "prob_surgery": "ProbSurgery",
    "suite": "in proportion, unlabelled", "suite_train": "in proportion, train", "suite_scored": "in proportion, scored",
    "paper": "published size, unlabelled", "paper_train": "published size, train", "mean_shift": "mean shift",
}  # fmt: skip
CLOSED = "wudi_closed_form"
# adapters on test inputs: a setting of its own on the real encoder, the main one on drawn images
SCORED = "_scored"
TOLD = {"task_arithmetic": "task arithmetic", CLOSED: "WUDI in closed form"}  # mergers in sentences
LOOKS: dict[str, dict[str, Any]] = {
    REAL: {"color": "#009E73", "marker": "D"}, IMAGES: {"color": "#0072B2", "marker": "o"},
    "clip_l14": {"color": "#D55E00", "marker": "s", "markerfacecolor": "white"},
}  # fmt: skip  # Okabe and Ito; filled and hollow


def questions(suite: str) -> PageOutput:
    """Pairs of controls, each with its margin and whether noise can explain it, per merger and
    size.
    """
    rows = []
    for words, left, right in _pairs(main_setting(suite)):
        cells = [escape(words)]
        for upstream in UPSTREAMS:
            for role in SIZES:
                ours = Evidence(suite, role, "8")
                of = [
                    setting if role == REAL else setting.removesuffix(SCORED)
                    for *_, setting in (left, right)
                ]
                keys = [
                    (key[0] or upstream, key[1], setting)
                    for key, setting in zip((left, right), of, strict=True)
                ]
                found = [average(ours, key) for key in keys]
                cells.append(margin(*found))
        rows.append(("", cells))
    head = [
        "First against second",
        *(f"{MERGERS[upstream]}, {size}" for upstream in UPSTREAMS for size in SIZES.values()),
    ]
    caption = f"Margins of the average (points); within noise: at most two standard errors — {label(suite)}"
    return PageOutput(table(head, rows, caption, "fc-words fc-long"))


def told(suite: str) -> PageOutput:
    """In sentences: what a mean shift alone reaches, and what FeatCal does to the merger whose
    objective is at its minimum.
    """
    found = [
        line
        for role, size in SIZES.items()
        for line in _sentences(Evidence(suite, role, "8"), size.capitalize())
    ]
    return PageOutput(
        "".join(map(note, found))
        or note(f"○ not run: no mean shift and no WUDI in closed form in the {label(suite)}.")
    )


def _sentences(ours: Evidence, size: str) -> list[str]:
    main, *others = settings_shown(ours.suite)
    found = []
    for upstream, name in TOLD.items():
        same = (upstream, SHIFT, f"{main}_train")
        start, shift, featcal = (
            average(ours, key)
            for key in ((upstream, "merged", ""), same, (upstream, "featcal", main))
        )
        if start and shift:
            against = f"; FeatCal against it: {standing(featcal, shift)}" if featcal else ""
            inputs = "texts" if ours.role == REAL else "images"
            words = f"a mean shift, one constant vector per task from the training {inputs} that FeatCal sees,"
            found.append(f"{size}: {words} {_taken(name, start, shift)}{against}.")
        if start and featcal and upstream == CLOSED:
            there = {words: average(ours, (upstream, "featcal", words)) for words in others}
            also = "".join(
                f"; at the {SETTING_LABELS[words]}: {standing(e, start)}"
                for words, e in there.items()
                if e
            )
            found.append(
                f"{size}: FeatCal {_taken(name, start, featcal)}{also}. {_kept(start, featcal)}"
            )
    return found


def _kept(start: Estimate, featcal: Estimate) -> str:
    """Whether FeatCal keeps what the merger it starts from has gained."""
    change, room = featcal.mean - start.mean, noise(featcal, start)
    if abs(change) <= room:
        return "Noise can explain the change of what this merger has gained."
    return (
        "What this merger has gained is kept."
        if change > 0
        else "What this merger has gained is not preserved."
    )


def _taken(name: str, start: Estimate, end: Estimate) -> str:
    return f"takes {name} from {start.mean:.1f} to {end.mean:.1f} ({standing(end, start)})"


def _pairs(main: str) -> list[tuple[str, Key, Key]]:
    """What is asked, and the two rows that answer; an empty upstream is the block's own merger."""
    featcal, same, scored = ("", "featcal", main), f"{main}_train", f"{main}{SCORED}"
    return [
        ("More than a longer step? FeatCal against its anchor alone", featcal, ("", "anchor", "")),
        ("More than a better scale? FeatCal against the merger at its best one", featcal, ("", "rescaled", "")),
        ("More than a regression? FeatCal against RegMean on the same images", featcal, ("regmean", "merged", "")),
        ("And against RegMean++", featcal, ("regmean_plus_plus", "merged", "")),
        ("More than a shift of each task’s mean? FeatCal against the mean shift on the same images", featcal, ("", SHIFT, same)),
        ("And the mean shift against the merger it stands behind", ("", SHIFT, same), ("", "merged", "")),
        ("Is forward order needed? FeatCal against solving on the merger’s features", featcal,
         ("", "featcal", "without_forward_order")),
        ("Does the extrapolated anchor help? FeatCal against ρ = 1", featcal, ("", "featcal", "without_extrapolation")),
        ("What are the scored inputs worth to Surgery? Trained on them against training inputs", ("", "surgery", scored),
         ("", "surgery", same)),
        ("And to ProbSurgery?", ("", "prob_surgery", scored), ("", "prob_surgery", same)),
        ("On the same images: FeatCal against Surgery", featcal, ("", "surgery", same)),
        ("And against ProbSurgery", featcal, ("", "prob_surgery", same)),
    ]  # fmt: skip


def dots(upstream: str, suite: str) -> PageOutput:
    """One merger's controls as gains over it, both sizes."""
    return drawn(_dots(upstream, suite), f"gains over {MERGERS[upstream]}", label(suite))


def _dots(upstream: str, suite: str) -> Figure | None:
    keys = list(controls_of(suite, upstream))[1:]
    gains = {
        role: _gains(Evidence(suite, role, "8"), (upstream, "merged", ""), keys) for role in SIZES
    }
    shown = [key for key in keys if any(key in own for own in gains.values())]
    if not shown:
        return None
    with one_panel(0.36 * len(shown) + 1.6) as (figure, axes):
        for place, (role, size) in enumerate(SIZES.items()):
            there = [
                (row, *gains[role][key]) for row, key in enumerate(shown) if key in gains[role]
            ]
            if there:
                y, x, bars = zip(
                    *((row + 0.26 * place - 0.26, gain, room) for row, gain, room in there),
                    strict=True,
                )
                axes.errorbar(
                    x, y, xerr=bars, ls="", elinewidth=1.2, markersize=8, label=size, **LOOKS[role]
                )
        axes.axvline(0, color=INK, lw=1.2)
        axes.set_yticks(range(len(shown)), [_name(key) for key in shown], fontsize=11)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set(xlabel=f"gain over {MERGERS[upstream]} (points)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2)
        return figure


def _gains(ours: Evidence, merger: Key, keys: list[Key]) -> dict[Key, tuple[float, float]]:
    """Gain and two standard errors of every control that was run."""
    start = average(ours, merger)
    found = {key: average(ours, key) for key in keys}
    return {key: (e.mean - start.mean, noise(e, start)) for key, e in found.items() if e and start}


def _name(key: Key) -> str:
    upstream, method, setting = key
    if method == "merged":
        return SHORT[upstream]
    if method == "featcal":
        return f"FeatCal, {SHORT[setting] if setting in INGREDIENTS else SETTING_LABELS[setting]}"
    if method == SHIFT:
        return f"{SHORT[method]}, {'train' if setting.endswith('_train') else 'unlabelled'}"
    return f"{SHORT[method]}, {SHORT[setting]}" if setting else SHORT[method]
