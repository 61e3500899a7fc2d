"""Read checkpoint folders of safetensors: names, shapes and dtypes at once, tensors on demand.

Tensors are read, not mapped: every touched page of a map would count as memory of this process.
torch is imported only where tensors are read, so that headers can be checked first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from featcal.errors import BadData, BadFile, MissingPath, MissingTensor, NotFinite, TruncatedFile
from featcal.files import optional_json, read_json
from featcal.settings import require

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# such as model.fp16.safetensors, or the index of its shards
VARIANT = re.compile(r"model\.([^.]+(?<!-of-\d{5})\.safetensors|safetensors\.index\.[^.]+\.json)")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODULES = "modules.json"  # of a SentenceTransformer: its modules, each in a sub-folder
ADAPTER = "adapter_config.json"
CONFIGS = ("config.json", ADAPTER, "open_clip_config.json")
PICKLE = re.compile(r"(?!optimizer|scheduler|scaler|rng_state|training_args).*\.(bin|pth?|ckpt)")
WRAPPED = re.compile(  # names inside wrappers of DDP, TRL, torch.compile, FSDP and peft
    r"(module|pretrained_model)\.|.*\b(_orig_mod|_fsdp_wrapped_module|base_model\.model|base_layer)\."
)
KINDS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of a model that is read when it is needed."""

    name: str
    file: object  # or its model, in errors
    kind: str  # torch's name of its dtype, such as float32
    shape: tuple[int, ...]
    read: Callable[[], "Tensor"]  # on the CPU

    @property
    def dtype(self) -> "torch.dtype":
        """Return the dtype."""
        import torch

        return getattr(torch, self.kind)  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def finite(self) -> "Tensor":
        """Return the tensor. Raises: NotFinite, BadData naming file and tensor."""
        check_tensor(self.file, self.name, tensor := self.read(), self.name.endswith("weight"))
        return tensor


def no_safetensors(folder: Path, wanted: str = SINGLE) -> BadFile:
    """Return the error of a folder without safetensors, with a way out if it holds a pickle."""
    files = sorted(path.name for path in folder.iterdir() if path.exists())
    as_one = "with its shards joined (safetensors.torch: load_file of each, one save_file)"
    shards = "or its shards with their index" if wanted == SINGLE else as_one
    way_out = f"give the folder that holds {wanted}, {shards}"
    if pickles := list(filter(PICKLE.fullmatch, files)):
        way_out = (
            f"{pickles[0]} is a pickle, which can run code and is not read here: if you trust it, "
            "load it and write it with save_pretrained(folder) or safetensors.torch.save_file"
        )
    elif others := [name for name in files if name.endswith((".gguf", ".h5", ".msgpack"))]:
        way_out = f"{others[0]} is not read: give the checkpoint that it was made from"
    if (folder / wanted).is_symlink():
        target = (folder / wanted).readlink()
        way_out = f"download it again: {wanted} is a link to {target}, which does not exist"
    elif variants := [name for name in files if VARIANT.fullmatch(name)]:
        plain = INDEX if variants[0].endswith(".json") else SINGLE
        way_out = f"to use the variant {variants[0]}, copy it to {plain}"
    content = ", ".join(files[:8]) or "nothing"
    return BadFile(folder, f"no {wanted} in this folder (found: {content})", way_out)


def folder_path(folder: Any) -> Path:
    """Return the path of a model's folder. Raises: BadSetting for other types; MissingPath."""
    expected = "must be a module or the path of a folder"
    require(isinstance(folder, str | PathLike), "model", type(folder).__name__, expected)
    if not Path(folder).is_dir():
        way_out = "check the path; hub names must be fetched first"
        raise MissingPath(folder, "a checkpoint folder", way_out)
    return Path(folder)


def require_config(folder: Path, named_by: str = "model") -> None:
    """Raise BadSetting unless a folder holds the configuration of a model or of an adapter."""

    def has_config(path: Path) -> bool:
        return any((path / name).is_file() for name in CONFIGS)

    inner = next(filter(has_config, sorted(folder.iterdir())), "no folder in it")
    expected = f"must be a model folder, which has a config.json; {inner} has one"
    require(has_config(folder), named_by, str(folder), expected)


def is_adapter(model: object) -> bool:
    """Return whether a model is the folder of an adapter, without weights of a model."""
    has_adapter = isinstance(model, str | Path) and (Path(model) / ADAPTER).is_file()
    return has_adapter and not any(Path(model).glob("model*.safetensors"))


def encodes_sentences(folder: Path) -> bool:
    """Return whether sentence-transformers encodes with this folder; its other kinds have heads."""
    kind = optional_json(folder / "config_sentence_transformers.json").get("model_type")
    return (folder / MODULES).is_file() and kind not in ("CrossEncoder", "SparseEncoder")


def modules_of(folder: Path) -> dict[str, str]:
    """Return the class names of a folder's modules by sub-folder, without the transformer."""
    if not (file := folder / MODULES).is_file():
        return {}
    try:
        parts = {PurePosixPath(part["path"]).as_posix(): part["type"] for part in read_json(file)}
    except (TypeError, KeyError, AttributeError):
        problem = "is not the list of a SentenceTransformer's parts"
        raise BadFile(file, problem, "copy or download it again, or remove it") from None
    kinds = {path: str(kind).rpartition(".")[2] for path, kind in parts.items() if path != "."}
    if outside := [path for path in kinds if path[0] == "/" or ".." in path.split("/")]:
        problem = f"names {outside[0]!r}, which is not inside this folder"
        raise BadFile(file, problem, "get the checkpoint from a source you trust")
    if old := [path for path, kind in kinds.items() if kind == "Transformer"]:
        problem = f"has its transformer in the sub-folder {old[0]}, as only old versions do"
        raise BadFile(file, problem, "load it with sentence-transformers and save it again")
    return kinds


class LazyCheckpoint(dict[str, LazyTensor]):
    """The tensors of a Hugging Face folder (one file, or shards with an index), sorted by name.

    part: a tower, such as a CLIPModel's "vision_model", without its prefix.
    """

    def __init__(self, folder: str | Path, part: str | None = None):
        self.folder = folder_path(folder)
        self._opened: tuple[Path | None, Any] = (None, None)  # the file that was read last
        stored, prefix = self._stored_tensors(), f"{part}."
        self.prefix = prefix if part and any(name.startswith(prefix) for name in stored) else ""
        inside = sorted(name for name in stored if name.startswith(self.prefix))
        super().__init__({name.removeprefix(self.prefix): stored[name] for name in inside})

    def __missing__(self, name: str) -> LazyTensor:
        raise MissingTensor(self.folder, name, self)

    def check_finite(self) -> None:
        """Read every tensor once. Raises: NotFinite naming up to five tensors."""
        if bad := [name for name, tensor in self.items() if not all_finite(tensor.read())]:
            more = f" and {len(bad) - 5:,} more" if len(bad) > 5 else ""
            raise NotFinite(self[bad[0]].file, f"{', '.join(bad[:5])}{more}")

    def require_floating(self) -> None:
        """Raise BadFile if a weight is of integers; other tensors, such as counters, may be."""
        for name, tensor in self.items():
            if name.endswith("weight") and "float" not in tensor.kind:
                problem = f"{name} is stored as {tensor.kind}, not floating-point"
                way_out = "give what it was quantised from, or write float32, float16 or bfloat16"
                raise BadFile(tensor.file, problem, way_out)

    def _read(self, file: Path, name: str) -> "Tensor":
        """Return one tensor of a file. Raises: TruncatedFile."""
        path, opened = self._opened
        try:
            if path != file:
                opened = safe_open(file, framework="pt", backend="pread")
                self._opened = (file, opened)
            return opened.get_tensor(name)  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise TruncatedFile(file, error) from None

    def _stored_tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors by stored name, of the files that transformers would read."""
        config = self.folder / "config.json"
        # an index next to a single file is an older model's
        usual = next((name for name in (SINGLE, INDEX) if (self.folder / name).is_file()), None)
        name = optional_json(config).get("transformers_weights") or usual
        if name is None:
            raise no_safetensors(self.folder)
        path, stored = _inside(self.folder, name, config), dict[str, LazyTensor]()
        listed, shards = dict[str, str](), list[str]()
        if path.name.endswith(".index.json"):
            try:
                listed = dict(read_json(path)["weight_map"])
                shards = sorted({*listed.values()}, key=str)
            except (ValueError, KeyError, TypeError) as error:
                problem = f"not a safetensors index ({error!r})"
                raise BadFile(path, problem, "copy or download it again") from None
        # of a tensor in several shards the last copy is read, whichever the index names
        for shard in shards or [path.name]:
            file = _inside(self.folder, shard, path)
            try:
                with safe_open(file, framework="np") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        header, read = opened.get_slice(name), partial(self._read, file, name)
                        kind, shape = header.get_dtype(), (*header.get_shape(),)
                        if kind not in KINDS:
                            way_out = f"store it as one of {', '.join(KINDS)}"
                            raise BadFile(file, f"{name} is stored as {kind}", way_out)
                        stored[name] = LazyTensor(name, file, KINDS[kind], shape, read)
            except SafetensorError as error:
                raise TruncatedFile(file, error) from None
        if missing := min(listed.keys() - stored.keys(), default=None):
            problem = f"lists {missing} in {listed[missing]}, which does not hold it"
            raise BadFile(path, problem, "copy or download both again; they belong together")
        require_plain(path, stored)
        # older files store a mask's -1e9 (-inf in float16), which no model reads
        return {name: t for name, t in stored.items() if not name.endswith(".masked_bias")}


def _inside(folder: Path, name: object, source: Path) -> Path:
    """Return a file of the folder that `source` names. Raises: BadFile for a path; MissingPath."""
    plain = isinstance(name, str) and name not in ("", "..")
    if not (plain and name == PurePosixPath(name).name == PureWindowsPath(name).name):
        problem = f"names {name!r}, which is no name of a file in this folder"
        raise BadFile(source, problem, "get the checkpoint from a source you trust")
    if not (folder / name).is_file():
        raise MissingPath(folder / name, f"weights named in {source.name}", "copy or download it")
    return folder / name


def require_plain(file: Path, tensors: Mapping[str, Any]) -> None:
    """Raise BadFile for a name inside a wrapper of the model, and for a weight without values."""
    for name, tensor in tensors.items():
        if WRAPPED.match(name):
            way_out = "save the model inside it; of a PeftModel, what merge_and_unload() returns"
            raise BadFile(file, f"{name} is a name in a wrapper (torch.compile, DDP)", way_out)
        if name.endswith("weight") and tensor.shape == (0,):
            way_out = "save it with stage3_gather_16bit_weights_on_model_save: true"
            raise BadFile(file, f"{name} is empty, as ZeRO-3 leaves it", way_out)


def read_safetensors(file: Path) -> "dict[str, Tensor]":
    """Return all tensors of a file. Raises: TruncatedFile; NotFinite, BadData naming the tensor."""
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise TruncatedFile(file, error) from None
    for name, tensor in tensors.items():
        check_tensor(file, name, tensor, name.endswith("weight"))
    return tensors


def all_finite(tensor: "Tensor") -> bool:
    """Return whether a tensor holds neither NaN nor infinity."""
    if not tensor.is_floating_point() or bool(tensor.sum().isfinite()):
        return True  # a sum needs no mask in memory
    return bool(tensor.isfinite().all())


def check_tensor(source: object, name: str, tensor: "Tensor", weight: bool = True) -> None:
    """Raise BadData or NotFinite unless a tensor of `source` can be used; weight: not a buffer."""
    if tensor.is_meta:
        problem, way_out = f"{name} is on meta, without values", "load the model with its weights"
        raise BadData(source, problem, way_out)
    narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 2
    if narrow or (weight and not tensor.is_floating_point()):
        kind = str(tensor.dtype).removeprefix("torch.")
        problem = f"{name} is {kind}; float16, bfloat16, float32 or float64 is needed"
        raise BadData(source, problem, "give the model it was quantised from")
    if not all_finite(tensor.detach()):
        raise NotFinite(source, name)
