"""Read short texts with labels, in tokens: one folder per task with <split>.parquet and labels.json.

Splits: train, validation, test (scored) and stream (what adapters may see without labels).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from featcal.errors import BadFile, MissingPath, UnknownKey

SPLITS = ("train", "validation", "test", "stream")
LABELS = "labels.json"
TOKENS = 48  # at most so many of a text, the two at its ends included


@dataclass(frozen=True)
class Classes:
    """Class names by label, and templates with {} for the name."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]


@dataclass(frozen=True)
class SentenceSet:
    """Texts, shortest first, so that batches of neighbours hold little padding.

    ids: tokens of every text.   labels: (n,), int64.   rows: of the file, (n,).
    """

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    rows: NDArray[np.int64]
    tokenizer: Any

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Return keywords of the model's forward: input_ids and attention_mask, (n, longest)."""
        from featcal.data.batches import padded

        ids, mask = padded([self.ids[index] for index in indices], self.tokenizer.pad_token_id)
        return {"input_ids": ids, "attention_mask": mask}

    def batches(
        self, indices: Sequence[int] | NDArray[np.int64] | None, size: int
    ) -> Iterator[dict[str, Tensor]]:
        """Yield batches in the order of `indices` (None: all texts)."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        for start in range(0, len(chosen), size):
            yield self.batch(chosen[start : start + size])

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> "SentenceSet":
        """Return the texts with these indices, shortest first whatever the order of indices."""
        chosen = np.sort(np.asarray(indices, dtype=np.int64))
        texts, ids = (tuple(values[index] for index in chosen) for values in (self.texts, self.ids))
        kept = {"labels": self.labels[chosen], "rows": self.rows[chosen]}
        return replace(self, texts=texts, ids=ids, **kept)

    def reading(self, texts: Sequence[str]) -> "SentenceSet":
        """Return other texts in the places of these."""
        return replace(self, texts=tuple(texts), ids=tokens(self.tokenizer, texts))


def tokens(tokenizer: Any, texts: Sequence[str]) -> tuple[list[int], ...]:
    """Return the token ids of every text, cut at TOKENS."""
    return tuple(tokenizer(list(texts), truncation=True, max_length=TOKENS)["input_ids"])


def load_sentences(folder: Path, split: str, model_folder: Path) -> SentenceSet:
    """Return one split of a task in the tokens of a model. Raises: as read_rows."""
    texts, labels, names = read_rows(folder, split)
    tokenizer = _tokenizer(str(model_folder))
    ids = tokens(tokenizer, texts)
    order = np.argsort([len(row) for row in ids], kind="stable")
    shortest_first = (tuple(values[index] for index in order) for values in (texts, ids))
    return SentenceSet(*shortest_first, labels[order], names, order, tokenizer)


def read_rows(folder: Path, split: str) -> tuple[list[str], NDArray[np.int64], tuple[str, ...]]:
    """Return texts and labels of one split of a task, in the order of the file, and its class names.

    Raises: MissingPath, UnknownKey, BadFile.
    """
    import pyarrow.parquet as pq  # not needed for images

    if split not in SPLITS:
        raise UnknownKey(f"{folder.name}: split", split, list(SPLITS))
    file = folder / f"{split}.parquet"
    if not file.is_file():
        way_out = "it has the columns text and label; see reproduction/real_text"
        raise MissingPath(file, f"the {split} rows of a task", way_out)
    table = pq.read_table(file)
    if not {"text", "label"} <= set(table.column_names):
        problem = f"has the columns {', '.join(table.column_names)}"
        raise BadFile(file, problem, "give it the columns text and label")
    texts, labels = table["text"].to_pylist(), np.asarray(table["label"], dtype=np.int64)
    names = read_classes(folder).classes
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
        problem = f"has a label outside of 0 … {len(names) - 1}"
        raise BadFile(file, problem, f"give {LABELS} one name for every label")
    return texts, labels, names


def read_classes(folder: Path) -> Classes:
    """Return class names and templates. Raises: MissingPath, BadFile."""
    file, content = folder / LABELS, '{"classes": [...], "templates": ["{}"]}'
    if not file.is_file():
        raise MissingPath(file, "class names of a task", f"write {content} there")
    try:
        named = json.loads(file.read_text("utf-8"))
        return Classes(tuple(map(str, named["classes"])), tuple(map(str, named["templates"])))
    except (ValueError, TypeError, KeyError):
        raise BadFile(file, "has no classes", f"it holds {content}") from None


@lru_cache(maxsize=2)
def _tokenizer(folder: str) -> Any:
    from featcal.models.load import load_tokenizer

    return load_tokenizer(folder)
