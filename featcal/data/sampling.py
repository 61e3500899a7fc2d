"""Which training samples a calibration sees. Every task draws from a generator of its own: no draw depends on another."""

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from featcal.errors import BadSetting


def draw_indices(task: str, count: int, samples: int, seed: int) -> NDArray[np.int64]:
    """`samples` of `count` samples without repetition, labels unused.

    The first entries of a permutation by a generator keyed with (seed, crc32(task), crc32("calibration")): a larger draw of the
    same seed begins with the smaller one.
    Returns: indices in the order drawn, (samples,).  Raises: BadSetting when there are fewer of them.
    """
    if samples > count:
        raise BadSetting("calibrate.samples", samples, f"must be at most {count}, the number of samples of {task}")
    generator = np.random.default_rng([seed, crc32(task.encode()), crc32(b"calibration")])
    return generator.permutation(count)[:samples].astype(np.int64)
