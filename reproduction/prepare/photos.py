"""Real images: the tasks' folders with their class names, and the vision model that reads them.

The model is the DINOv2 backbone of an ONNX file, read as plain protobuf; nothing of the file is run.
Of the protobuf: ModelProto.graph (7) has nodes (1: input 1, name 3) and initializers (5: dims 1,
data_type 2, name 8, raw_data 9). Linears are stored transposed, under meaningless names; the node
that uses one names its module.
"""

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from featcal.errors import BadFile, MissingPath
from featcal.files import write_json
from reproduction.prepare.sources import DataSource, class_names, write_sources

SPLITS = {"train": 400, "validation": 80, "stream": 256, "test": 200}  # rows of each task
DIGITS = "digits"  # of scikit-learn, UCI's optical recognition of handwritten digits
# of pixels and labels
DIGITS_SHA = "f6d9e39f37dc45d327f6db33428ee58970ccceabb2535a5c179de35886b70443"
# Names of Dinov2Model, and ViTModel's for the same weights.
RENAMED = {"encoder.layer.": "layers.", ".norm1.": ".layernorm_before.",
           ".norm2.": ".layernorm_after."}  # fmt: skip


def write_photos(origin: Path, tasks: Sequence[str], folder: Path) -> None:
    """Write the tasks' pictures and sources.json. Raises: MissingPath; BadFile for other digits."""
    sources = {}
    for task in tasks:
        if task == DIGITS:
            write_digits(folder / task)
        elif (origin / task).is_dir():
            shutil.copytree(origin / task, folder / task)
        else:
            raise MissingPath(origin / task, "the images of a task", "edit photos.pools")
        about = {"paper_name": task, "description": "Real images; see reproduction/real_images"}
        prompts = {"classes": class_names(folder / task), "templates": ("a photo of {}",)}
        splits = {split: split for split in SPLITS}
        sources[task] = DataSource(location=task, kind="folder", splits=splits, **about, **prompts)
    write_sources(folder, sources)


def write_digits(folder: Path) -> None:
    """Write scikit-learn's handwritten digits, drawn into splits by a seed. Raises: BadFile."""
    import datasets
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    if sha256(digits.data.tobytes() + digits.target.tobytes()).hexdigest() != DIGITS_SHA:
        problem = "its digits have another check-sum"
        raise BadFile("scikit-learn", problem, "install scikit-learn again")
    levels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    label = datasets.ClassLabel(names=[str(digit) for digit in range(10)])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    order, start = np.random.default_rng(0).permutation(len(levels)), 0
    folder.mkdir(parents=True)
    for split, count in SPLITS.items():
        indices, start = order[start : start + count], start + count
        table = {"image": [Image.fromarray(levels[row]) for row in indices]}
        table["label"] = digits.target[indices].tolist()
        datasets.Dataset.from_dict(table, features).to_parquet(folder / f"{split}.parquet")


@torch.no_grad()
def as_vit(dinov2: Any, size: int) -> nn.Module:
    """Return a Dinov2Model as a plain ViTModel that reads square pictures of `size` pixels.

    Layer scales are folded into the linears before them and positions interpolated once. The pooler
    is the identity, so that the pooled output is the class token after the last norm, as before.
    """
    from transformers import ViTConfig, ViTModel

    source = dinov2.config
    names = "hidden_size num_hidden_layers num_attention_heads patch_size layer_norm_eps"
    sizes = {name: getattr(source, name) for name in names.split()}
    sizes |= {"intermediate_size": source.hidden_size * source.mlp_ratio, "image_size": size}
    config = ViTConfig(**sizes, hidden_dropout_prob=0.0, pooler_act="linear")
    vit, weights, state = ViTModel(config).eval(), dinov2.state_dict(), {}
    tokens = torch.zeros(1, (size // source.patch_size) ** 2 + 1, source.hidden_size)
    positions = dinov2.embeddings.interpolate_pos_encoding(tokens, size, size)
    weights["embeddings.position_embeddings"] = positions
    for name, value in weights.items():
        block = name.partition(".attention." if ".attention." in name else ".mlp.")[0]
        if ".attention.o_proj." in name or ".attention.output.dense." in name:
            scale = weights[f"{block}.layer_scale1.lambda1"]
        elif ".mlp.fc2." in name:
            scale = weights[f"{block}.layer_scale2.lambda1"]
        elif "layer_scale" in name or "mask_token" in name:
            continue
        else:
            scale = torch.ones(1)
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = value * (scale[:, None] if value.ndim == 2 else scale)
    state["pooler.dense.weight"] = torch.eye(source.hidden_size)
    state["pooler.dense.bias"] = torch.zeros(source.hidden_size)
    vit.load_state_dict(state)
    return vit


FLOAT = 1
# of ViT-S/14 as transformers names it; an encoder without the head that reads patches
CONFIG = {
    "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 384,
    "num_hidden_layers": 12, "num_attention_heads": 6, "mlp_ratio": 4, "patch_size": 14,
    "image_size": 518, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "dtype": "float32",
}  # fmt: skip
Arrays = dict[str, NDArray[np.float32]]


def processor(size: int) -> dict[str, Any]:
    """Return preprocessor_config.json for square pictures of `size` pixels."""
    return {
        "image_processor_type": "BitImageProcessor", "do_convert_rgb": True, "do_resize": True,
        "size": {"shortest_edge": size}, "resample": 3, "do_center_crop": True,
        "crop_size": {"height": size, "width": size}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip


def write_dinov2(model: bytes, folder: Path) -> None:
    """Write the backbone of an ONNX model as a folder of transformers' Dinov2Model."""
    from safetensors.numpy import save_file

    state = {name: np.ascontiguousarray(v) for name, v in sorted(backbone(model).items())}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "preprocessor_config.json", processor(224))


def backbone(model: bytes) -> Arrays:
    """Return the backbone's tensors under transformers' names."""
    graph = list(_fields(dict(_fields(model))[7]))
    state, positions, users = Arrays(), Arrays(), dict[str, str]()
    for fields in (list(_fields(value)) for number, value in graph if number == 1):
        node = dict(fields).get(3, b"").decode()
        users |= {text.decode(): node for number, text in fields if number == 1}
    for name, tensor in (_tensor(value) for number, value in graph if number == 5):
        if tensor is None:
            continue
        if name.startswith("backbone."):
            state[name.removeprefix("backbone.")] = tensor
        elif users.get(name, "").startswith("/backbone/") and name.startswith("onnx::MatMul"):
            module = users[name].removeprefix("/backbone/").removesuffix("/MatMul")
            state[f"{module.replace('/', '.')}.weight"] = tensor.T
        elif tensor.ndim == 3 and tensor.shape[::2] == (1, CONFIG["hidden_size"]):
            positions["class" if tensor.shape[1] == 1 else "patches"] = tensor
    tables = [positions["class"], positions["patches"]]
    state["embeddings.position_embeddings"] = np.concatenate(tables, axis=1)
    # not in the file; only masked pre-training reads it
    state["embeddings.mask_token"] = np.zeros((1, CONFIG["hidden_size"]), np.float32)
    return state


def _tensor(data: bytes) -> tuple[str, NDArray[np.float32] | None]:
    """Return the name of an initializer and its float32 values; None for other types."""
    by_number, dims = dict[int, Any](), list[int]()
    for number, value in _fields(data):
        by_number[number] = value
        if number == 1:
            dims += (
                [value] if isinstance(value, int) else iter(partial(_varint, BytesIO(value)), None)
            )
    floats = by_number.get(2) == FLOAT and 9 in by_number
    values = np.frombuffer(by_number[9], "<f4").reshape(dims) if floats else None
    return by_number.get(8, b"").decode(), values


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message by number: integers as they are, all else as bytes."""
    stream = BytesIO(data)
    while (tag := _varint(stream)) is not None:
        kind = tag & 7
        value = _varint(stream) if kind in (0, 2) else {1: 8, 5: 4}[kind]
        yield tag >> 3, value if kind == 0 else stream.read(value)


def _varint(stream: BytesIO) -> int | None:
    """Return the next number, whose groups of seven bits begin with the lowest; None at the end."""
    value = shift = 0
    while byte := stream.read(1):
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
        shift += 7
    return None
