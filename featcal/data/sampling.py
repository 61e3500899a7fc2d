"""Which samples a calibration sees, and in which order a training takes them.

Every task draws from a generator of its own: no draw depends on another.
"""

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from featcal.errors import BadSetting


def draw_indices(task: str, count: int, samples: int, seed: int) -> NDArray[np.int64]:
    """`samples` of `count` samples without repetition, labels unused.

    The first entries of a permutation by a generator keyed with (seed, crc32(task),
    crc32("calibration")): a larger draw of the same seed begins with the smaller one.
    Returns: indices in the order drawn, (samples,).  Raises: BadSetting when there are fewer of
    them.
    """
    if samples > count:
        raise BadSetting(
            "samples", samples, f"must be at most {count}, the number of samples of {task}"
        )
    generator = np.random.default_rng([seed, crc32(task.encode()), crc32(b"calibration")])
    return generator.permutation(count)[:samples].astype(np.int64)


def batch_indices(task: str, count: int, batch: int, step: int, seed: int) -> NDArray[np.int64]:
    """Samples of one training step: each at most once per epoch, the incomplete batch at its end
    left out, (batch,).
    """
    batch = min(batch, count)
    epoch, place = divmod(step, count // batch)
    order = np.random.default_rng([seed, crc32(task.encode()), epoch]).permutation(count)
    return order[place * batch : (place + 1) * batch].astype(np.int64)
