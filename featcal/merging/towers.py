"""Experts beside a base of another shape at its ends: other rows of words, other heads. What all
share is merged.

Rows of words are those of the same token; a word that an expert lacks is the base's there, one that
the base lacks is left out. Tensors outside of the tower, such as classifiers of other numbers of
labels, stay the base's, where it has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import FeatCalError
from featcal.merging.sources import Source
from featcal.merging.vocabulary import is_vocabulary
from featcal.models.load import load_tokenizer, model_class
from featcal.models.skeleton import require_one_family

POOLER = "pooler"  # behind the tower, but under its name: some heads take it, some do without


@dataclass(frozen=True)
class Aligned:
    """An expert under the base's names and with the base's rows of words.

    names: the base's name -> the expert's, of what both have.   rows: of a table of words, the
    expert's row of each of the
    base's, -1 where it has none.
    """

    inner: Source
    base: Source
    known: Mapping[str, str]
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return sorted(self.known)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name) if name in self.rows else self.inner.shape(self.known[name])

    def dtype(self, name: str) -> torch.dtype:
        return self.inner.dtype(self.known[name])

    def file_of(self, name: str) -> object:
        return self.inner.file_of(self.known[name])

    def finite_tensor(self, name: str) -> Tensor:
        tensor = self.inner.finite_tensor(self.known[name])
        if name not in self.rows:
            return tensor
        found, rows = self.base.finite_tensor(name).to(tensor.dtype, copy=True), self.rows[name]
        found[rows >= 0] = tensor[rows[rows >= 0]]
        return found


@dataclass(frozen=True)
class Ends:
    """The experts as far as they are like the base, and what of theirs is left out, in words, by
    task.
    """

    experts: dict[str, Source]
    apart: frozenset[
        str
    ]  # tensors of the base that stay as they are, as not all experts have them in its shape
    told: dict[str, str]


def aligned(
    base: Source, experts: Mapping[str, Source], base_model: Any, models: Mapping[str, Any]
) -> Ends:
    """Experts whose towers are the base's, whatever stands on them; those that are like the base
    stay as they are.

    base_model, models: the base and the experts as they were given, for their classes and
    tokenizers.
    Raises: TensorsDiffer for an expert of another family.
    """
    found, apart, told, tower = dict(experts), set[str](), {}, prefix_of(base_model, base)
    kinds = {"base": class_of(base_model)} | {
        f"expert {task!r}": class_of(model) for task, model in models.items()
    }
    require_one_family({name: kind for name, kind in kinds.items() if kind})
    for task, expert in experts.items():
        same = class_of(base_model) is class_of(models[task])
        known = in_base_names(base, expert, tower, prefix_of(models[task], expert), same)
        if known is None:
            continue
        rows = {
            name: rows_of(base.shape(name)[0], expert.shape(theirs)[0], base_model, models[task])
            for name, theirs in known.items()
            if differ_in_rows(base.shape(name), expert.shape(theirs)) and is_table(name, base)
        }
        heads = {
            name
            for name, theirs in known.items()
            if name not in rows
            and base.shape(name) != expert.shape(theirs)
            and outside(name, tower)
        }
        as_base = known == {name: name for name in base.names} and len(known) == len(expert.names)
        if as_base and not rows and not heads:
            continue
        shared = {name: theirs for name, theirs in known.items() if name not in heads}
        apart |= set(base.names) - set(shared)
        found[task] = Aligned(expert, base, shared, rows)
        left = sorted(set(expert.names) - set(shared.values()))
        told[task] = words(left, rows, expert, known, base)
    return Ends(found, frozenset(apart), {task: text for task, text in told.items() if text})


def words(
    left: list[str],
    rows: Mapping[str, Tensor],
    expert: Source,
    known: Mapping[str, str],
    base: Source,
) -> str:
    """What of an expert does not go into the merge."""
    said = (
        [f"its head stays with it ({', '.join(left[:4])}{', ...' * (len(left) > 4)})"]
        if left
        else []
    )
    for name in list(rows)[:1]:
        here, there = base.shape(name)[0], expert.shape(known[name])[0]
        said.append(
            f"of its {there} rows of words those {int((rows[name] >= 0).sum())} that the base's {here} have too"
        )
    return "; ".join(said)


def in_base_names(
    base: Source, expert: Source, tower: str, theirs: str, same: bool
) -> dict[str, str] | None:
    """The base's name -> the expert's, where all that is missing on either side stands outside of
    the tower; else None.

    tower, theirs: what the tower is called inside of each, with a dot behind it; empty where the
    model is the tower itself.
    same: both are of one class, so that a table of words that one of them lacks is tied there, and
    no head of a task.
    """
    known, ours = {}, set(base.names)
    for name in expert.names:
        inner = name.removeprefix(theirs) if theirs else name
        mine = tower + inner if not theirs or name.startswith(theirs) else name
        if mine in ours:
            known[mine] = name
    missing = [
        name
        for name in ours.difference(known)
        if (same and is_vocabulary(name)) or not outside(name, tower)
    ]
    left = set(expert.names).difference(known.values())
    surplus = [name for name in left if (same and is_vocabulary(name)) or not outside(name, theirs)]
    return None if missing or surplus or not known else known


def outside(name: str, tower: str) -> bool:
    """Whether a tensor stands on the tower and not in it; of a model that is its own tower none
    does but a pooler.
    """
    return bool(tower and not name.startswith(tower)) or POOLER in name.split(".")


def class_of(model: Any) -> type | None:
    """The class of a model; None of a LoRA folder, which tells none."""
    if isinstance(model, nn.Module):
        return type(model)
    return model_class(model) if (Path(model) / "config.json").is_file() else None


def prefix_of(model: Any, source: Source) -> str:
    """What a model with a head calls its tower, such as "bert."; empty for a tower."""
    prefix = getattr(class_of(model), "base_model_prefix", "")  # a LoRA folder has the base's names
    return (
        f"{prefix}."
        if prefix and any(name.startswith(f"{prefix}.") for name in source.names)
        else ""
    )


def is_table(name: str, base: Source) -> bool:
    """Whether a tensor has a row for each word: told by its name, or by having as many rows as one
    of that name.
    """
    tables = {base.shape(other)[0] for other in base.names if is_vocabulary(other)}
    return is_vocabulary(name) or (
        base.shape(name)[0] in tables and "embed" not in name and "prediction" in name
    )


def differ_in_rows(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes differ in the number of rows alone."""
    return len(one) == len(other) > 0 and one[0] != other[0] and one[1:] == other[1:]


def rows_of(here: int, there: int, base: Any, expert: Any) -> Tensor:
    """The expert's row of each of the base's, by token where both have a tokenizer, else by number;
    -1 for none. (here,)
    """
    rows = torch.arange(here)
    rows[rows >= there] = -1
    ours, theirs = vocabulary(base), vocabulary(expert)
    if ours and theirs:
        for token, number in ours.items():
            if number < here:
                rows[number] = theirs[token] if theirs.get(token, there) < there else -1
    return rows


def vocabulary(model: Any) -> dict[str, int]:
    """The tokens of a folder's tokenizer by text; none without one."""
    try:
        return dict(load_tokenizer(model).get_vocab()) if isinstance(model, str | Path) else {}
    except FeatCalError:
        return {}
