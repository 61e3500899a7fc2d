"""Right answers on the test images that an adapter was trained on, on the others, and the paired
differences of two models there.

Knows flags by task and seed; knows nothing of files and pages.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

from reproduction.report.statistics import Bits, Estimate, mean_variance

Flags = Mapping[str, Bits]  # by task, one per test image
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
    """One merger, budget or kind of calibration images: the models that start from one merged
    model.

    right:   answers by method and seed; of the merger as `merged`, which has no seed.
    shown:   test images that an adapter was trained on, by adapter and seed.
    trained: the same adapters trained on training images, scored on all test images.
    """

    name: str
    right: Mapping[str, Draws]
    shown: Mapping[str, Draws]
    trained: Mapping[str, Estimate | None]

    def parts(self, method: str) -> Parts | None:
        """One row; where it is no adapter's, on the images that the first adapter was shown. None
        where it was not run.

        The merger, which has no seed, is taken at those of the block's adapters, so that all rows
        are about the same images.
        """
        shown = self.shown.get(method) or next(
            (draws for draws in self.shown.values() if draws), {}
        )
        run = {seed for adapter in self.shown for seed in self.right.get(adapter, {})} or set(shown)
        pairs = [
            (right, shown[seed])
            for seed in shown
            if seed in run and (right := self.of_seed(method, seed)) is not None
        ]
        if not pairs:
            return None
        return Parts(
            _mean([share(right, seen) for right, seen in pairs]),
            _mean([share(right, others(seen)) for right, seen in pairs]),
            _mean(
                [
                    share(right, {task: np.ones_like(flags) for task, flags in seen.items()})
                    for right, seen in pairs
                ]
            ),
        )

    def difference(self, method: str) -> Margin | None:
        """FeatCal minus one adapter on the test images that this one was not shown, with two
        standard errors.
        """
        return margin(
            [paired(ours, theirs, others(seen)) for ours, theirs, seen in self._drawn(method)]
        )

    def worth(self, method: str) -> Margin | None:
        """What being shown an image is worth: adapter minus FeatCal on images that were shown, less
        the same on the others.
        """
        found: list[Margin | None] = []
        for ours, theirs, seen in self._drawn(method):
            on, off = paired(theirs, ours, seen), paired(theirs, ours, others(seen))
            found.append((on[0] - off[0], on[1] + off[1]) if on and off else None)
        return margin(found)

    def of_seed(self, method: str, seed: str) -> Flags | None:
        """Right answers of a method at one seed; the merger's are the same at each."""
        return self.right.get(method, {}).get("" if method == "merged" else seed)

    def _drawn(self, method: str) -> Iterator[tuple[Flags, Flags, Flags]]:
        """FeatCal's right answers, the adapter's, and what that was shown, at every seed that both
        have.
        """
        for seed, seen in self.shown.get(method, {}).items():
            ours, theirs = self.of_seed("featcal", seed), self.of_seed(method, seed)
            if ours is not None and theirs is not None:
                yield ours, theirs, seen


def others(shown: Flags) -> Flags:
    """The test images that were not shown."""
    return {task: ~flags for task, flags in shown.items()}


def share(right: Flags, where: Flags) -> float | None:
    """Percent right among some images of every task, mean over tasks; None where a task has none of
    them.
    """
    if not all(where[task].any() for task in right):
        return None
    return 100 * fmean(float(flags[where[task]].mean()) for task, flags in right.items())


def paired(left: Flags, right: Flags, where: Flags) -> Margin | None:
    """Mean over tasks of the difference of two accuracies on the same images, in percent, and its
    variance.

    With dᵢ ∈ {−1, 0, 1} the difference of both answers to image i, a task's mean has the variance
    s²(d)/n over its n images. None where a task has fewer than two such images.
    """
    each = [100 * (left[task].astype(float) - right[task])[where[task]] for task in left]
    known = [found for d in each if (found := mean_variance(d)) is not None]
    return (
        (fmean(float(d.mean()) for d in each), math.fsum(known) / len(each) ** 2)
        if len(known) == len(each)
        else None
    )


def margin(found: Sequence[Margin | None]) -> Margin | None:
    """Mean over seeds, and two standard errors: of the images, which more seeds do not make more,
    and s²/S of S ≥ 2 seeds.
    """
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    means, variances = zip(*known, strict=True)
    spread = variance(means) / len(means) if len(means) > 1 else 0.0
    return fmean(means), 2 * math.sqrt(fmean(variances) + spread)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
