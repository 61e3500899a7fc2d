"""Tensors read by a thread while the caller does something else, counted from the moment the
reading starts.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from featcal.storage.ledger import Ledger


class ReadAhead:
    """One reading under way: `taken` waits for it, `dropped` forgets it; after either its thread is
    gone.

    sizes: bytes by name.  read: gives the tensor of a name; what it raises is raised by `taken`.
    """

    def __init__(self, sizes: Mapping[str, int], read: Callable[[str], Tensor], ledger: Ledger):
        self._bytes, self._ledger = sum(sizes.values()), ledger
        ledger.add(self._bytes)
        self._thread = ThreadPoolExecutor(1, "featcal-read")
        self._tensors = self._thread.submit(lambda: {name: read(name) for name in sizes})

    def taken(self) -> dict[str, Tensor]:
        """The tensors, which are the caller's to count from here on."""
        try:
            return self._tensors.result()
        finally:
            self.dropped()

    def dropped(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._ledger.remove(self._bytes)
