"""Align experts whose ends differ from the base's: other vocabularies, other heads.

Embedding rows are matched by token; a token that an expert lacks keeps the base's row. Tensors
outside the shared tower, such as classifiers with other label counts, stay the base's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import FeatCalError
from featcal.merging.sources import Source, is_vocabulary
from featcal.models.load import load_tokenizer, model_class, require_one_family
from featcal.models.lora import is_peft

POOLER = "pooler"  # after the tower, but under its name: some heads use it, some do not


@dataclass(frozen=True)
class Aligned:
    """An expert under the base's names and with the base's vocabulary.

    known: base name -> expert name, for tensors both have.   rows: for each token table, the
    expert's row for each row of the base, -1 for none.
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
    """The aligned experts, and a sentence by task about what was left out."""

    experts: dict[str, Source]
    apart: frozenset[str]  # tensors that stay the base's, as not all experts have them in its shape
    left_out: dict[str, str]


def aligned(
    base: Source, experts: Mapping[str, Source], base_model: Any, models: Mapping[str, Any]
) -> Ends:
    """Align experts that share the base's tower; experts like the base stay as they are.

    base_model, models: base and experts as given, for their classes and tokenizers.
    Raises: TensorsDiffer for an expert of another family.
    """
    found, apart, left_out, tower = dict(experts), set[str](), {}, prefix_of(base_model, base)
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
        if text := words(left, rows, expert, known, base):
            left_out[task] = text
    return Ends(found, frozenset(apart), left_out)


def words(
    left: list[str],
    rows: Mapping[str, Tensor],
    expert: Source,
    known: Mapping[str, str],
    base: Source,
) -> str:
    """Say which tensors and embedding rows of an expert are not merged."""
    said = (
        [f"its own head is not merged ({', '.join(left[:4])}{', ...' * (len(left) > 4)})"]
        if left
        else []
    )
    for name in list(rows)[:1]:
        here, there = base.shape(name)[0], expert.shape(known[name])[0]
        said.append(
            f"{int((rows[name] >= 0).sum())} of its {there} embedding rows match the base's {here}"
        )
    return "; ".join(said)


def in_base_names(
    base: Source, expert: Source, tower: str, theirs: str, same: bool
) -> dict[str, str] | None:
    """Return base name -> expert name if everything missing on either side is outside the tower.

    tower, theirs: prefix of the tower in base and expert, with a dot; empty for a bare tower.
    same: both have one class, so a missing token table is tied, and no head of a task.
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
    """Return whether a tensor is outside the tower; a pooler always is."""
    return bool(tower and not name.startswith(tower)) or POOLER in name.split(".")


def class_of(model: Any) -> type | None:
    """Return the class of a model, or of a PeftModel's base; None for a LoRA folder."""
    if isinstance(model, nn.Module):
        return type(model.get_base_model() if is_peft(model) else model)  # type: ignore[operator]
    return model_class(model) if (Path(model) / "config.json").is_file() else None


def prefix_of(model: Any, source: Source) -> str:
    """Return the prefix of the tower in a model with a head, such as "bert."; empty for a tower."""
    prefix = getattr(class_of(model), "base_model_prefix", "")  # a LoRA folder has the base's names
    return (
        f"{prefix}."
        if prefix and any(name.startswith(f"{prefix}.") for name in source.names)
        else ""
    )


def is_table(name: str, base: Source) -> bool:
    """Return whether a tensor has one row per token, by its name or its number of rows."""
    tables = {base.shape(other)[0] for other in base.names if is_vocabulary(other)}
    return is_vocabulary(name) or (
        base.shape(name)[0] in tables and "embed" not in name and "prediction" in name
    )


def differ_in_rows(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes differ only in the number of rows."""
    return len(one) == len(other) > 0 and one[0] != other[0] and one[1:] == other[1:]


def rows_of(here: int, there: int, base: Any, expert: Any) -> Tensor:
    """Return the expert's row for each row of the base, (here,); -1 for none.

    Rows match by token where both models have a tokenizer, else by index.
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
    """Return token -> index of a folder's tokenizer; empty without one."""
    try:
        return dict(load_tokenizer(model).get_vocab()) if isinstance(model, str | Path) else {}
    except FeatCalError:
        return {}
