"""Writing a checkpoint folder from tensors that come one at a time, in any order.

Each tensor is spooled to its own file and joined at the end, so memory holds one tensor and the
bytes do not depend on the order. Knows nothing of model classes."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, PretrainedConfig

from featcal.errors import BadFile
from featcal.files import atomic_folder
from featcal.models.checkpoint import INDEX, KINDS, SINGLE
from featcal.models.load import MODULES

LIMIT = 5 * 10**9  # bytes per file, as transformers shards
_KINDS = {getattr(torch, name): kind for kind, name in KINDS.items()}


@dataclass(frozen=True)
class _Spooled:
    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    align: int
    file: Path


def require_replaceable(folder: Path) -> None:
    """Raise BadFile where anything lies but another folder of tensors, or an empty one: what is
    written takes its place.
    """
    ours = folder.is_dir() and (
        not any(folder.iterdir())
        or any(any(folder.glob(name)) for name in ("*.safetensors", "config.json"))
    )
    if folder.exists() and not ours:
        raise BadFile(
            folder,
            "exists and is no folder of a model, which alone would be replaced",
            "name a new folder",
        )


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """`with ShardWriter(folder) as writer: writer.write(name, tensor)`; the folder appears when the
    block ends, or not at all.

    limit: bytes per safetensors file; more than that makes numbered shards and an index.
    writer.folder: the unfinished folder, where config.json and the like are put.
    """

    def __init__(self, folder: str | Path, limit: int = LIMIT, needed: int | None = None):
        require_replaceable(Path(folder))
        self._limit = limit
        self._whole = atomic_folder(folder, needed)
        self._spooled: dict[str, _Spooled] = {}

    def __enter__(self) -> "ShardWriter":
        self.folder = self._whole.__enter__()
        self._spool = self.folder / ".spool"
        self._spool.mkdir()
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Keep one tensor; each name once."""
        assert name not in self._spooled, f"{name} written twice"
        flat = tensor.detach().cpu().contiguous()
        file = self._spool / str(len(self._spooled))
        raw = flat.reshape(-1).view(torch.uint8).numpy()
        file.write_bytes(raw.data)
        self._spooled[name] = _Spooled(
            name, _KINDS[flat.dtype], tuple(flat.shape), raw.nbytes, flat.element_size(), file
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            if kind is None:
                self._join()
        except BaseException as failed:
            self._whole.__exit__(type(failed), failed, failed.__traceback__)
            raise
        return self._whole.__exit__(kind, error, trace)

    def _join(self) -> None:
        shards = self._shards()
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            _write_safetensors(self.folder / name, shard)
            weight_map |= {t.name: name for t in shard}
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(t.bytes for t in self._spooled.values())},
                "weight_map": weight_map,
            }
            (self.folder / INDEX).write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8"
            )
        shutil.rmtree(self._spool)

    def _shards(self) -> list[list[_Spooled]]:
        """Tensors by name, a new shard whenever the next one would pass the limit."""
        shards: list[list[_Spooled]] = [[]]
        for _, tensor in sorted(self._spooled.items()):
            if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > self._limit:
                shards.append([])
            shards[-1].append(tensor)
        return shards


def _write_safetensors(path: Path, tensors: list[_Spooled]) -> None:
    """One file in the safetensors format: length of the header, JSON header padded to 8 bytes, then
    the bytes of every tensor.
    """
    ordered = sorted(
        tensors, key=lambda t: (-t.align, t.name)
    )  # widest first keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.kind,
            "shape": tensor.shape,
            "data_offsets": [end, end := end + tensor.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            with tensor.file.open("rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
            tensor.file.unlink()  # so that the disk never holds the model twice


# what other libraries keep weights and states of training in; an index tells of shards
WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".ot", ".gguf",
    ".onnx", ".onnx_data", ".pb", ".tflite",
)  # fmt: skip
# what a folder says of its own model; of what is made of it other things hold, and who writes a
# folder writes these
OF_ITS_OWN = (
    "config.json", "open_clip_config.json", "adapter_config.json", "mergekit_config.yml", "merge.json", "featcal.json",
)  # fmt: skip


def save_model(
    module: nn.Module, folder: str | Path, like: str | Path | None = None, limit: int = LIMIT
) -> Path:
    """Writes config.json and safetensors, and copies what lies beside the weights of the folder
    `like`.

    The folder appears complete or not at all. Tensors that share memory (tied embeddings) are
    written once.
    Returns: the folder. Raises: DiskFull.
    """
    state = untied(module)
    with ShardWriter(
        folder, limit, needed=sum(tensor.nbytes for tensor in state.values())
    ) as writer:
        write_config(module.config, type(module).__name__, writer.folder)  # type: ignore[arg-type]
        copy_beside(like, writer.folder)
        for name, tensor in state.items():
            writer.write(name, tensor)
    return Path(folder)


def untied(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module without second names of the same memory."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    state = {}
    for name, tensor in module.state_dict().items():
        memory = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        state[name] = tensor
    return state


def write_config(config: PretrainedConfig, architecture: str, folder: Path) -> None:
    """config.json of one model class; of a CLIPConfig the vision part when the class is the vision
    tower.
    """
    part = (
        config.vision_config
        if architecture == "CLIPVisionModel" and isinstance(config, CLIPConfig)
        else config
    )
    config = copy.deepcopy(part)  # type: ignore[assignment]
    config.architectures = [architecture]
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        # the weights say it; whether a loaded configuration does depends on how it was loaded
        each.dtype = None
    config.save_pretrained(folder)


def copy_beside(like: str | Path | None, folder: Path) -> None:
    """Copies what makes a folder usable beyond its weights: tokenizer, processor, prompts, modules,
    whatever their names.

    These are all files of `like`, sub-folders too, that are no weights, no card and no record of
    how `like` itself was made. A sub-folder that holds weights is another form of the model (onnx/,
    checkpoint-500/) and stays, unless modules.json names it: then it is a part that the model
    cannot do without, such as a dense layer behind the pooling, and comes as it is. Hidden files
    stay, and links to folders are not followed.
    Raises: BadFile for a modules.json that tells no parts.
    """
    if like is not None:
        for file in beside(Path(like)):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(like) / file, folder / file)


def beside(like: Path) -> Iterator[Path]:
    """What `copy_beside` copies, relative to the folder."""
    parts = _parts(like)
    for place, folders, files in os.walk(like):
        here = Path(place).relative_to(like)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        whole = here.as_posix() in parts
        if here.name and not whole and any(map(is_weights, files)):
            folders.clear()
            continue
        for name in sorted(files):
            own = not here.name and (name in OF_ITS_OWN or Path(name).stem.lower() == "readme")
            if (
                not (name.startswith(".") or own or (is_weights(name) and not whole))
                and (like / here / name).is_file()
            ):
                yield here / name


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or tells where they lie."""
    return name.lower().endswith(WEIGHTS)


def _parts(like: Path) -> set[str]:
    """Sub-folders that a SentenceTransformer is made of; its first part, the model itself, lies in
    the folder and has none.
    """
    file = like / MODULES
    if not file.is_file():
        return set()
    try:
        return {
            PurePosixPath(part["path"]).as_posix() for part in json.loads(file.read_text("utf-8"))
        } - {"."}
    except (ValueError, TypeError, KeyError):
        raise BadFile(
            file,
            "tells no parts of a SentenceTransformer",
            "copy or download it again, or remove it",
        ) from None
