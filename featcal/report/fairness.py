"""What it is worth to an adapter that it was trained on images of the test set it is scored on.

Adapters see unlabelled test images, as in their own sources; FeatCal sees training images. So every comparison stands here once
more: on the test images that the adapter was shown, on the others, and with adapters trained on FeatCal's images.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, variance
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from featcal.report.claims import main_setting
from featcal.report.controls import average
from featcal.report.correct import bits
from featcal.report.estimate import Estimate, estimate
from featcal.report.evidence import Evidence, read_json, select
from featcal.report.markup import Shown, estimated, fold, note, table
from featcal.report.show import PLACES, label
from featcal.report.tables import METHODS, UPSTREAMS
from featcal.report.values import SIZES, place_name

EIGHT = [(role, "8") for role in SIZES]
SEVERAL = {"table02": [(role, pool) for pool in ("8", "14", "20") for role in SIZES], "gain": EIGHT, "rankings": EIGHT}
STUDIES = dict.fromkeys(("figure3", "table12", "table13"), "samples") | dict.fromkeys(("figure4", "table06"), "corrupted")
STREAM, STUDIED = "test_unlabelled", "task_arithmetic"  # the latter: where studies start
NAMES = {"surgery": "Surgery", "prob_surgery": "ProbSurgery"}
ADAPTERS = tuple(NAMES)
SUMMARY = "Adapters on test images they were trained on, and on others"
NOT_RUN = '<span class="fc-none">not run</span>'
Flags = Mapping[str, NDArray[np.bool_]]  # by task, one per test image
Draws = Mapping[str, Flags]  # by seed
Margin = tuple[float, float]  # points, and their variance or, where it says so, two standard errors


@dataclass(frozen=True)
class Parts:
    """Accuracy in percent, mean over tasks and seeds, on seen, on other and on all test images.

    None where some task has no such image.
    """

    seen: float | None
    others: float | None
    whole: float | None


@dataclass(frozen=True)
class Block:
    """One merger, budget or kind of calibration images: the models that start from one merged model.

    right:   answers by method and seed; of the merger as `merged`, which has no seed.
    shown:   test images that an adapter was trained on, by adapter and seed.
    trained: the same adapters trained on training images, scored on all test images.
    """

    name: str
    right: Mapping[str, Draws]
    shown: Mapping[str, Draws]
    trained: Mapping[str, Estimate | None]

    def parts(self, method: str) -> Parts | None:
        """One row; where it is no adapter's, on the images that the first adapter was shown. None where it was not run."""
        shown = self.shown.get(method) or next((draws for draws in self.shown.values() if draws), {})
        pairs = [(right, seen) for seed, seen in shown.items() if (right := self.of_seed(method, seed)) is not None]
        if not pairs:
            return None
        return Parts(
            _mean([share(right, seen) for right, seen in pairs]),
            _mean([share(right, others(seen)) for right, seen in pairs]),
            _mean([share(right, {task: np.ones_like(flags) for task, flags in seen.items()}) for right, seen in pairs]),
        )

    def difference(self, method: str) -> Margin | None:
        """FeatCal minus one adapter on the test images that this one was not shown, with two standard errors."""
        return margin([paired(ours, theirs, others(seen)) for ours, theirs, seen in self._drawn(method)])

    def worth(self, method: str) -> Margin | None:
        """What being shown an image is worth: adapter minus FeatCal on images that were shown, less the same on the others."""
        found: list[Margin | None] = []
        for ours, theirs, seen in self._drawn(method):
            on, off = paired(theirs, ours, seen), paired(theirs, ours, others(seen))
            found.append((on[0] - off[0], on[1] + off[1]) if on and off else None)
        return margin(found)

    def of_seed(self, method: str, seed: str) -> Flags | None:
        """Right answers of a method at one seed; the merger's are the same at each."""
        return self.right.get(method, {}).get("" if method == "merged" else seed)

    def _drawn(self, method: str) -> Iterator[tuple[Flags, Flags, Flags]]:
        """FeatCal's right answers, the adapter's, and what that was shown, at every seed that both have."""
        for seed, seen in self.shown.get(method, {}).items():
            ours, theirs = self.of_seed("featcal", seed), self.of_seed(method, seed)
            if ours is not None and theirs is not None:
                yield ours, theirs, seen


def others(shown: Flags) -> Flags:
    """The test images that were not shown."""
    return {task: ~flags for task, flags in shown.items()}


def share(right: Flags, where: Flags) -> float | None:
    """Percent right among some images of every task, mean over tasks; None where a task has none of them."""
    if not all(where[task].any() for task in right):
        return None
    return 100 * fmean(float(flags[where[task]].mean()) for task, flags in right.items())


def paired(left: Flags, right: Flags, where: Flags) -> Margin | None:
    """Mean over tasks of the difference of two accuracies on the same images, in percent, and its variance.

    With dᵢ ∈ {−1, 0, 1} the difference of both answers to image i, a task's mean has the variance Var(d)/n over its n images.
    None where a task has no such image.
    """
    if not all(where[task].any() for task in left):
        return None
    each = [100 * (left[task].astype(float) - right[task])[where[task]] for task in left]
    return fmean(float(d.mean()) for d in each), math.fsum(float(d.var()) / len(d) for d in each) / len(each) ** 2


def margin(found: Sequence[Margin | None]) -> Margin | None:
    """Mean over seeds, and two standard errors: of the images, which more seeds do not make more, and s²/S of S ≥ 2 seeds."""
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    means, variances = zip(*known, strict=True)
    spread = variance(means) / len(means) if len(means) > 1 else 0.0
    return fmean(means), 2 * math.sqrt(fmean(variances) + spread)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def folded(page: str, suite: str) -> Shown:
    """All that the page compares with adapters, one click away, and what seen images are worth in a sentence."""
    html = ""
    for role, pool in SEVERAL.get(page) or [PLACES[page][:2]]:
        ours = Evidence(suite, role, pool)
        blocks = [block for block in blocks_of(ours, STUDIES.get(page, "")) if any(block.parts(m) for m in ADAPTERS)]
        words = f"{place_name(role, pool)} — {label(suite)}"
        html += _table(blocks, words) + note(sentence(blocks)) if blocks else note(f"○ not run: {words}.")
    return Shown(fold(SUMMARY, html))


def blocks_of(ours: Evidence, study: str = "") -> Iterator[Block]:
    """The mergers of one role and pool, or the budgets or kinds of images of a study."""
    if study == "samples":
        yield from _budgets(ours)
    elif study == "corrupted":
        yield from _damaged(ours)
    else:
        yield from (_merger(ours, upstream) for upstream in UPSTREAMS)


def _merger(ours: Evidence, upstream: str) -> Block:
    rows = select(ours.table("correct"), {"upstream": upstream})
    draw = _settings(ours).get("merge", {}).get(f"{ours.role}-{ours.pool}-{upstream}", {}).get("draw") or {}
    itself = " <small>itself made on all test images</small>" if draw.get("stream") == STREAM else ""
    shown = {method: drawn(ours, upstream, method) for method in ADAPTERS}
    right = _right(ours, rows, ours.table("seen"))
    return Block(escape(UPSTREAMS[upstream]) + itself, right, shown, _trained(ours, upstream))


def _budgets(ours: Evidence) -> Iterator[Block]:
    rows, seen = select(ours.table("samples.correct"), {"upstream": STUDIED}), ours.table("samples.seen")
    merged = rows[rows["method"] == "merged"]
    for samples in sorted(set(rows["samples"]) - {0}):
        own = pd.concat([merged, rows[rows["samples"] == samples]])
        shown = dict.fromkeys(ADAPTERS, of_budget(seen, samples))
        yield Block(f"{int(samples)} images per task", _right(ours, own, seen), shown, {})


def _damaged(ours: Evidence) -> Iterator[Block]:
    """Of the study its one budget and seeds; from clean images the same models out of the scores."""
    from featcal.report.corrupted import KINDS  # a page's own words; it needs matplotlib

    rows, seen = select(ours.table("corrupted.correct"), {"upstream": STUDIED}), ours.table("corrupted.seen")
    whole, seeds = select(ours.table("correct"), {"upstream": STUDIED}), set(rows["seed"])
    trained = select(ours.table("corrupted"), {"upstream": STUDIED, "setting": f"{main_setting(ours.suite)}_train"})
    budgets = sorted(set(seen["samples"]))
    for kind, name in KINDS.items() if budgets else ():
        clean = kind == "clean"
        own = whole[whole["seed"].isin(seeds)] if clean else rows[rows["corruption"] == kind]
        right = _right(ours, pd.concat([whole[whole["method"] == "merged"], own]), seen)
        shown = dict.fromkeys(ADAPTERS, of_budget(seen, budgets[0]))
        damaged = select(trained, {"corruption": kind})
        yield Block(name, right, shown, {method: estimate(select(damaged, {"method": method})) for method in ADAPTERS})


def drawn(ours: Evidence, upstream: str, method: str) -> Draws:
    """What an adapter of the main setting was shown; nothing where none was trained."""
    adapted = _settings(ours).get("adapt", {}).get(f"{ours.role}-{ours.pool}-{upstream}-{method}", {})
    chosen = (adapted.get("settings") or {}).get(main_setting(ours.suite))
    return of_budget(ours.table("seen"), chosen["draw"]["samples"]) if chosen else {}


def of_budget(seen: pd.DataFrame, samples: float | None) -> Draws:
    """The draws of so many test images of each task, by seed; None is all of them."""
    stream = select(seen, {"stream": STREAM})
    own = stream[stream["samples"].isna() if samples is None else stream["samples"] == samples]
    return flags_of(own, "seen", _counts(own))


def flags_of(rows: pd.DataFrame, column: str, counts: Mapping[str, int]) -> Draws:
    """Flags of every task by seed, from a column of hexadecimal text."""
    found: dict[str, dict[str, NDArray[np.bool_]]] = {}
    for seed, task, text in zip(rows["seed"], rows["task"], rows[column], strict=True):
        found.setdefault(seed, {})[task] = bits(text, counts[task])
    return dict(found)


def _counts(seen: pd.DataFrame) -> dict[str, int]:
    """Test images by task."""
    return {task: int(count) for task, count in zip(seen["task"], seen["count"], strict=True)}


def _right(ours: Evidence, rows: pd.DataFrame, seen: pd.DataFrame) -> dict[str, Draws]:
    """Right answers of the merger, and at the suite's main setting of what calibrates it."""
    counts = _counts(seen)
    known = rows[rows["task"].isin(list(counts))]
    chosen = {method: select(known, {"method": method, "setting": main_setting(ours.suite)}) for method in METHODS}
    chosen["merged"] = select(known, {"method": "merged"})
    return {method: flags_of(frame, "correct", counts) for method, frame in chosen.items()}


def _trained(ours: Evidence, upstream: str) -> dict[str, Estimate | None]:
    """Adapters trained on FeatCal's images, at the size of the suite's main setting."""
    return {method: average(ours, (upstream, method, f"{main_setting(ours.suite)}_train")) for method in ADAPTERS}


def _settings(ours: Evidence) -> dict[str, Any]:
    return read_json(ours.folder / f"{ours.role}-{ours.pool}.settings.json")


def _table(blocks: list[Block], words: str) -> str:
    head = ["", "test images it was shown", "other test images", "all test images", "trained on training images"]
    head += ["FeatCal minus it, others", "what being shown is worth"]
    rows = []
    for block in blocks:
        rows.append(("fc-merger", [block.name, *_shares(block.parts("merged")), "–", "–", "–"]))
        for method, name in METHODS.items():
            found, trained = block.parts(method), block.trained.get(method)
            cell = estimated(trained) if trained else NOT_RUN
            if method == "featcal":  # which is trained on nothing else
                cell = _shares(found)[-1]
            margins = [_margin(block.difference(method)), _margin(block.worth(method))]
            rows.append(("fc-calibrated", [escape(name), *_shares(found), cell, *margins]))
    caption = f"Average top-1 accuracy (%) on parts of the test images; ±: two standard errors, images paired. {words}"
    return table(head, rows, caption, "fc-long")


def _shares(found: Parts | None) -> list[str]:
    """Accuracy on seen, other and all test images; a dash where there is no such image."""
    if found is None:
        return [NOT_RUN] * 3
    return ["–" if value is None else f"{value:.1f}" for value in (found.seen, found.others, found.whole)]


def _margin(found: Margin | None) -> str:
    return "–" if found is None else f"{round(found[0], 1) + 0.0:+.1f} ± {found[1]:.1f}"


def sentence(blocks: Sequence[Block]) -> str:
    """What seen images are worth to each adapter, and where FeatCal stands on the others, from the numbers of the table."""
    said = []
    for method in ADAPTERS:
        known = [found for block in blocks if (found := block.worth(method)) is not None]
        if known:  # blocks share their images, so that many are no surer than one
            said.append(f"{_margin((fmean(m for m, _ in known), fmean(e for _, e in known)))} points to {NAMES[method]}")
    if not said:
        return "The adapters were shown every test image: none is left to tell what that is worth."
    margins = [found for block in blocks for method in ADAPTERS if (found := block.difference(method)) is not None]
    above, below = (sum(sign * mean > room for mean, room in margins) for sign in (1, -1))
    return (
        f"Being shown a test image, without its label, is worth {' and '.join(said)}, mean over the blocks: by so much an "
        f"adapter is better against FeatCal, which was shown none, than on the other test images. On those, FeatCal is above the "
        f"adapter in {above} of {len(margins)}, below in {below}, and within two standard errors in "
        f"{len(margins) - above - below}."
    )
