"""Stream models from their folders, and check that several compute alike.

Only the parts that compute are in memory; a thread reads the next block meanwhile. Models with the
same shapes can compute differently, with another rotary base, number of heads or activation.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from featcal.errors import FeatCalError, MissingTensor, TensorsDiffer, shorten
from featcal.models.blocks import replaced_forwards
from featcal.models.checkpoint import check_tensor
from featcal.models.modules import unpacked
from featcal.models.plan import part_of
from featcal.models.stored import ModelFolder, skeleton

Override = Callable[[str], Tensor | None]  # by name a tensor to load instead of the stored one
# keys that change no feature: training, labels and heads, special tokens, and what shapes show
HARMLESS = re.compile(
    r"_.*|.*(drop|initiali[sz]er|init_|jitter|_loss|loss_|label|classifier|summary_).*"
    r"|.*(_token_ids?|_token_index|_cache|vocab_size|_range|_std|_flash_attn)"
    r"|max_position_embeddings|n_positions|image_size|projection_dim|encoder_stride|layerscale_value"
    r"|tie_word_embeddings|pretraining_tp|gradient_checkpointing|output_.*|mask_.*|use_mask_token"
    r"|max_window_layers|stage_names|out_features|out_indices|reshape_hidden_states|apply_layernorm"
    r"|reduction|slow_but_exact|sparse_pred.*|(hidden|intermediate|patch)_size|num_channels"
    r"|num_(hidden_|decoder_)?layers|d_model|d_ff|n_embd|n_layer|ffn_dim"
)
# where they are None, shapes and other keys give them, or a model has no such head
DERIVED = ("head_dim", "n_inner", "classifier_pooling")
SAME = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}  # activations


class InMemoryModel:
    """A module in memory with the interface of StreamedModel."""

    def __init__(self, module: nn.Module):
        self.module = module

    @contextmanager
    def block(self, path: str) -> Iterator[nn.Module]:
        """Provide a submodule with packed experts as linears."""
        part = part_of(self.module, path)
        with unpacked(part):
            yield part

    def running(self) -> AbstractContextManager[nn.Module]:
        """Provide the model."""
        return nullcontext(self.module)

    def check_finite(self, label: str) -> None:
        """Raise NotFinite or BadData unless all parameters hold finite floating-point values."""
        for name, parameter in self.module.named_parameters():
            check_tensor(label, name, parameter)


class StreamedModel(ModelFolder):
    """The model of a folder; outside of `block` and `running` its parameters are on meta."""

    def __init__(
        self,
        folder: str | Path,
        # paths of the lists of blocks; other outermost lists are treated alike
        blocks: Sequence[str] = (),
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        *,
        override: Override = lambda name: None,
        like: type[PreTrainedModel] | None = None,  # to load a tower into, its head may be missing
    ):
        super().__init__(folder, skeleton(folder, dtype, device, like))
        self.require_complete(heads=not self.own_class)
        self.folder, self.device = self.files.folder, torch.device(device)
        self._override = override
        self._names = {names[0]: names for names in self.ties}
        self._meta = {name: self.module.get_parameter(name) for name in self._names}
        for name in self.stored.keys() - self._meta.keys():
            self.module.get_buffer(name).copy_(self.stored[name].read())
        # parameters that files leave out, such as sinusoidal positions
        self._computed = dict[str, Tensor]()
        for name in self._meta.keys() - self.stored.keys():
            if not self._reported(missing={name})[0]:
                path, _, attribute = name.rpartition(".")
                part = deepcopy(self.module.get_submodule(path)).to_empty(device="cpu")
                with torch.random.fork_rng(devices=[]):  # it is drawn first
                    self.module._init_weights(part)
                self._computed[name] = part.get_parameter(attribute).detach()
        first_names = {id(parameter): name for name, parameter in self._meta.items()}
        self._direct = {  # names of parameters by module, without those of its parts
            part: [first_names[id(p)] for p in part._parameters.values() if p is not None]
            for part in self.module.modules()
        }
        self._loaded: set[str] = set()
        self._ahead: Future[dict[str, Tensor]] | None = None  # tensors of the next block
        self._lists = [f"{path}." for path in blocks]
        for path, part in self.module.named_modules():
            dotted = f"{path}."
            nested = any(dotted.startswith(o) or o.startswith(dotted) for o in self._lists)
            if isinstance(part, nn.ModuleList) and not nested:
                self._lists.append(dotted)

    def check_finite(self, label: str) -> None:
        """Read every tensor once. Raises: NotFinite naming file and tensor."""
        self.files.check_finite()

    @contextmanager
    def block(self, path: str) -> Iterator[nn.Module]:
        """Load a submodule, packed experts as linears; changes to it are lost afterwards."""
        part = part_of(self.module, path)
        loaded: list[str] = []
        try:
            prefetched = self.cancel()
            self._load(self._below(part), loaded, prefetched.result() if prefetched else {})
            with unpacked(part):
                yield part
        finally:
            self._drop(loaded)

    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        """Let every forward load what it needs: blocks while they compute, other modules once."""
        resident: list[str] = []  # loaded until the end of the `with`

        def loading(forward: Callable[..., Any], names: Sequence[str], inside: bool) -> Any:
            @wraps(forward)  # pre-hooks run before and may stop it
            def run(*args: Any, **kwargs: Any) -> Any:
                loaded = [] if inside else resident
                try:
                    self._load(names, loaded)
                    return forward(*args, **kwargs)
                finally:
                    if inside:
                        self._drop(loaded)

            return run

        forwards = []
        lists = {m for m in self.module.modules() if type(m).forward is nn.Module.forward}
        for path, module in self.module.named_modules():
            names, dotted = self._below(module), f"{path}." if path else ""
            # some modules read parameters of their parts; one that contains blocks reads its own
            # and those of lists and embeddings (DeBERTa)
            if any(blocks.startswith(dotted) for blocks in self._lists):
                parts = [p for p in module.children() if isinstance(p, nn.Embedding) or p in lists]
                names = [name for part in (module, *parts) for name in self._direct[part]]
            if module not in lists:
                inside = any(path.startswith(blocks) for blocks in self._lists)
                forwards.append((module, loading(module.forward, names, inside)))
        try:
            self._load([next(iter(self._meta))], resident)  # a model reports its device as its own
            with replaced_forwards(forwards):
                yield self.module
        finally:
            self._drop(resident)

    def prefetch(self, path: str, thread: Executor) -> None:
        """Let the thread read a block into host memory, for the next `block` or `cancel`."""

        def read(name: str) -> Tensor:
            tensor = self.stored[name].read()
            return tensor.pin_memory() if self.device.type == "cuda" else tensor

        below = self._below(part_of(self.module, path))
        names = [n for n in below if n not in self._loaded and n in self.stored]
        self._ahead = thread.submit(lambda: {name: read(name) for name in names})

    def cancel(self) -> "Future[dict[str, Tensor]] | None":
        """Return the block that is read ahead, if any, and forget it."""
        tensors, self._ahead = self._ahead, None
        return tensors

    def _below(self, module: nn.Module) -> list[str]:
        """Return the parameters of a module and of all its parts."""
        names = dict[str, None]()
        for part in module.modules():  # a forward may have made some since, as BigBird's does
            names |= dict.fromkeys(self._direct.get(part, ()))
        return list(names)

    def _load(
        self, names: Iterable[str], loaded: list[str], prefetched: Mapping[str, Tensor] = {}
    ) -> None:
        """Load missing parameters, using prefetched tensors if given; append each to `loaded`."""
        for name in names:
            if name in self._loaded:
                continue
            tensor = prefetched.get(name, self._computed.get(name))
            if tensor is None:
                tensor = self._override(name)
            if tensor is None:
                tensor = self.stored[name].read()
            meta = self._meta[name]
            tensor = tensor.to(self.device, non_blocking=True).to(meta.dtype)
            # some modules compute differently without gradients
            self._set(self._names[name], nn.Parameter(tensor, meta.requires_grad))
            self._loaded.add(name)
            loaded.append(name)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._set(self._names[name], self._meta[name])
            self._loaded.remove(name)

    def _set(self, names: Iterable[str], parameter: nn.Parameter) -> None:
        for name in names:
            owner, _, attribute = name.rpartition(".")
            self.module.get_submodule(owner)._parameters[attribute] = parameter


ModelHandle = InMemoryModel | StreamedModel


def in_turn(models: Mapping[str, ModelHandle], path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield one block of every model by name, reading the next while the caller uses one."""
    names = sorted(models)
    streamed = {name: model for name, model in models.items() if isinstance(model, StreamedModel)}
    with ThreadPoolExecutor(1, "featcal-read") as thread:
        try:
            for name, following in zip(names, [*names[1:], ""], strict=True):
                with models[name].block(path) as block:
                    if following in streamed:
                        streamed[following].prefetch(path, thread)
                    yield name, block
        finally:
            for model in streamed.values():
                model.cancel()


def require_same_tensors(
    models: Mapping[str, ModelHandle], blocks: Sequence[str] | None = None
) -> None:
    """Raise FeatCalError unless all models have one family, configuration, names and shapes.

    models: by label in errors. blocks: paths outside of which row counts and poolers may differ.
    """
    inside = "" if blocks is None else tuple(f"{path}." for path in blocks)
    require_one_family({label: type(handle.module) for label, handle in models.items()})
    require_same_configs({n: getattr(m.module, "config", None) for n, m in models.items()})
    (here, reference), *others = (
        (label, {n: [*p.shape] for n, p in handle.module.named_parameters(remove_duplicate=False)})
        for label, handle in models.items()
    )
    for there, shapes in others:
        for name in sorted(reference.keys() ^ shapes.keys()):
            if name.startswith(inside) or "pooler" not in name.split("."):
                label, names = (there, shapes) if name in reference else (here, reference)
                raise MissingTensor(label, name, names)
        for name in (n for n in reference if n in shapes):
            this, that = reference[name], shapes[name]
            if this != that and (name.startswith(inside) or this[1:] != that[1:]):
                raise TensorsDiffer(name, here, this, there, that)


def require_one_family(kinds: Mapping[str, type]) -> None:
    """Raise TensorsDiffer unless the classes, by label, have their configs in one module."""
    # names and shapes do not show a family: RoBERTa's are BERT's with another meaning
    (here, this), *others = kinds.items()
    for there, that in others:
        configs = (getattr(kind, "config_class", None) for kind in (this, that))
        if len({getattr(config, "__module__", None) for config in configs}) > 1:
            alike = "if both compute alike, give them the same class in config.json"
            way_out = f"all models must be of one family; {alike}"
            classes = here, this.__name__, there, that.__name__
            raise TensorsDiffer("the architecture", *classes, way_out)


def require_same_configs(configs: Mapping[str, Any]) -> None:
    """Raise FeatCalError with keys, values and models unless all configs, by label, are alike."""
    (here, reference), *others = configs.items()
    for there, config in others:
        if not all(isinstance(each, PretrainedConfig) for each in (reference, config)):
            continue
        pairs = [(reference, config)]  # as given, and a tower of the one with the whole other
        pairs += [(getattr(reference, name, None), config) for name in reference.sub_configs]
        pairs += [(reference, getattr(config, name, None)) for name in config.sub_configs]
        pair = next(((this, that) for this, that in pairs if type(this) is type(that)), None)
        if pair is None:
            continue
        first, second = (dict(_computing(config)) for config in pair)
        values = {key: (first.get(key), second.get(key)) for key in {**first, **second}}
        differ = "; ".join(
            f"{key}: {that!r} and {this!r}"
            for key, (this, that) in values.items()
            if this != that and not (key.split(".")[-1] in DERIVED and None in (this, that))
        )
        if differ:
            problem = f"their config.json make models that compute differently ({differ})"
            other = "give experts that were fine-tuned from this base, or,"
            way_out = "where a config.json is wrong, correct it there"
            raise FeatCalError(f"{there} and {here}", problem, other, way_out)


def report_labels(
    kinds: Iterable[type], configs: Iterable[Any], use: str, report: Callable[[str], None]
) -> None:
    """Report labels that differ between heads of one class and size, whose rows are used alike."""
    labels = [sorted((getattr(c, "id2label", None) or {}).items()) for c in configs]
    names = dict.fromkeys(tuple(dict(pairs).values()) for pairs in labels)
    named = [shorten(str(each), 200) for each in names if "LABEL_0" not in each]
    if len({*kinds}) == len({*map(len, labels)}) == 1 < len(named):
        report(f"labels differ ({'; '.join(named)}): {use} row by row")


def _computing(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values that a model's blocks compute with, those of towers by path."""
    known = type(config)().to_dict().keys() - PretrainedConfig().to_dict().keys()
    for key, value in config.to_dict().items():
        tower = vars(config).get(key)
        if isinstance(tower, PretrainedConfig):
            yield from _computing(tower, f"{prefix}{key}.")
        elif key in known and HARMLESS.fullmatch(key) is None:
            if isinstance(value, Mapping):
                for name, parameter in value.items():
                    if name != "type":  # the old name of rope_type in rope_parameters
                        yield f"{prefix}{key}.{name}", parameter
                    if parameter in ("dynamic", "longrope"):  # scale by it
                        length = "max_position_embeddings"
                        yield f"{prefix}{length}", vars(config).get(length)
            else:
                value = list(value) if isinstance(value, tuple) else value
                yield prefix + key, SAME.get(value, value) if isinstance(value, str) else value
    if "Classification" in str(config.architectures):  # how the head reads the last block
        yield f"{prefix}classifier_pooling", vars(config).get("classifier_pooling")
