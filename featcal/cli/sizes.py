"""Sizes in memory and counts of operations as people write them."""

import re

from featcal.errors import BadSetting

UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
COUNTS = (("P", 15), ("T", 12), ("G", 9), ("M", 6), ("k", 3))


def bytes_of(option: str, text: str) -> int:
    """`8GiB`, `500 MB`, `0`. Raises: BadSetting for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = found and UNITS.get(found[2].upper() or "B")
    if not (found and unit):
        raise BadSetting(option, text, "must be a number with a unit, such as 8GiB or 500MB")
    return int(float(found[1]) * unit)


def size_text(size: int) -> str:
    """1536 as "1.5 KiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit.upper()]:
            return f"{size / UNITS[unit.upper()]:.1f} {unit}"
    return f"{size} B"


def count_text(count: int) -> str:
    """2500000 as "2.5 M"."""
    for letter, digits in COUNTS:
        if count >= 10**digits:
            return f"{count / 10**digits:.1f} {letter}"
    return str(count)
