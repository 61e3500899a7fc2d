"""Compare adapters on the test images they were trained on, without labels, with others.

Adapters see unlabelled test images, as in their own sources; FeatCal sees training images. Flags are one bit per
test image, from hexadecimal text in the result files.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, estimated, note, standing, table
from reproduction.report.paper import REAL, SIZES
from reproduction.report.statistics import Bits, bits, mean_variance
from reproduction.report.tables import NAMES, UPSTREAMS, average

STREAM = "test_unlabelled"
ADAPTERS = ("surgery", "prob_surgery")
Flags = Mapping[str, Bits]  # by task, one per test image
Draws = Mapping[str, Flags]  # by seed
Margin = tuple[float, float]  # points, and their variance or two standard errors


def rows(suite: str) -> PageOutput:
    """Show each adapter on images it saw, on others, and trained on FeatCal's samples instead."""
    found = []
    for role, size in SIZES.items():
        ours = Evidence(suite, role, "8")
        for merger, name in UPSTREAMS.items():
            for adapter in ADAPTERS:
                cells = _cells(ours, merger, adapter)
                if set(cells) != {"–"}:
                    found.append(("", [f"{NAMES[adapter]}<small>{name}, {size}</small>", *cells]))
    if not found:
        return PageOutput(note("○ not run: no record of the images that adapters saw."))
    head = [
        "",
        "On images it saw",
        "On others",
        "FeatCal minus it, others",
        "Worth of being shown",
        "On FeatCal’s samples",
    ]
    caption = "Average accuracy (%) of adapters trained on scored inputs; ± two standard errors, paired by input"
    return PageOutput(table(head, found, caption, "fc-long"))


def _cells(ours: Evidence, merger: str, adapter: str) -> list[str]:
    """Return the cells of one adapter; of the real encoder, whose adapters see no scored text, from its own runs."""
    main = studied_setting(ours.suite)
    trained = estimated(average(ours, (merger, adapter, f"{main}_train")))
    if ours.role == REAL:
        scored, apart = (
            average(ours, (merger, adapter, main + stream)) for stream in ("_scored", "")
        )
        featcal = average(ours, (merger, "featcal", main))
        pairs = (
            standing(one, other) if one and other else "–"
            for one, other in ((featcal, apart), (scored, apart))
        )
        return [estimated(scored), estimated(apart), *pairs, trained]
    seen, right = ours.table("seen"), select(ours.table("scores.correct"), {"upstream": merger})
    settings = (
        ours.settings().get("adapt", {}).get(f"{ours.role}-{ours.pool}-{merger}-{adapter}", {})
    )
    draw = (settings.get("settings") or {}).get(main, {}).get("draw") or {}
    own = select(seen, {"stream": STREAM}) if draw else seen.iloc[:0]
    number = draw.get("samples")  # None: all test images
    own = own[own["samples"].isna() if number is None else own["samples"] == number]
    counts = {task: int(n) for task, n in zip(own["task"], own["count"], strict=True)}
    shown = flags_of(own["seed"], own["task"], own["seen"], counts)
    answers = {}
    for method in (adapter, "featcal"):
        mine = select(right, {"method": method, "setting": main})
        mine = mine[mine["task"].isin(list(counts))]
        answers[method] = flags_of(mine["seed"], mine["task"], mine["correct"], counts)
    accuracies, on, off = compared(answers["featcal"], answers[adapter], shown)
    worth = margin([(off[s][0] - on[s][0], on[s][1] + off[s][1]) for s in on if s in off])
    return [
        *(f"{a:.1f}" if a is not None else "–" for a in accuracies),
        _said(margin(list(off.values()))),
        _said(worth),
        trained,
    ]


def flags_of(
    seeds: Sequence[str], tasks: Sequence[str], texts: Sequence[str], counts: Mapping[str, int]
) -> Draws:
    """Return the flags of every task by seed."""
    found: dict[str, dict[str, Bits]] = {}
    for seed, task, text in zip(seeds, tasks, texts, strict=True):
        found.setdefault(seed, {})[task] = bits(text, counts[task])
    return dict(found)


def compared(
    featcal: Draws, adapter: Draws, shown: Draws
) -> tuple[list[float | None], dict[str, Margin], dict[str, Margin]]:
    """Return the adapter's accuracy on shown and on other images, and by seed FeatCal minus it on both."""
    seeds = [seed for seed in shown if seed in adapter]
    parts = [
        [share(adapter[seed], shown[seed]) for seed in seeds],
        [share(adapter[seed], others(shown[seed])) for seed in seeds],
    ]
    means = [
        fmean(known) if (known := [p for p in part if p is not None]) else None for part in parts
    ]
    both = [seed for seed in seeds if seed in featcal]
    on = {s: found for s in both if (found := paired(featcal[s], adapter[s], shown[s]))}
    off = {s: found for s in both if (found := paired(featcal[s], adapter[s], others(shown[s])))}
    return means, on, off


def others(shown: Flags) -> Flags:
    """Return the test images that were not shown."""
    return {task: ~flags for task, flags in shown.items()}


def share(right: Flags, where: Flags) -> float | None:
    """Return the percentage right among some images, mean over tasks; None where a task has none of them."""
    if not all(where[task].any() for task in right):
        return None
    return 100 * fmean(float(flags[where[task]].mean()) for task, flags in right.items())


def paired(left: Flags, right: Flags, where: Flags) -> Margin | None:
    """Return the mean over tasks of the difference of two accuracies in percent, and its variance.

    With dᵢ ∈ {−1, 0, 1} the difference of both answers to image i, a task's mean has the variance s²(d)/n over
    its n images. None where a task has fewer than two of them.
    """
    each = [100 * (left[task].astype(float) - right[task])[where[task]] for task in left]
    known = [found for d in each if (found := mean_variance(d)) is not None]
    if len(known) < len(each) or not each:
        return None
    return fmean(float(d.mean()) for d in each), math.fsum(known) / len(each) ** 2


def margin(found: Sequence[Margin]) -> Margin | None:
    """Return the mean over seeds with two standard errors: of the images, and s²/S of S ≥ 2 seeds."""
    if not found:
        return None
    means, variances = zip(*found, strict=True)
    spread = variance(means) / len(means) if len(means) > 1 else 0.0
    return fmean(means), 2 * math.sqrt(fmean(variances) + spread)


def _said(found: Margin | None) -> str:
    return "–" if found is None else f"{round(found[0], 1) + 0.0:+.1f} ± {found[1]:.1f}"
