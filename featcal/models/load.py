"""Load models and tokenizers of local folders, and compare the configurations of several.

No code from a folder is ever run: a folder that needs it is refused, unless transformers has
classes of the same names. (transformers would ask at the terminal and take "y" for consent.)

Two models with the same tensors can still compute differently: another rotary base, number of heads
or activation leaves every shape as it is.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    CLIPModel,
    CLIPVisionModel,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from featcal.errors import BadFile, BadSetting, FeatCalError, TensorsDiffer, WrongKeys
from featcal.files import read_json
from featcal.models.checkpoint import MODULES, LazyCheckpoint, folder_path, is_adapter

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
VISION = "vision_model"  # a CLIPModel's vision tower
CLIP_CLASSES = (CLIPModel, CLIPVisionModel)


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the model of a local folder, of the class that config.json names."""
    return _load(model_class(folder), folder, dtype)


def load_vision(folder: str | Path, dtype: torch.dtype = torch.float32) -> CLIPVisionModel:
    """Load the vision tower of a CLIPVisionModel or CLIPModel. Raises: as load_model."""
    kind = model_class(folder)
    if kind not in CLIP_CLASSES:
        raise other_class(folder, kind.__name__, "a CLIPModel or CLIPVisionModel is needed here")
    return _load(CLIPVisionModel, folder, dtype)


def load_clip(folder: str | Path) -> CLIPModel:
    """Load a CLIPModel with both towers. Raises: as load_model; BadFile for another class."""
    kind = model_class(folder)
    if kind is not CLIPModel:
        needed = "a CLIPModel with image and text tower is needed here"
        raise other_class(folder, kind.__name__, needed)
    return _load(kind, folder, torch.float32)


def load_as_calibrated(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load what calibration works on: CLIP's vision tower, or the model. Raises: as load_model."""
    kind = model_class(folder)
    return _load(CLIPVisionModel if kind in CLIP_CLASSES else kind, folder, dtype)


def _load(kind: Any, folder: str | Path, dtype: torch.dtype) -> Any:
    checkpoint = LazyCheckpoint(folder, VISION if kind is CLIPVisionModel else None)
    checkpoint.require_floating()
    checkpoint.check_finite()
    with quiet_transformers():
        module, info = kind.from_pretrained(
            folder,
            config=read_config(kind, folder),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below by name instead of by a traceback
            output_loading_info=True,
        )
    unexpected = sorted(name for name in info["unexpected_keys"] if not in_head(name, module))
    missing = sorted(info["missing_keys"])
    misshapen = sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if missing or unexpected or misshapen:
        raise WrongKeys(folder, kind.__name__, missing, unexpected, misshapen)
    return module.eval()


def read_config(kind: Any, folder: str | Path) -> PretrainedConfig:
    """Read a model class's configuration, with eager where an attention needs packages or a GPU."""
    config: PretrainedConfig = kind.config_class.from_pretrained(folder, local_files_only=True)
    parts = [config]
    for each in parts:
        towers = (getattr(each, name, None) for name in each.sub_configs)
        parts += [tower for tower in towers if isinstance(tower, PretrainedConfig)]
        named = each._attn_implementation
        if named not in (None, "eager", "sdpa") or (named == "sdpa" and not kind._supports_sdpa):
            each._attn_implementation = "eager"
            text = f"attention {named!r} of config.json is not used, but eager"
            warnings.warn(text, stacklevel=1)
    return config


def in_head(name: str, module: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to a head, pooler or other tower, not to the tower below."""
    if "pooler" in name.split("."):
        return True
    prefix, own = f"{module.base_model_prefix}.", module.state_dict().keys()
    if any(each.startswith(prefix) for each in own):
        return not name.startswith(prefix)
    return name.split(".")[0] not in dict(module.named_children()) and name not in own


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a local folder. Raises: MissingPath; BadFile for none or for code."""
    for name in (CONFIG, TOKENIZER):
        refuse_code(folder_path(folder), name)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        problem = f"no tokenizer in this folder ({str(error).splitlines()[0]})"
        raise BadFile(folder, problem, "copy tokenizer.json and its config there") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading report and progress bars inside the `with`."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def torch_device(name: str | torch.device) -> torch.device:
    """Return a device by torch's name; "auto" is the GPU if there is one. Raises: BadSetting."""
    gpu = torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if gpu else "cpu") if name == "auto" else name)
    except (RuntimeError, TypeError, ValueError):
        raise BadSetting("device", name, "must be cpu, cuda, auto or a device of torch") from None
    if device.type == "cuda" and not gpu:
        expected = "needs a GPU that torch can use; auto or cpu run without"
        raise BadSetting("device", name, expected)
    return device


@contextmanager
def evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Switch off dropout and gradients inside the `with`; restore every module's mode.

    `no_grad`, not `inference_mode`, which has no version counters to show overwritten inputs.
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


def model_class(folder: str | Path) -> type[PreTrainedModel]:
    """Return the transformers class that config.json names. Raises: MissingPath, BadFile.

    A sentence encoder, which has a modules.json, is loaded without the head that it may name.
    """
    path = folder_path(folder)
    if is_adapter(folder):
        made = f"featcal merge average --base BASE --out MODEL --expert NAME={folder}"
        way_out = "merge, calibrate and compare accept it as an expert"
        problem = "a LoRA adapter, not a model"
        raise BadFile(folder, problem, way_out, f"to make a model of it: {made}")
    refuse_code(folder)
    config = read_json(path / CONFIG)
    if (path / MODULES).is_file():
        try:
            encoder = AutoConfig.from_pretrained(folder, local_files_only=True)
            return MODEL_MAPPING[type(encoder)]  # type: ignore[return-value]
        except (KeyError, ValueError, OSError):
            expected = "a sentence encoder's config.json names a model_type of transformers"
            raise other_class(folder, "of no model", expected) from None
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    kind = getattr(transformers, str(names[0]), None) if names else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        expected = "one class of transformers is expected, such as CLIPVisionModel"
        raise other_class(folder, architectures, expected)
    return kind


def refuse_code(folder: str | Path, name: str = CONFIG) -> list[str]:
    """Raise BadFile if a config.json or tokenizer_config.json names code that transformers lacks.

    Returns: code of models that it names, such as modeling_own.OwnModel, which is not run either.
    """
    path = Path(folder) / name
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        way_out = f"give the {name} that was saved with this model"
        raise BadFile(path, "not a mapping of settings", way_out)
    named = content.get("auto_map") or {}
    if not isinstance(named, dict):  # old tokenizers have a list
        named = {"AutoTokenizer": named}
    models = []
    for auto, classes in named.items():
        if auto.startswith(("AutoConfig", "AutoModel")) != (name == CONFIG):
            continue
        for code in classes if isinstance(classes, list) else [classes]:
            models += [str(code)] if auto.startswith("AutoModel") else []
            if code and not hasattr(transformers, str(code).rpartition(".")[2]):
                raise BadFile(
                    path,
                    f"auto_map names {code}, and no code from a checkpoint is run",
                    "if transformers' own class computes the same, remove auto_map; other models "
                    "cannot be used",
                )
    return models


def other_class(folder: str | Path, architectures: object, expected: str) -> BadFile:
    """Return the error of a config.json that names another class than needed."""
    return BadFile(Path(folder) / CONFIG, f"architectures is {architectures!r}", expected)


def same_tower(one: type[PreTrainedModel], other: type[PreTrainedModel]) -> bool:
    """Return whether two classes differ only in the head on their tower."""
    prefixes = {one.base_model_prefix, other.base_model_prefix}
    return one.config_class is other.config_class and len(prefixes) == 1 and "" not in prefixes


# keys that change no feature: training, labels and heads, special tokens, and what shapes show
HARMLESS = re.compile(
    r"_.*|.*(drop|initiali[sz]er|init_|jitter|_loss|loss_|label|classifier|summary_).*"
    r"|.*(_token_ids?|_token_index|_cache|vocab_size|_range|_std|_flash_attn)"
    r"|max_position_embeddings|n_positions|image_size|projection_dim|encoder_stride|layerscale_value"
    r"|tie_word_embeddings|pretraining_tp|gradient_checkpointing|output_.*|mask_.*|use_mask_token"
    r"|stage_names|out_features|out_indices|reshape_hidden_states|apply_layernorm|reduction"
    r"|slow_but_exact|sparse_pred.*|(hidden|intermediate|patch)_size|num_(hidden_|decoder_)?layers"
    r"|d_model|d_ff|n_embd|n_layer|ffn_dim|num_channels"
)
DERIVED = ("head_dim", "n_inner")  # where they are None, shapes and other keys give them

# names of one activation
SAME = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}


def require_one_family(kinds: Mapping[str, type]) -> None:
    """Raise TensorsDiffer unless the classes, by label, have their configs in one module.

    Same tensor names and shapes do not make one family: RoBERTa's are BERT's with another meaning.
    """
    (here, this), *others = kinds.items()
    for there, that in others:
        ours, theirs = (getattr(kind, "config_class", None) for kind in (this, that))
        if getattr(ours, "__module__", None) != getattr(theirs, "__module__", None):
            named = here, this.__name__, there, that.__name__
            alike = "if one computes as the other does, write its class into config.json"
            way_out = f"all models must be of one family; {alike}"
            raise TensorsDiffer("the architecture", *named, way_out)


def require_same_configs(configs: Mapping[str, Any]) -> None:
    """Raise FeatCalError, naming keys, values and models, unless all models compute alike.

    configs: by label in errors, the first one's is the reference; None for a model without.
    """
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
        ours, theirs = (dict(_computing(each)) for each in pair)
        values = {key: (ours.get(key), theirs.get(key)) for key in {**ours, **theirs}}
        differ = "; ".join(
            f"{key}: {that!r} and {this!r}"
            for key, (this, that) in values.items()
            if this != that and not (key.split(".")[-1] in DERIVED and None in (this, that))
        )
        if differ:
            raise FeatCalError(
                f"{there} and {here}",
                f"their config.json make models that compute differently ({differ})",
                "give experts that were fine-tuned from this base, or,",
                "where a config.json is wrong, correct it there",
            )


def _computing(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a class that its blocks compute with, those of towers by path."""
    known = type(config)().to_dict().keys() - PretrainedConfig().to_dict().keys()
    for key, value in config.to_dict().items():
        tower = getattr(config, key, None)
        if isinstance(tower, PretrainedConfig):
            yield from _computing(tower, f"{prefix}{key}.")
        elif key in known and HARMLESS.fullmatch(key) is None:
            if isinstance(value, Mapping):
                yield from ((f"{prefix}{key}.{name}", each) for name, each in value.items())
            else:
                value = list(value) if isinstance(value, tuple) else value
                yield prefix + key, SAME.get(value, value) if isinstance(value, str) else value
