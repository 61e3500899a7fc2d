"""Which test samples a model gets right, or an adapter was shown: hexadecimal text of the result files as true and false."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from featcal.errors import BadData

Bits = NDArray[np.bool_]


@lru_cache(maxsize=4096)
def bits(text: str, count: int) -> Bits:
    """True and false of every test sample, eight to a byte, the first one highest: what `storage.results.packed` wrote.

    Returns: (count,), read-only.  Raises: BadData where the text is not that of `count` samples with zeros behind the last.
    """
    try:
        whole = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8)).astype(bool)
    except ValueError:
        whole = np.zeros(0, bool)
    if len(whole) != count + -count % 8 or whole[count:].any():
        problem = f"not the hexadecimal text of {count} samples"
        raise BadData(f"correctness {text[:16]!r}…", problem, "write the result files again: dvc repro")
    whole.flags.writeable = False  # every caller gets the same array
    return whole[:count]
