"""Bytes held now and at most, for whoever keeps something in memory or on disk. Knows nothing of
what is held.
"""


class Ledger:
    """A running sum and its peak."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def remove(self, size: int) -> None:
        self.now -= size
        assert self.now >= 0, "more given back than was held"
