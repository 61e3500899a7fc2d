"""Modules to checkpoint folders that transformers and other tools can load; the same weights give
the same bytes.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from torch import Tensor, nn
from transformers import CLIPConfig, PretrainedConfig

from featcal.errors import BadFile
from featcal.models.code import MODULES
from featcal.storage.writer import LIMIT, ShardWriter

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
