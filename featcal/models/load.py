"""Load models and tokenizers of local folders, and write model folders.

No code from a folder is ever run: a folder that needs it is refused, unless transformers has
classes of the same names. (transformers would ask at the terminal and take "y" for consent.)
A folder is written from one tensor in memory at a time; bytes do not depend on the tensors' order.
"""

import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import CLIPModel, CLIPVisionModel, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from featcal.errors import BadFile, BadSetting, WrongKeys, as_bad_file
from featcal.files import atomic_folder, read_json
from featcal.models import checkpoint
from featcal.models.batch import Model
from featcal.models.checkpoint import ADAPTER, folder_path, modules_of

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
OPEN_CLIP, GENERATION = "open_clip_config.json", "generation_config.json"
VISION = "vision_model"  # a CLIPModel's vision tower
CLIP_CLASSES = (CLIPModel, CLIPVisionModel)
LIMIT = 5 * 10**9  # bytes per file, as transformers shards
_KINDS = {getattr(torch, name): kind for kind, name in checkpoint.KINDS.items()}
WEIGHTS = (  # files of weights and training states; an index lists shards
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5",
    ".msgpack", ".ot", ".gguf", ".onnx", ".onnx_data", ".pb", ".tflite",
)  # fmt: skip
# files that describe a folder's own model, and are written anew with every model
OWN_FILES = (CONFIG, OPEN_CLIP, ADAPTER, "mergekit_config.yml", "merge.json", "featcal.json")


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
        raise other_class(folder, kind.__name__, "a CLIPModel with both towers is needed (--clip)")
    return _load(kind, folder, torch.float32)


def load_as_calibrated(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load what calibration works on: CLIP's vision tower, or the model. Raises: as load_model."""
    kind = model_class(folder)
    return _load(CLIPVisionModel if kind in CLIP_CLASSES else kind, folder, dtype)


def _load(kind: Any, folder: str | Path, dtype: torch.dtype) -> Any:
    files = checkpoint.LazyCheckpoint(folder, VISION if kind is CLIPVisionModel else None)
    files.require_floating()
    files.check_finite()
    with quiet_transformers():
        options: Any = {"config": read_config(kind, folder), "dtype": dtype}
        options |= {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
        # misshapen tensors are reported below by name instead of by a traceback
        module, info = kind.from_pretrained(folder, **options, ignore_mismatched_sizes=True)
    is_buffer, keys = buffer_test(module), info["unexpected_keys"]
    unexpected = sorted(n for n in keys if not (in_head(n, module) or is_buffer(n)))
    missing = sorted(info["missing_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        module.pooler, missing = None, []  # encoders run without one
    misshapen = sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if missing or unexpected or misshapen:
        raise WrongKeys(folder, kind.__name__, missing, unexpected, misshapen)
    return module.eval()


def read_config(kind: Any, folder: str | Path) -> PretrainedConfig:
    """Read a model class's configuration; attention that needs packages or a GPU becomes eager."""
    config: PretrainedConfig = kind.config_class.from_pretrained(folder, local_files_only=True)
    parts = [config]
    for part in parts:
        towers = (getattr(part, name, None) for name in part.sub_configs)
        parts += [tower for tower in towers if isinstance(tower, PretrainedConfig)]
        kernel = part._attn_implementation
        if kernel not in (None, "eager", "sdpa") or (kernel == "sdpa" and not kind._supports_sdpa):
            part._attn_implementation = "eager"
            text = f"attention {kernel!r} of config.json is not used, but eager"
            warnings.warn(text, stacklevel=1)
    return config


def in_head(name: str, module: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to a head, pooler or other tower, not to the tower below."""
    if "pooler" in name.split("."):
        return True
    prefix, state = f"{module.base_model_prefix}.", module.state_dict()
    if any(key.startswith(prefix) for key in state):
        return not name.startswith(prefix)
    return name.split(".")[0] not in dict(module.named_children()) and name not in state


def buffer_test(module: PreTrainedModel) -> Callable[[str], bool]:
    """Return a test whether a name is that of a buffer that models make themselves."""
    buffers = {name for name, _ in module.named_non_persistent_buffers()}
    # of older files, also for models that no longer have such a buffer
    old = (".position_ids", ".masked_bias", ".attn.bias")
    return lambda name: name in buffers or name.endswith(old)


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a local folder. Raises: MissingPath; BadFile for none or for code."""
    for name in (CONFIG, TOKENIZER):
        refuse_code(folder_path(folder), name)
    way_out = "copy tokenizer.json and its config there"
    with as_bad_file(folder, "no tokenizer in this folder", way_out), quiet_transformers():
        options = {"local_files_only": True, "trust_remote_code": False}
        return transformers.AutoTokenizer.from_pretrained(folder, **options)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading report and progress bars inside the `with`."""
    with ExitStack() as restored:
        restored.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            restored.callback(logging.enable_progress_bar)
        yield


def torch_device(name: str | torch.device) -> torch.device:
    """Return a device by torch's name; "auto" is the GPU if there is one. Raises: BadSetting."""
    gpu = torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if gpu else "cpu") if name == "auto" else name)
        torch.empty(0, device="cpu" if device.type == "cuda" else device)
    except (AssertionError, RuntimeError, TypeError, ValueError):
        raise BadSetting("device", name, "must be cpu, cuda, auto or a device of torch") from None
    if device.type == "cuda" and not gpu:
        raise BadSetting("device", name, "needs a GPU that torch can use; auto or cpu run without")
    return device


@contextmanager
def evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Switch off dropout and gradients inside the `with`; restore every module's mode."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():  # inference_mode has no version counters to show overwritten inputs
            yield
    finally:
        for module, training in modes:
            module.training = training


def model_class(folder: str | Path) -> type[PreTrainedModel]:
    """Return the class that config.json names. Raises: MissingPath, BadSetting, BadFile."""
    path = folder_path(folder)
    if checkpoint.is_adapter(folder):
        way_out = "merge, calibrate and the command compare accept it as an expert"
        merge = f"featcal merge average --base BASE --out MODEL --expert NAME={quote(str(folder))}"
        raise BadFile(folder, "a LoRA adapter, not a model", way_out, f"make a model: {merge}")
    if (path / ADAPTER).is_file():
        problem = f"holds a whole model and {ADAPTER}, whose adapter transformers would add to it"
        way_out = "move the adapter to a folder of its own, which is an expert too"
        raise BadFile(folder, problem, f"{way_out}; or, if it is merged already, remove {ADAPTER}")
    refuse_code(folder)
    modules_of(path)  # refuses old layouts, which have no config.json here
    checkpoint.require_config(path)
    if not (path / CONFIG).is_file() and (path / OPEN_CLIP).is_file():
        way_out = f"make one of transformers: featcal convert {quote(str(folder))} --out MODEL"
        raise BadFile(folder, "a model of open_clip", way_out)
    architectures = read_json(path / CONFIG).get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    kind = getattr(transformers, name, None)
    # a sentence encoder is loaded without the head that it may name; a T5's without decoder
    if checkpoint.encodes_sentences(path) and not (kind and name.endswith("EncoderModel")):
        try:
            encoder = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            return transformers.MODEL_MAPPING[type(encoder)]  # type: ignore[return-value]
        except (KeyError, ValueError, OSError):
            expected = "a sentence encoder's config.json names a model_type of transformers"
            raise other_class(folder, "of no model", expected) from None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        expected = 'name the class of transformers that was saved, such as ["BertModel"]'
        raise other_class(folder, architectures, expected)
    return kind


def refuse_code(folder: str | Path, name: str = CONFIG) -> list[str]:
    """Raise BadFile if a config.json is of a quantised model, or names code transformers lacks.

    Returns: code of models that it names, such as modeling_own.OwnModel, which is not run either.
    """
    path = Path(folder) / name
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise BadFile(path, "not a mapping of settings", f"give the {name} saved with this model")
    parts = (content, *content.values())
    if any(isinstance(part, dict) and part.get("quantization_config") for part in parts):
        way_out = "give what it was made from; if its weights are plain, remove the key"
        raise BadFile(path, "a quantised model (quantization_config)", way_out)
    auto_map = content.get("auto_map") or {}
    if not isinstance(auto_map, dict):  # old tokenizers have a list
        auto_map = {"AutoTokenizer": auto_map}
    models = []
    for auto, classes in auto_map.items():
        if auto.startswith(("AutoConfig", "AutoModel")) != (name == CONFIG):
            continue
        for code in classes if isinstance(classes, list) else [classes]:
            if auto.startswith("AutoModel"):
                models.append(str(code))
            if code and not hasattr(transformers, str(code).rpartition(".")[2]):
                problem = f"auto_map names {code}, and no code from a checkpoint is run"
                way_out = "if transformers' own class computes the same, remove auto_map"
                raise BadFile(path, problem, f"{way_out}; other models cannot be used")
    return models


def other_class(folder: str | Path, architectures: object, expected: str) -> BadFile:
    """Return the error of a config.json that names another class than needed."""
    return BadFile(Path(folder) / CONFIG, f"architectures is {architectures!r}", expected)


def require_replaceable(folder: Path, kind: str = "") -> None:
    """Raise BadFile if a path is taken by anything but an empty folder or a folder of a model.

    kind: the file that shows a folder of the same kind.   A repository is never replaced.
    """
    files = {p.name: p.is_file() for p in folder.iterdir()} if folder.is_dir() else {"": True}
    weights = all(files.values()) and any(name.endswith(".safetensors") for name in files)
    same_kind = kind in files if kind else weights or files.keys() & {CONFIG, OPEN_CLIP}
    if folder.exists() and files and (".git" in files or not same_kind):
        reason = f"has no {kind}" if kind else "is not a model's folder"
        if ".git" in files:
            reason = "holds .git"
        raise BadFile(folder, f"exists and {reason}; it is not replaced", "name a new folder")


class ShardWriter:
    """The tensors in an unfinished folder, each in a file of its own; see `shard_writer`."""

    def __init__(self, folder: Path):
        self.folder, self.spool = folder, folder / ".spool"
        self.spool.mkdir()
        self.tensors: dict[str, tuple[Tensor, Path]] = {}  # on meta, with the file of the values

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; each name once."""
        assert name not in self.tensors, f"{name} written twice"
        flat, file = tensor.detach().cpu().contiguous(), self.spool / str(len(self.tensors))
        file.write_bytes(flat.reshape(-1).view(torch.uint8).numpy().data)
        self.tensors[name] = flat.to("meta"), file


@contextmanager
def shard_writer(folder: str | Path, needed: int | None = None) -> Iterator[ShardWriter]:
    """Write a folder of shards: `with shard_writer(folder) as writer: writer.write(name, tensor)`.

    The folder appears complete at the end, or not at all. Raises: BadFile, DiskFull.
    """
    require_replaceable(Path(folder))
    with atomic_folder(folder, needed) as hidden:
        yield (writer := ShardWriter(hidden))
        tensors = {name: tensor for name, (tensor, _) in sorted(writer.tensors.items())}
        split = split_torch_state_dict_into_shards(tensors, max_shard_size=LIMIT)
        for file, names in split.filename_to_tensors.items():
            _write_safetensors(hidden / file, {name: writer.tensors[name] for name in names})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (hidden / checkpoint.INDEX).write_text(text, "utf-8")
        shutil.rmtree(writer.spool)


def _write_safetensors(path: Path, tensors: dict[str, tuple[Tensor, Path]]) -> None:
    """Write one file: length of the header, header padded to 8 bytes, bytes of every tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, files = 0, []
    # widest first keeps all aligned
    for name, (tensor, file) in sorted(tensors.items(), key=lambda t: (-t[1][0].itemsize, t[0])):
        kind, span = _KINDS[tensor.dtype], [end, end := end + tensor.nbytes]
        header[name] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": span}
        files.append(file)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
            file.unlink()  # so that the disk never holds the model twice


def save_model(module: nn.Module, folder: str | Path, like: str | Path | None = None) -> Path:
    """Write config.json and safetensors, and copy the other files of the folder `like`."""
    state = untied(module)
    with shard_writer(folder, sum(tensor.nbytes for tensor in state.values())) as writer:
        write_config(module.config, type(module).__name__, writer.folder, like or module)
        for name, tensor in state.items():
            writer.write(name, tensor)
    return Path(folder)


def untied(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module, each tensor in memory under its first name only."""
    first: dict[object, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, Tensor):  # a module's own extra state may be something else
            start = tensor.data_ptr() or name  # on meta it is 0
            first.setdefault((start, tensor.shape, tensor.stride()), (name, tensor))
    return dict(first.values())


def write_config(config: Any, architecture: str, folder: Path, like: Model) -> None:
    """Write a class's config.json (of a CLIP tower its part), how `like` generates, its files."""
    part = architecture == "CLIPVisionModel" and isinstance(config, transformers.CLIPConfig)
    config = copy.deepcopy(config.vision_config if part else config)
    config.architectures = [architecture]
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:  # its dtype depends on how the model was loaded
            part.dtype = None
    config.save_pretrained(folder)
    copy_other_files(None if isinstance(like, nn.Module) else like, folder)
    kind, file = getattr(transformers, architecture, PreTrainedModel), folder / GENERATION
    if kind.can_generate() and not file.is_file():
        made = transformers.GenerationConfig.from_model_config
        with quiet_transformers():  # config.json may say how, and loses it here
            usual = [made(read_json(folder / CONFIG)), made(config)]
            how = getattr(like, "generation_config", None) or made(read_json(Path(like) / CONFIG))
        if how not in usual:
            file.write_text(how.to_json_string(ignore_metadata=True), "utf-8")


def copy_other_files(like: str | Path | None, folder: Path) -> None:
    """Copy all files of `like`, if given, but weights, its card and records of how it was made.

    Leaves out hidden files, links to folders, and sub-folders with weights that are no module.
    """
    if like is None:
        return
    parts = modules_of(Path(like))
    for path, folders, files in os.walk(like):
        inside = Path(path).relative_to(like)
        top, is_module = not inside.name, inside.as_posix() in parts
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        weights = {name for name in files if name.lower().endswith(WEIGHTS)}
        if weights and not top and not is_module:
            folders.clear()
            continue
        for name in sorted(files):
            described = top and (name in OWN_FILES or Path(name).stem.lower() == "readme")
            left_out = name.startswith(".") or described or (name in weights and not is_module)
            if not left_out and Path(path, name).is_file():
                (folder / inside).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(path, name), folder / inside / name)
