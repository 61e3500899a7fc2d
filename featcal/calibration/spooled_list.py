"""Features that wait for the next block, batch by batch, wherever the spool keeps them: in memory,
pinned, or on disk.

Looks like a list. What a block hands on unchanged (masks, positions) stays where it is instead of
being written for every block.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from featcal.storage.spool import Handle, Spool


def tree_map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The value with everything of one kind in it changed; tuples, lists and mappings are rebuilt,
    all else is left as it is.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(tree_map(part, kind, change) for part in value)
    if isinstance(value, dict):
        return {name: tree_map(part, kind, change) for name, part in value.items()}
    return value


def leaves(value: Any, kind: type) -> list[Any]:
    """Everything of one kind in a value."""
    parts: list[Any] = []
    tree_map(value, kind, parts.append)
    return parts


Borrowed = dict[int, tuple[Tensor, Handle]]  # by the tensor's identity


class SpooledList:
    """A list of values with tensors in them (features, batches); each is kept until another takes
    its place.
    """

    def __init__(self, spool: Spool):
        self._spool = spool
        self._kept: list[Any] = []  # the values, with handles where tensors were
        self._borrowed: tuple[int, Borrowed] = (
            -1,
            {},
        )  # number and tensors of the value asked for last

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Any:
        handles = {id(handle): handle for handle in leaves(self._kept[number], Handle)}
        tensors = {key: self._spool.get(handle) for key, handle in handles.items()}
        self._borrowed = (
            number,
            {id(tensors[key]): (tensors[key], handle) for key, handle in handles.items()},
        )
        return tree_map(self._kept[number], Handle, lambda handle: tensors[id(handle)])

    def __setitem__(self, number: int, value: Any) -> None:
        before, borrowed = leaves(self._kept[number], Handle), self._borrowed
        self._borrowed = -1, {}
        self._kept[number] = self._keep(value, borrowed[1] if borrowed[0] == number else {})
        self._drop(before, still=self._kept[number])

    def append(self, value: Any) -> None:
        """Keep one more."""
        self._kept.append(self._keep(value, {}))

    def empty(self) -> "SpooledList":
        """Another list of the same spool, with nothing in it."""
        return SpooledList(self._spool)

    def clear(self) -> None:
        """Let go of everything."""
        self._drop(leaves(self._kept, Handle), still=None)
        self._kept = []

    def _keep(self, value: Any, known: Borrowed) -> Any:
        """The value with handles where tensors were; a tensor that was borrowed, or stands twice in
        the value, is kept once.
        """

        def keep(tensor: Tensor) -> Handle:
            if id(tensor) not in known:
                known[id(tensor)] = (tensor, self._spool.keep(tensor))
            return known[id(tensor)][1]

        return tree_map(value, Tensor, keep)

    def _drop(self, handles: list[Handle], still: Any) -> None:
        left = {id(handle) for handle in leaves(still, Handle)}
        for handle in {id(handle): handle for handle in handles}.values():
            if id(handle) not in left:
                self._spool.drop(handle)
