"""Models as merging reads them: tensors by name, aligned with the base's vocabulary and heads."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPModel

from featcal.errors import FeatCalError, MissingTensor, TensorsDiffer
from featcal.models import load, streamed
from featcal.models.batch import Model
from featcal.models.checkpoint import SINGLE, LazyTensor, is_adapter
from featcal.models.lora import WEIGHTS, dense_model, is_peft, without_adapters
from featcal.models.modules import tied_names
from featcal.models.stored import ModelCheckpoint

Tensors = Mapping[str, LazyTensor]  # a model as merging reads it, sorted by name

# Tables with one row per token: models with other vocabularies differ here in shape, and a row's
# direction says nothing about features.
TABLES = ("shared", "embed_tokens", "token_embedding", "wte", "word_embeddings", "lm_head")
TABLES += ("embed_in", "embed_out", "tok_embeddings", "word_embedding", "backbone.embeddings")
TABLES += ("model.embeddings", "tokens_embed", "lm_head.decoder")  # Nemotron, GPT, XLM-RoBERTa
VOCABULARY = (*(f"*{name}.weight" for name in TABLES), "*lm_head.bias")
LISTED = 4  # rows or tensors that a message names


def is_vocabulary(name: str, patterns: tuple[str, ...] = VOCABULARY) -> bool:
    """Return whether a tensor's name is that of a table with one row per token."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class ModuleSource:
    """A module as merging reads it, with names and packing of `like`; adapters added in float64."""

    def __init__(self, module: nn.Module, label: str | Path, like: "Source | None" = None):
        self.module, self.ties = module, tied_names(module)
        plain = without_adapters(module, torch.float64)
        state = load.untied(plain)
        if isinstance(like, ModelCheckpoint):
            state = like.from_module(state)
        narrow = next(module.parameters()).dtype if plain is not module else None
        self.tensors: dict[str, LazyTensor] = {}
        for name, tensor in sorted(state.items()):
            dtype = narrow if narrow and tensor.dtype == torch.float64 else tensor.dtype
            kind, shape = str(dtype).removeprefix("torch."), tuple(tensor.shape)
            self.tensors[name] = LazyTensor(name, label, kind, shape, tensor.detach().cpu)


Source = ModelCheckpoint | ModuleSource


def source(model: Model, label: str, part: str | None = None, like: Source | None = None) -> Source:
    """Open a module or a folder, with the names and packing of `like`, the base."""
    if isinstance(model, nn.Module):
        model = model.get_submodule(part) if part and isinstance(model, CLIPModel) else model
        return ModuleSource(model, label, like)
    return ModelCheckpoint(model, part, like.module if isinstance(like, ModuleSource) else like)


def adapter_source(folder: str | Path, base: Model, like: Source, part: str | None) -> Source:
    """Open a folder of an adapter, added to the base by peft in float64 where it has one.

    The dense tensors are mapped from a removed file: one dense model at a time is in memory.
    """
    dense = dense_model(base, folder, torch.float64, load.load_vision if part else load.load_model)
    opened = ModuleSource(dense, Path(folder) / WEIGHTS, like)
    with TemporaryDirectory(prefix="featcal-lora-") as scratch:
        file = Path(scratch) / SINGLE
        save_file({name: each.read().contiguous() for name, each in opened.tensors.items()}, file)
        mapped = load_file(file)
    # a table for a head that the base ties is like the base's
    tables = [each for name, each in like.tensors.items() if is_vocabulary(name)]
    for name, each in opened.tensors.items():
        kind = like.tensors[name].kind if name in like.tensors else tables[0].kind
        opened.tensors[name] = replace(each, kind=kind, read=mapped[name].cpu)
    opened.module = like.module
    return opened


def expert_sources(
    experts: Mapping[str, Model], base: Model, origin: Source, part: str | None
) -> dict[str, Source]:
    """Open every expert, sorted by task; `origin` is the opened base."""
    return {
        task: adapter_source(expert, base, origin, part)  # type: ignore[arg-type]
        if is_adapter(expert := experts[task])
        else source(expert, f"expert {task!r}", part, origin)
        for task in sorted(experts)
    }


def require_alike(base: Tensors, experts: Mapping[str, Tensors]) -> None:
    """Require the same tensor names, shapes and dtypes. Raises: MissingTensor, TensorsDiffer."""
    for expert in experts.values():
        for has, lacks in ((base, expert), (expert, base)):
            if missing := sorted(has.keys() - lacks.keys()):
                file, other = next(iter(lacks.values())).file, has[missing[0]].file
                raise MissingTensor(f"{file} (compared with {other})", missing[0], lacks)
        for name, ours in base.items():
            theirs = expert[name]
            for this, that in ((ours.shape, theirs.shape), (ours.dtype, theirs.dtype)):
                if this != that:
                    raise TensorsDiffer(name, ours.file, this, theirs.file, that)


def in_one_precision(
    base: Tensors, experts: Mapping[str, Tensors], progress: Callable[[str], None]
) -> tuple[Tensors, dict[str, Tensors]]:
    """Return base and experts with every tensor in the widest precision in which one stores it."""
    wide = {}
    for name in base:
        kinds = {each[name].dtype for each in (base, *experts.values()) if name in each}
        if len(kinds) > 1 and all(k.is_floating_point and k.itemsize > 1 for k in kinds):
            wide[name] = reduce(torch.promote_types, kinds)

    def widened(tensors: Tensors) -> Tensors:
        return {n: in_precision(t, wide[n]) if n in wide else t for n, t in tensors.items()}

    if wide:
        written = " and ".join(sorted({str(kind).removeprefix("torch.") for kind in wide.values()}))
        progress(f"models are stored in several precisions; they are merged in {written}")
    return widened(base), {task: widened(expert) for task, expert in experts.items()}


def in_precision(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return a tensor that is read in a precision, or in its own where that is wider."""

    def read() -> Tensor:
        own = tensor.read()
        return own.to(torch.promote_types(own.dtype, dtype))

    return replace(tensor, kind=str(dtype).removeprefix("torch."), read=read)


def part_ties(base: Source, experts: Mapping[str, Tensors]) -> dict[str, str]:
    """Return the tensors that the base ties and an expert does not, each with its name in the base.

    Only a language model's table and head: tie_word_embeddings unties no others.
    """
    untied = {}
    for names in base.ties:
        kept = [name for name in names if name in base.tensors]
        if len(names) == 2 and len(kept) == 1:
            (other,) = set(names) - set(kept)
            if any(other in expert for expert in experts.values()):
                untied[other] = kept[0]
    return untied


def align(
    base: Tensors,
    experts: Mapping[str, Tensors],
    base_model: Model,
    models: Mapping[str, Model],
    progress: Callable[[str], None],
) -> tuple[dict[str, Tensors], frozenset[str]]:
    """Align experts that share the base's tower; return them and the tensors that stay the base's.

    Embedding rows are matched by token; a token that an expert lacks keeps the base's row. Tensors
    outside the shared tower, such as other classifiers, stay the base's.
    """
    ours = class_of(base_model)
    # an adapter has the base's tensors
    kinds = {task: ours if is_adapter(m) else class_of(m) for task, m in models.items()}
    named = {"base": ours} | {f"expert {task!r}": kind for task, kind in kinds.items()}
    streamed.require_one_family(named)
    aligned, kept = dict(experts), set[str]()
    tower, names = tower_prefix(ours, base), set(base)
    counts = {each.shape[0] for name, each in base.items() if is_vocabulary(name)}
    tokens = vocabularies(base_model, models, max(counts, default=0), progress)
    for task, expert in experts.items():
        prefix = tower_prefix(kinds[task], expert)
        known = match_names(base, expert, tower, prefix, kinds[task] is ours)
        if known is None:
            continue
        rows, shared = {}, dict(known)
        for name, theirs in known.items():
            here, there = base[name].shape, expert[theirs].shape
            # a table has one row per token: by its name, or a head's by its number of rows
            alike = len(here) == len(there) > 0 and here[1:] == there[1:]
            of_head = alike and here[0] in counts and "embed" not in name and "prediction" in name
            if alike and (is_vocabulary(name) or of_head):
                matched = match_rows(here[0], there[0], tokens.get("", {}), tokens.get(task, {}))
                if here != there or not torch.equal(matched, torch.arange(here[0])):
                    rows[name] = matched
            elif here != there and is_outside(name, tower):
                del shared[name]
        if names == set(expert) and shared == {name: name for name in names} and not rows:
            continue
        kept |= names - set(shared)
        aligned[task] = {name: expert[theirs] for name, theirs in sorted(shared.items())}
        for name, matched in rows.items():
            aligned[task][name] = with_base_rows(base[name], expert[known[name]], matched)
        report_head(task, set(expert) - set(shared.values()), progress)
        for name in list(rows)[:1]:
            matches, there = int((rows[name] >= 0).sum()), expert[known[name]].shape[0]
            here = base[name].shape[0]
            progress(f"{task}: {matches} of its {there} embedding rows match the base's {here}")
    return aligned, frozenset(kept)


def report_head(task: str, names: set[str], progress: Callable[[str], None]) -> None:
    """Report an expert's tensors that are not merged, if there are any."""
    listed = f"{', '.join(sorted(names)[:LISTED])}{', ...' * (len(names) > LISTED)}"
    if names:
        progress(f"{task}: its own head is not merged ({listed})")


def match_names(
    base: Tensors, expert: Tensors, tower: str, theirs: str, same: bool
) -> dict[str, str] | None:
    """Return base name -> expert name if what either lacks is outside the tower of this prefix."""
    moved = {tower + n.removeprefix(theirs) if n.startswith(theirs) else n: n for n in expert}
    known = {name: own for name, own in moved.items() if name in base}

    def inside(names: set[str], prefix: str) -> bool:
        return any((same and is_vocabulary(n)) or not is_outside(n, prefix) for n in names)

    missing, surplus = set(base).difference(known), set(expert).difference(known.values())
    return None if inside(missing, tower) or inside(surplus, theirs) else known or None


def is_outside(name: str, tower: str) -> bool:
    """Return whether a tensor is outside the tower; a pooler, which some heads lack, always is."""
    return bool(tower and not name.startswith(tower)) or "pooler" in name.split(".")


def class_of(model: Any) -> type:
    """Return the class of a model, or of a PeftModel's base. Raises: MissingPath, BadFile."""
    if isinstance(model, nn.Module):
        return type(model.get_base_model() if is_peft(model) else model)
    return load.model_class(model)


def tower_prefix(kind: type, tensors: Tensors) -> str:
    """Return the prefix of the tower in a model with a head, such as "bert."; empty for a tower."""
    prefix = f"{getattr(kind, 'base_model_prefix', '')}."
    return prefix if prefix != "." and any(n.startswith(prefix) for n in tensors) else ""


def with_base_rows(base: LazyTensor, expert: LazyTensor, rows: Tensor) -> LazyTensor:
    """Return an expert's token table in the base's rows; rows: the expert's row of each, or -1."""

    def read() -> Tensor:
        tensor = expert.finite()
        table = base.finite().to(tensor.dtype, copy=True)
        table[rows >= 0] = tensor[rows[rows >= 0]]
        return table

    return replace(expert, shape=base.shape, read=read)


def vocabularies(
    base: Model, experts: Mapping[str, Model], rows: int, progress: Callable[[str], None]
) -> dict[str, dict[str, int]]:
    """Return token -> row of every model with its own tokenizer, the base's under ""; {} if alike.

    A row that the base's tokenizer lacks gets the experts' token, or none if they use it for
    different tokens.   rows: number of rows of the base's tables.
    """
    if not rows:
        return {}
    from featcal.data.texts import VOCABULARIES

    tokens, contents = dict[str, dict[str, int]](), set()
    for name, folder in {"": base, **experts}.items():
        named = () if isinstance(folder, nn.Module) else (*VOCABULARIES, "added_tokens.json")
        files = [Path(folder) / file for file in named]  # type: ignore[arg-type]
        if content := tuple(file.read_bytes() for file in files if file.is_file()):
            contents.add(content)
            with suppress(FeatCalError):  # of a tokenizer that cannot be read
                tokens[name] = load.load_tokenizer(folder).get_vocab()
    if len(contents) < 2:
        return {}
    ours = tokens.setdefault("", {})
    used, spare = set(ours.values()), dict[int, dict[str, str]]()  # by row: task by token
    for task in experts:
        for token, row in tokens.get(task, {}).items():
            if row < rows and row not in used and token not in ours:
                spare.setdefault(row, {}).setdefault(token, task)
    for number, (row, tasks) in enumerate(sorted(spare.items())):
        token, said = next(iter(tasks)), f"{next(iter(tasks))}, which the base's tokenizer lacks"
        if len(tasks) > 1:
            named = " and ".join(f"{token} for {task}" for token, task in tasks.items())
            token, said = f"\0{row}", f"{named}: the base's row is kept"  # a token of none of them
        ours[token] = row
        if number < LISTED:
            progress(f"embedding row {row} is {said}")
    if len(spare) > LISTED:
        progress(f"the base's tokenizer lacks {len(spare) - LISTED} more rows of the experts'")
    return tokens


def match_rows(here: int, there: int, ours: Mapping[str, int], theirs: Mapping[str, int]) -> Tensor:
    """Return the expert's row for each of the base, (here,), by token or index; -1 for none."""
    rows = torch.arange(here)
    rows[rows >= there] = -1
    for token, index in ours.items() if theirs else ():
        if index < here:
            rows[index] = theirs[token] if theirs.get(token, there) < there else -1
    return rows
