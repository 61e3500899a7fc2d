"""Modules to checkpoint folders that transformers and other tools can load; the same weights give the same bytes."""

import copy
import shutil
from pathlib import Path

from torch import Tensor, nn
from transformers import CLIPConfig, PretrainedConfig

from featcal.storage.writer import LIMIT, ShardWriter

# what makes a folder usable beyond its weights; generation_config.json is for language models
BESIDE = (
    "preprocessor_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "spiece.model", "tokenizer.model", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


def save_model(module: nn.Module, folder: str | Path, like: str | Path | None = None, limit: int = LIMIT) -> Path:
    """Writes config.json and safetensors, and copies processor and tokenizer files from the folder `like`.

    The folder appears complete or not at all. Tensors that share memory (tied embeddings) are written once.
    Returns: the folder. Raises: DiskFull.
    """
    state = untied(module)
    with ShardWriter(folder, limit, needed=sum(tensor.nbytes for tensor in state.values())) as writer:
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
    """config.json of one model class; of a CLIPConfig the vision part when the class is the vision tower."""
    part = config.vision_config if architecture == "CLIPVisionModel" and isinstance(config, CLIPConfig) else config
    config = copy.deepcopy(part)  # type: ignore[assignment]
    config.architectures = [architecture]
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        each.dtype = None  # the weights say it; whether a loaded configuration does depends on how it was loaded
    config.save_pretrained(folder)


def copy_beside(like: str | Path | None, folder: Path) -> None:
    """Copies processor and tokenizer files, where there are any."""
    for name in BESIDE if like is not None else ():
        source = Path(like or ".") / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
