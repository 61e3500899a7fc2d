"""Read the DINOv2 backbone of an ONNX file as plain protobuf; nothing of the file is run.

Of the protobuf: ModelProto.graph (7) has nodes (1: input 1, name 3) and initializers (5: dims 1,
data_type 2, name 8, raw_data 9). Linears are stored transposed, under meaningless names; the node
that uses one names its module.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOAT = 1
# of ViT-S/14 as transformers names it; an encoder without the head that reads patches
CONFIG = {
    "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 384,
    "num_hidden_layers": 12, "num_attention_heads": 6, "mlp_ratio": 4, "patch_size": 14,
    "image_size": 518, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "dtype": "float32",
}  # fmt: skip
Tensors = dict[str, NDArray[np.float32]]


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
    for name, content in (("config", CONFIG), ("preprocessor_config", processor(224))):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def backbone(model: bytes) -> Tensors:
    """Return the backbone's tensors under transformers' names."""
    graph = next(value for number, value in _fields(memoryview(model)) if number == 7)
    state, users = Tensors(), dict[str, str]()
    for number, value in _fields(graph):
        if number == 1:
            parts = list(_fields(value))
            node = next((bytes(text).decode() for part, text in parts if part == 3), "")
            users |= {bytes(text).decode(): node for part, text in parts if part == 1}
    positions = Tensors()
    for number, value in _fields(graph):
        name, tensor = _tensor(value) if number == 5 else ("", None)
        if tensor is None:
            continue
        if name.startswith("backbone."):
            state[name.removeprefix("backbone.")] = tensor
        elif users.get(name, "").startswith("/backbone/") and name.startswith("onnx::MatMul"):
            module = users[name].removeprefix("/backbone/").removesuffix("/MatMul")
            state[f"{module.replace('/', '.')}.weight"] = tensor.T
        elif tensor.ndim == 3 and tensor.shape[::2] == (1, CONFIG["hidden_size"]):
            positions["class" if tensor.shape[1] == 1 else "patches"] = tensor
    both = [positions["class"], positions["patches"]]
    state["embeddings.position_embeddings"] = np.concatenate(both, axis=1)
    # not in the file; only masked pre-training reads it
    state["embeddings.mask_token"] = np.zeros((1, CONFIG["hidden_size"]), np.float32)
    return state


def _tensor(data: memoryview) -> tuple[str, NDArray[np.float32] | None]:
    """Return the name of an initializer and its float32 values; None for other types."""
    name, kind, raw, dims = "", 0, None, list[int]()
    for number, value in _fields(data):
        if number == 1:
            dims += [value] if isinstance(value, int) else _varints(value)
        elif number == 2:
            kind = value
        elif number == 8:
            name = bytes(value).decode()
        elif number == 9:
            raw = value
    floats = kind == FLOAT and raw is not None
    return name, np.frombuffer(raw, "<f4").reshape(dims) if floats else None


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message by number: integers as they are, all else as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size, at = _varint(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
        yield tag >> 3, data[at : at + size]
        at += size


def _varints(data: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
