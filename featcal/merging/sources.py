"""Models as merging reads them: tensors by name, aligned with the base's vocabulary and heads."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPModel

from featcal.errors import FeatCalError, MissingTensor, TensorsDiffer, list_of, one_line
from featcal.models import load, streamed
from featcal.models.batch import Model
from featcal.models.checkpoint import SINGLE, LazyTensor, is_adapter
from featcal.models.lora import WEIGHTS, class_of, dense_model, without_adapters
from featcal.models.modules import tied_names
from featcal.models.stored import ModelCheckpoint

Tensors = Mapping[str, LazyTensor]  # a model as merging reads it, sorted by name

# Tables with one row per token: models with other vocabularies differ here in shape, and a row's
# direction says nothing about features.
TABLES = "shared embed_tokens token_embedding wte word_embeddings lm_head embed_in".split()
TABLES += "embed_out tok_embeddings word_embedding .embeddings tokens_embed lm_head.decoder".split()
VOCABULARY = (*(f"*{name}.weight" for name in TABLES), "embeddings.weight", "*lm_head.bias")
LISTED = 4  # rows that a message names


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
        if like:  # with all names of what is tied here, but not in the base
            state |= {n: t for n, t in plain.state_dict().items() if n in like.tensors}
        adapted = next(module.parameters()).dtype if plain is not module else None
        self.tensors: dict[str, LazyTensor] = {}
        for name, tensor in sorted(state.items()):
            dtype = adapted if adapted and tensor.dtype == torch.float64 else tensor.dtype
            kind, shape = str(dtype).removeprefix("torch."), tuple(tensor.shape)
            read = tensor.detach if tensor.is_meta else tensor.detach().cpu
            self.tensors[name] = LazyTensor(name, label, kind, shape, read)


Source = ModelCheckpoint | ModuleSource


def source(
    model: Model,
    label: str,
    part: str | None = None,
    like: Source | None = None,
    base: Model | None = None,  # needed for an adapter of it
) -> Source:
    """Open a module, a folder or an adapter, with the names and packing of `like`, the base."""
    if isinstance(model, nn.Module):
        model = model.get_submodule(part) if part and isinstance(model, CLIPModel) else model
        return ModuleSource(model, label, like)
    if base is not None and like is not None and is_adapter(model):
        return adapter_source(model, base, like, part)
    return ModelCheckpoint(model, part, like.module if isinstance(like, ModuleSource) else like)


def adapter_source(folder: str | Path, base: Model, like: Source, part: str | None) -> Source:
    """Open a folder of an adapter, added to the base by peft in float64 where it has one."""
    dense = dense_model(base, folder, torch.float64, load.load_vision if part else load.load_model)
    opened = ModuleSource(dense, Path(folder) / WEIGHTS, like)
    # map the tensors from a removed file, to have one dense model at a time in memory
    with TemporaryDirectory(prefix="featcal-lora-") as scratch:
        file = Path(scratch) / SINGLE
        save_file({name: t.read().contiguous() for name, t in opened.tensors.items()}, file)
        mapped = load_file(file)
    # a table for a head that the base ties is like the base's
    tables = [tensor for name, tensor in like.tensors.items() if is_vocabulary(name)]
    for name, tensor in opened.tensors.items():
        kind = like.tensors[name].kind if name in like.tensors else tables[0].kind
        opened.tensors[name] = replace(tensor, kind=kind, read=mapped[name].cpu)
    opened.module = like.module
    return opened


def require_alike(base: Tensors, experts: Mapping[str, Tensors]) -> None:
    """Require the same tensor names, shapes and dtypes. Raises: MissingTensor, TensorsDiffer."""
    for expert in experts.values():
        for has, lacks in ((base, expert), (expert, base)):
            if missing := sorted(has.keys() - lacks.keys()):
                file, other = next(iter(lacks.values())).file, has[missing[0]].file
                raise MissingTensor(f"{file} (compared with {other})", missing[0], lacks)
        for name, tensor in base.items():
            other = expert[name]
            for this, that in ((tensor.shape, other.shape), (tensor.dtype, other.dtype)):
                if this != that:
                    raise TensorsDiffer(name, tensor.file, this, other.file, that)


def in_one_precision(
    base: Tensors, experts: Mapping[str, Tensors], progress: Callable[[str], None]
) -> tuple[Tensors, dict[str, Tensors]]:
    """Return base and experts with every tensor in the widest precision in which one stores it."""
    wide = {}
    for name in base:
        dtypes = {model[name].dtype for model in (base, *experts.values()) if name in model}
        if len(dtypes) > 1 and all(d.is_floating_point and d.itemsize > 1 for d in dtypes):
            wide[name] = reduce(torch.promote_types, dtypes)

    def widened(tensors: Tensors) -> Tensors:
        return {n: in_precision(t, wide[n]) if n in wide else t for n, t in tensors.items()}

    if wide:
        used = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in wide.values()}))
        progress(f"models are stored in several precisions; they are merged in {used}")
    return widened(base), {task: widened(expert) for task, expert in experts.items()}


def in_precision(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return a tensor that is read in a precision, or in its own where that is wider."""

    def read() -> Tensor:
        return (stored := tensor.read()).to(torch.promote_types(stored.dtype, dtype))

    return replace(tensor, kind=str(dtype).removeprefix("torch."), read=read)


def untied_names(base: Source, experts: Sequence[Tensors]) -> dict[str, str]:
    """Return tensors that the base ties and an expert does not -> their names in the base."""
    untied = {}
    for names in base.ties:
        in_base = [name for name in names if name in base.tensors]
        if len(names) == 2 and len(in_base) == 1:  # tie_word_embeddings unties only such pairs
            untied |= {other: in_base[0] for other in set(names) - set(in_base)}
    return untied if any(other in expert for other in untied for expert in experts) else {}


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
    base_class = class_of(base_model)
    # an adapter has the base's tensors
    classes = {task: base_class if is_adapter(m) else class_of(m) for task, m in models.items()}
    labelled = {f"expert {task!r}": expert_class for task, expert_class in classes.items()}
    streamed.require_one_family({"base": base_class, **labelled})
    aligned, unmerged = dict(experts), set[str]()
    tower, names = tower_prefix(base_class, base), set(base)
    sizes = {tensor.shape[0] for name, tensor in base.items() if is_vocabulary(name)}
    tokens = vocabularies(base_model, models, max(sizes, default=0), progress)
    speaks = re.search(r"(LM(HeadModel)?|Generation|PreTraining)$", base_class.__name__)
    for task, expert in experts.items():
        expert_tower, same = tower_prefix(classes[task], expert), classes[task] is base_class
        expert_names = match_names(base, expert, tower, expert_tower, same)
        if expert_names is None:
            this, that = base_class.__name__, classes[task].__name__
            small = this if len(base) < len(expert) else that
            way_out = f"save all as {small}, if it loads with no missing weights but a head's"
            if not same and {base_class, classes[task]} != {*load.CLIP_CLASSES}:
                raise TensorsDiffer("the class", "base", this, f"expert {task!r}", that, way_out)
            continue
        rows, shared, ids = {}, dict(expert_names), (tokens.get("", {}), tokens.get(task, {}))
        for name, expert_name in expert_names.items():
            shape, expert_shape = base[name].shape, expert[expert_name].shape
            alike = len(shape) == len(expert_shape) > 0 and shape[1:] == expert_shape[1:]
            # one row per token: a table by its name, part of a language head by its size
            in_head = speaks and alike and shape[0] in sizes and is_outside(name, tower)
            if in_head or (alike and is_vocabulary(name)):
                own = match_rows(shape[0], expert_shape[0], *ids)
                if shape != expert_shape or not torch.equal(own, torch.arange(shape[0])):
                    rows[name] = own
            elif shape != expert_shape and is_outside(name, tower):
                del shared[name]
        if names == set(expert) and shared == {name: name for name in names} and not rows:
            continue
        unmerged |= names - set(shared)
        aligned[task] = {name: expert[in_expert] for name, in_expert in sorted(shared.items())}
        for name, own in rows.items():
            aligned[task][name] = with_base_rows(base[name], expert[expert_names[name]], own)
        report_head(task, set(expert) - set(shared.values()), progress)
        if rows:
            name, own = next(iter(rows.items()))
            count, matches = expert[expert_names[name]].shape[0], int((own >= 0).sum())
            progress(f"{task}: {matches} of its {count} embedding rows match the base's {len(own)}")
    return aligned, frozenset(unmerged)


def report_head(task: str, names: set[str], progress: Callable[[str], None]) -> None:
    """Report an expert's tensors that are not merged, if there are any."""
    if names:
        progress(f"{task}: its own head is not merged ({list_of(sorted(names))})")


def match_names(
    base: Tensors, expert: Tensors, tower: str, expert_tower: str, same: bool
) -> dict[str, str] | None:
    """Return base name -> expert name, or None if a tower (prefix) has tensors the other lacks."""
    expert_names = {re.sub(f"^{re.escape(expert_tower)}", tower, name): name for name in expert}
    shared = {name: expert_names[name] for name in expert_names if name in base}
    missing, surplus = set(base).difference(shared), set(expert).difference(shared.values())
    lacking = [*((n, tower) for n in missing), *((n, expert_tower) for n in surplus)]
    inside = any((same and is_vocabulary(n)) or not is_outside(n, prefix) for n, prefix in lacking)
    return None if inside else shared or None


def is_outside(name: str, tower: str) -> bool:
    """Return whether a tensor is outside the tower; a pooler, which some heads lack, always is."""
    return bool(tower and not name.startswith(tower)) or "pooler" in name.split(".")


def tower_prefix(kind: type, tensors: Tensors) -> str:
    """Return the prefix of the tower in a model with a head, such as "bert."; empty for a tower."""
    first = {name.partition(".")[0] for name in tensors}
    # classifiers on one tower of a CLIP or SigLIP do not have the prefix of their class
    flat = all(n.startswith(f"{load.VISION}.") or n.count(".") < 2 for n in tensors)
    names = (getattr(kind, "base_model_prefix", ""), *[load.VISION] * flat)
    return next((f"{name}." for name in names if name in first), "")


def with_base_rows(base: LazyTensor, expert: LazyTensor, rows: Tensor) -> LazyTensor:
    """Return an expert's token table in the base's rows; rows: the expert's row for each, or -1."""

    def read() -> Tensor:
        tensor = expert.finite()
        table = base.finite().to(tensor.dtype, copy=True)
        table[rows >= 0] = tensor[rows[rows >= 0]]
        return table

    return replace(expert, shape=base.shape, read=read)


def vocabularies(
    base: Model, experts: Mapping[str, Model], rows: int, progress: Callable[[str], None]
) -> dict[str, dict[str, int]]:
    """Return token -> row of every model with its own tokenizer, the base's under "".

    A row that the base's tokenizer lacks gets the experts' token if they agree.   rows: the base's.
    """
    if not rows:
        return {}
    from featcal.data.texts import VOCABULARIES

    tokens, contents = dict[str, dict[str, int]](), dict[str, tuple[bytes, ...]]()
    models = {name: m for name, m in {"": base, **experts}.items() if not isinstance(m, nn.Module)}
    for name, folder in models.items():
        files = [Path(folder) / file for file in (*VOCABULARIES, "added_tokens.json")]
        contents[name] = tuple(file.read_bytes() for file in files if file.is_file())
    for name in filter(contents.get, contents if len({*contents.values()} - {()}) > 1 else ()):
        try:
            tokens[name] = load.load_tokenizer(models[name]).get_vocab()
        except FeatCalError as error:
            progress(f"{name or 'base'}: rows are not matched by token ({one_line(error)})")
    base_rows = tokens.setdefault("", {})
    used, spare = set(base_rows.values()), dict[int, dict[str, str]]()  # by row: task by token
    for task in experts:
        for token, row in tokens.get(task, {}).items():
            if row < rows and row not in used and token not in base_rows:
                spare.setdefault(row, {}).setdefault(token, task)
    for number, (row, users) in enumerate(sorted(spare.items())):
        if len(users) == 1:
            (token,) = users
            meaning = f"{token}, which the base's tokenizer lacks"
        else:
            listed = " and ".join(f"{token} for {task}" for token, task in users.items())
            token, meaning = f"\0{row}", f"{listed}: the base's row is kept"  # no model's token
        base_rows[token] = row
        if number < LISTED:
            progress(f"embedding row {row} is {meaning}")
    if len(spare) > LISTED:
        progress(f"the base's tokenizer lacks {len(spare) - LISTED} more rows of the experts'")
    return tokens


def match_rows(
    size: int, expert_size: int, vocabulary: Mapping[str, int], expert_vocabulary: Mapping[str, int]
) -> Tensor:
    """Return the expert's row for each of the base, (size,), by token or index; -1 for none."""
    rows = torch.arange(size)
    for token, row in vocabulary.items() if expert_vocabulary else ():
        if row < size:
            rows[row] = expert_vocabulary.get(token, expert_size)
    rows[rows >= expert_size] = -1
    return rows
