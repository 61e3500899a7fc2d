"""Align experts with the base: other vocabularies, other heads.

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
from featcal.merging.sources import Derived, Source, is_vocabulary
from featcal.models.batch import Model
from featcal.models.load import load_tokenizer, model_class, require_one_family
from featcal.models.lora import is_peft

POOLER = "pooler"  # after the tower, but under its name: some heads use it, some do not


@dataclass
class Aligned(Derived):
    """An expert under the base's names and with the base's vocabulary.

    known: base name -> expert name, for the tensors that are merged.
    rows:  for each token table, the expert's row for each row of the base, -1 for none.
    """

    base: Source
    known: Mapping[str, str]
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The base's names of the shared tensors, sorted."""
        return sorted(self.known)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, token tables with the base's rows."""
        return self.base.shape(name) if name in self.rows else self.inner.shape(self.known[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the expert."""
        return self.inner.dtype(self.known[name])

    def file_of(self, name: str) -> object:
        """Return the expert's file of a tensor, or a label."""
        return self.inner.file_of(self.known[name])

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU, token tables with the base's rows. Raises: NotFinite."""
        tensor = self.inner.finite_tensor(self.known[name])
        if name not in self.rows:
            return tensor
        table, rows = self.base.finite_tensor(name).to(tensor.dtype, copy=True), self.rows[name]
        table[rows >= 0] = tensor[rows[rows >= 0]]
        return table


@dataclass(frozen=True)
class Alignment:
    """The aligned experts.

    kept:     tensors that stay the base's, as not all experts have them in its shape.
    left_out: by task, a sentence about what is not merged.
    """

    experts: dict[str, Source]
    kept: frozenset[str]
    left_out: dict[str, str]


def align(
    base: Source, experts: Mapping[str, Source], base_model: Model, models: Mapping[str, Model]
) -> Alignment:
    """Align experts that share the base's tower; experts like the base stay as they are.

    base_model, models: base and experts as given, for their classes and tokenizers.
    Raises: TensorsDiffer for an expert of another family.
    """
    classes = {"base": class_of(base_model)} | {
        f"expert {task!r}": class_of(model) for task, model in models.items()
    }
    require_one_family({label: kind for label, kind in classes.items() if kind})
    aligned, kept, left_out = dict(experts), set[str](), {}
    tower = tower_prefix(base_model, base)
    token_counts = {base.shape(name)[0] for name in base.names if is_vocabulary(name)}
    for task, expert in experts.items():
        same = class_of(base_model) is class_of(models[task])
        known = match_names(base, expert, tower, tower_prefix(models[task], expert), same)
        if known is None:
            continue
        rows, heads = {}, set()
        for name, theirs in known.items():
            here, there = base.shape(name), expert.shape(theirs)
            other_rows = (
                len(here) == len(there) > 0 and here[0] != there[0] and here[1:] == there[1:]
            )
            # a table has one row per token: by its name, or a head's by its number of rows
            if other_rows and (
                is_vocabulary(name)
                or (here[0] in token_counts and "embed" not in name and "prediction" in name)
            ):
                rows[name] = match_rows(here[0], there[0], base_model, models[task])
            elif here != there and is_outside(name, tower):
                heads.add(name)
        shared = {name: theirs for name, theirs in known.items() if name not in heads}
        as_base = known == {name: name for name in base.names} and len(known) == len(expert.names)
        if as_base and not rows and not heads:
            continue
        kept |= set(base.names) - set(shared)
        aligned[task] = Aligned(expert, base, shared, rows)
        notes = []
        if left := sorted(set(expert.names) - set(shared.values())):
            more = ", ..." if len(left) > 4 else ""
            notes.append(f"its own head is not merged ({', '.join(left[:4])}{more})")
        for name in list(rows)[:1]:
            matched, there = int((rows[name] >= 0).sum()), expert.shape(known[name])[0]
            notes.append(
                f"{matched} of its {there} embedding rows match the base's {base.shape(name)[0]}"
            )
        if notes:
            left_out[task] = "; ".join(notes)
    return Alignment(aligned, frozenset(kept), left_out)


def match_names(
    base: Source, expert: Source, tower: str, theirs: str, same: bool
) -> dict[str, str] | None:
    """Return base name -> expert name if everything missing on either side is outside the tower.

    tower, theirs: prefix of the tower in base and expert, with a dot; empty for a bare tower.
    same: both have one class, so a missing token table is tied, and no head of a task.
    """
    known, ours = {}, set(base.names)
    for name in expert.names:
        in_base = tower + name.removeprefix(theirs) if name.startswith(theirs) else name
        if in_base in ours:
            known[in_base] = name

    def inside(names: set[str], prefix: str) -> bool:
        return any((same and is_vocabulary(n)) or not is_outside(n, prefix) for n in names)

    missing, surplus = ours.difference(known), set(expert.names).difference(known.values())
    return None if inside(missing, tower) or inside(surplus, theirs) else known or None


def is_outside(name: str, tower: str) -> bool:
    """Return whether a tensor is outside the tower; a pooler always is."""
    return bool(tower and not name.startswith(tower)) or POOLER in name.split(".")


def without(model: Source, hidden: frozenset[str]) -> Source:
    """Return a source with some of its tensors hidden."""
    return Aligned(model, model, {name: name for name in model.names if name not in hidden})


def class_of(model: Any) -> type | None:
    """Return the class of a model, or of a PeftModel's base; None for a LoRA folder."""
    if isinstance(model, nn.Module):
        return type(model.get_base_model() if is_peft(model) else model)  # type: ignore[operator]
    return model_class(model) if (Path(model) / "config.json").is_file() else None


def tower_prefix(model: Model, source: Source) -> str:
    """Return the prefix of the tower in a model with a head, such as "bert."; empty for a tower."""
    # a LoRA folder has the base's names
    prefix = f"{getattr(class_of(model), 'base_model_prefix', '')}."
    return prefix if prefix != "." and any(n.startswith(prefix) for n in source.names) else ""


def match_rows(here: int, there: int, base: Model, expert: Model) -> Tensor:
    """Return the expert's row for each row of the base, (here,); -1 for none.

    Rows match by token where both models have a tokenizer, else by index.
    """
    rows = torch.arange(here)
    rows[rows >= there] = -1
    ours, theirs = vocabulary(base), vocabulary(expert)
    if ours and theirs:
        for token, index in ours.items():
            if index < here:
                rows[index] = theirs[token] if theirs.get(token, there) < there else -1
    return rows


def vocabulary(model: Model) -> dict[str, int]:
    """Return token -> index of a folder's tokenizer; empty without one."""
    try:
        return {} if isinstance(model, nn.Module) else dict(load_tokenizer(model).get_vocab())
    except FeatCalError:
        return {}
