"""Folders that are no models by themselves: LoRA adapters, and checkpoints that name code of their
own.

Such code is never run, and nobody is asked whether it may be.

Transformers asks at the terminal before it imports such code, and takes a "y" for consent. Here the
folder is refused beforehand, unless transformers' own classes of the same names are used anyway."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    CLIPModel,
    CLIPVisionModel,
    PreTrainedModel,
)
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import logging

from featcal.errors import BadFile, BadSetting, TensorsDiffer, WrongKeys
from featcal.files import read_json
from featcal.models.checkpoint import LazyCheckpoint, folder_path

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
ADAPTER = "adapter_config.json"
MODULES = "modules.json"  # the parts of a SentenceTransformer, each a sub-folder


def is_adapter(model: object) -> bool:
    """Whether a model is given as a folder with an adapter and no model of its own."""
    return (
        isinstance(model, str | Path)
        and (Path(model) / ADAPTER).is_file()
        and not (Path(model) / CONFIG).is_file()
    )


def refuse_adapter(folder: str | Path) -> None:
    """Raise BadFile for an adapter where a model of its own is needed."""
    if is_adapter(folder):
        whole = f"featcal merge average --base BASE --expert NAME={folder} --out WHOLE makes a model of it and its base"
        raise BadFile(
            folder,
            "a LoRA adapter, not a model",
            "merge, calibrate and compare take it as an expert",
            whole,
        )


def refuse_code(folder: str | Path, name: str = CONFIG) -> None:
    """Raise BadFile where loading config.json or tokenizer_config.json would need code from the
    folder, or is no mapping.
    """
    path = Path(folder) / name
    if not path.is_file():
        return
    content = read_json(path)
    if not isinstance(content, dict):
        raise BadFile(
            path, "not a mapping of settings", f"give the {name} that was saved with this model"
        )
    if name == TOKENIZER and _named(content, "AutoTokenizer"):
        raise BadFile(
            path,
            "auto_map names code for the tokenizer, and no code from a checkpoint is run",
            _OWN,
        )
    if name != CONFIG or not content.get("auto_map"):
        return
    import transformers  # a second, and most folders name no code
    from transformers import CONFIG_MAPPING

    if _named(content, "AutoConfig") and content.get("model_type") not in CONFIG_MAPPING:
        problem = f"auto_map names code for a model of type {content.get('model_type')!r}, and no code from a checkpoint is run"
        raise BadFile(path, problem, "only models whose class transformers itself has can be used")
    foreign = [
        place
        for place in model_code(content)
        if not hasattr(transformers, place.rpartition(".")[2])
    ]
    if foreign:
        problem = f"auto_map names code for the model ({foreign[0]}), and no code from a checkpoint is run"
        raise BadFile(
            path,
            problem,
            "where the class that architectures names computes the same, remove the entry auto_map",
        )


_OWN = "where a class of transformers reads this tokenizer (tokenizer.json is there), remove the entry auto_map"


def model_code(config: dict[str, Any]) -> list[str]:
    """The classes in a folder's code that auto_map names for the model, such as
    modeling_own.OwnModel.
    """
    named = config.get("auto_map")
    entries = named.items() if isinstance(named, dict) else ()
    return [str(place) for auto, place in entries if auto.startswith("AutoModel")]


def _named(content: dict[str, Any], what: str) -> bool:
    """Whether auto_map, a mapping or in old files a list, names code for this."""
    named = content.get("auto_map")
    return what in named if isinstance(named, dict) else bool(named)


VISION = "vision_model"  # the tower of a CLIPModel that plays the vision model


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a local folder, its class read from config.json.

    Raises: MissingPath, BadFile (no safetensors, no such model class), TruncatedFile, NotFinite
    (file and tensor), WrongKeys (missing, unexpected or misshapen weights by name).
    """
    return _loaded(model_class(folder), folder, dtype, part=None)


def load_vision(folder: str | Path, dtype: torch.dtype = torch.float32) -> CLIPVisionModel:
    """The vision tower of a CLIPVisionModel or a CLIPModel folder. Raises: as load_model."""
    return _loaded(CLIPVisionModel, folder, dtype, vision_part(folder))


def load_clip(folder: str | Path) -> CLIPModel:
    """A CLIPModel with both towers and projections. Raises: as load_model; BadFile for a folder of
    another class.
    """
    if model_class(folder) is not CLIPModel:
        raise other_class(
            folder,
            model_class(folder).__name__,
            "a CLIPModel with image and text tower is needed here",
        )
    return _loaded(CLIPModel, folder, torch.float32, part=None)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a local folder. Raises: MissingPath; BadFile when the folder has none or
    names code for it.
    """
    for name in (CONFIG, TOKENIZER):
        refuse_code(folder_path(folder), name)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        AttributeError,
        TypeError,
    ) as error:  # whatever its files cannot be
        first = str(error).splitlines()[0]
        raise BadFile(
            folder,
            f"no tokenizer in this folder ({first})",
            "copy tokenizer.json and its config there",
        ) from None


def model_class(folder: str | Path) -> type[PreTrainedModel]:
    """The transformers class that config.json names. Raises: MissingPath, BadFile (also for code it
    needs).
    """
    place = folder_path(folder)
    refuse_adapter(folder)
    refuse_code(folder)
    config = read_json(place / CONFIG)
    if (place / MODULES).is_file():
        return _bare_class(folder)
    architectures = config.get("architectures") if isinstance(config, dict) else None
    kind = getattr(transformers, str(architectures[0]), None) if architectures else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise other_class(
            folder, architectures, "one class of transformers is expected, such as CLIPVisionModel"
        )
    return kind


def _bare_class(folder: str | Path) -> type[PreTrainedModel]:
    """The class without a head, by which sentence-transformers loads its encoders whatever class
    config.json names.
    """
    try:
        return MODEL_MAPPING[type(AutoConfig.from_pretrained(folder, local_files_only=True))]
    except (KeyError, ValueError, OSError):
        raise other_class(
            folder,
            "of no model",
            "a sentence encoder's config.json names a model_type of transformers",
        ) from None


def other_class(folder: str | Path, architectures: object, expected: str) -> BadFile:
    """The error of a config.json that names another class than is needed."""
    return BadFile(Path(folder) / CONFIG, f"architectures is {architectures!r}", expected)


def vision_part(folder: str | Path) -> str | None:
    """Which part of the checkpoint is the vision tower: one of several of a CLIPModel, or all there
    is (None).
    """
    kind = model_class(folder)
    if kind not in (CLIPModel, CLIPVisionModel):
        raise other_class(folder, kind.__name__, "a CLIPModel or CLIPVisionModel is needed here")
    return VISION if kind is CLIPModel else None


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' loading report and progress bars, and leaves them as they were."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _loaded(kind: Any, folder: str | Path, dtype: torch.dtype, part: str | None) -> Any:
    checkpoint = LazyCheckpoint(folder, part)
    checkpoint.require_floating()
    checkpoint.check_finite()
    with quiet():
        module, info = kind.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below by name instead of by a traceback
            output_loading_info=True,
        )
    # the other parts of a whole CLIPModel are left out on purpose; position_ids is a counter that
    # older files store
    unexpected = sorted(
        n for n in info["unexpected_keys"] if not (part or n.endswith("embeddings.position_ids"))
    )
    misshapen = sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if info["missing_keys"] or unexpected or misshapen:
        raise WrongKeys(folder, kind.__name__, sorted(info["missing_keys"]), unexpected, misshapen)
    loaded: nn.Module = module.eval()
    return loaded


def load_as_calibrated(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """What calibration is about in a folder: of a whole CLIP the vision tower, of others the model.
    Raises: as load_model.
    """
    load = load_vision if model_class(folder) in (CLIPModel, CLIPVisionModel) else load_model
    return load(folder, dtype)


def torch_device(word: str | torch.device) -> torch.device:
    """A device by torch's name, or "auto": the GPU where there is one. Raises: BadSetting; so for
    cuda that torch lacks.
    """
    there = torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if there else "cpu") if word == "auto" else word)
    except (RuntimeError, TypeError, ValueError):
        raise BadSetting(
            "device", word, "must be cpu, cuda or auto, or another device of torch"
        ) from None
    if device.type == "cuda" and not there:
        way_out = "needs a GPU that this torch can use (see `featcal doctor`); write auto or cpu to run without one"
        raise BadSetting("device", word, way_out)
    return device


@contextmanager
def evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Without dropout and without gradients inside the `with`; every module's own mode is restored.

    `no_grad`, not `inference_mode`: the version counters that show overwritten inputs exist only in
    the former.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


# what transformers and its validation of configurations raise for a value they cannot use; the last
# is the parent of their own
_UNUSABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
)


def skeleton(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    like: type[PreTrainedModel] | None = None,
) -> tuple[PreTrainedModel, str | None]:
    """The model of a folder in evaluation mode, parameters of `dtype` on meta; and which part of
    the checkpoint it is.

    The class is read from config.json and is one of transformers' own; of a whole CLIP it is the
    vision tower. Parameters that the model ties are one object under several names. Buffers are on
    `device`.
    like: a class to build instead, with the same tower: the model without its head, or with another
    one.
    Raises: MissingPath; BadFile for a config.json that makes no model.
    """
    kind: Any = (
        like if like is not None and same_tower(model_class(folder), like) else model_class(folder)
    )
    part = VISION if kind is CLIPModel else None
    kind = CLIPVisionModel if part else kind
    try:
        # some classes draw parameters while being built
        with (
            quiet(),
            torch.random.fork_rng(devices=[]),
            parameters_on_meta(),
            only_buffers_initialised(),
        ):
            config = kind.config_class.from_pretrained(folder, local_files_only=True)
            module: PreTrainedModel = kind._from_config(config, dtype=dtype).eval()
    except _UNUSABLE as error:
        problem = f"transformers makes no {kind.__name__} of it ({' '.join(str(error).split())})"
        raise BadFile(
            Path(folder) / "config.json",
            problem,
            "give the config.json that was saved with these weights",
        ) from None
    keep_wide(module, dtype)
    for each in module.modules():
        each._buffers.update(
            {name: b.to(device) for name, b in each._buffers.items() if b is not None}
        )
    return module, part


def same_tower(one: type[PreTrainedModel], other: type[PreTrainedModel]) -> bool:
    """Whether two classes are one family's, so that they differ in what stands on the tower."""
    return (
        one.config_class is other.config_class
        and bool(one.base_model_prefix)
        and one.base_model_prefix == other.base_model_prefix
    )


def require_one_family(kinds: Mapping[str, type]) -> None:
    """Raise TensorsDiffer where models, by the name errors use, are of classes that transformers
    describes in different places.

    Tensors of the same names and shapes do not make them one family: RoBERTa's are BERT's, and mean
    something else.
    """
    (here, this), *others = kinds.items()
    for there, that in others:
        if family(that) != family(this):
            way_out = "all models must be of one family; where one computes as the other does, write its class into config.json"
            raise TensorsDiffer(
                "the architecture", here, this.__name__, there, that.__name__, way_out
            )


def family(kind: type) -> str | None:
    """Where transformers describes the configurations of a class and of those it is part of; None
    of other classes.
    """
    return getattr(getattr(kind, "config_class", None), "__module__", None)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module is given loses its numbers; one on meta already stays
    the object it is.
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(
                torch.empty_like(param, device="meta"), requires_grad=param.requires_grad
            )
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def only_buffers_initialised() -> Iterator[None]:
    """Inside, transformers fills only modules with a buffer somewhere below: all others would be
    filled on meta, in vain.

    That is most of a small model's building time.
    """
    initialise = PreTrainedModel._initialize_weights

    def where_needed(self: PreTrainedModel, module: nn.Module, *more: Any, **named: Any) -> None:
        if next(module.buffers(), None) is not None:
            initialise(self, module, *more, **named)

    PreTrainedModel._initialize_weights = where_needed  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = initialise  # type: ignore[method-assign]


def keep_wide(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives parameters that transformers keeps in float32 beside a half precision (T5's wo beside
    float16) that dtype.
    """
    wide = module._get_dtype_plan(dtype)
    if wide:
        pattern, _, _ = build_glob_alternation(list(wide))
        for name, parameter in module.named_parameters():
            if pattern.search(name):
                parameter.data = parameter.data.float()


CLIP_TEXT = "clip_text_model"  # pools by itself: the token that ends the text


def pooled(model: nn.Module, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """(n, h): of texts the mean over the tokens that are no padding, as sentence encoders do; of
    others what the model pools.

    None where there is nothing pooled. Source: Reimers and Gurevych, Sentence-BERT,
    2019; all-MiniLM-L6-v2's 1_Pooling/config.json (pooling_mode_mean_tokens).
    """
    mask, hidden = batch.get("attention_mask"), getattr(output, "last_hidden_state", None)
    of_clip = getattr(getattr(model, "config", None), "model_type", None) == CLIP_TEXT
    if (
        of_clip
        or not isinstance(mask, Tensor)
        or not isinstance(hidden, Tensor)
        or mask.shape != hidden.shape[:2]
    ):
        found: Tensor | None = getattr(output, "pooler_output", None)
        return found
    return token_mean(hidden, mask)


def token_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of hidden (n, tokens, h) where mask (n, tokens) is 1, (n, h)."""
    counted = mask.to(hidden)[..., None]
    total: Tensor = (hidden * counted).sum(1) / counted.sum(1)
    return total
