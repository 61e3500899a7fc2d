"""Real images: the tasks' folders with their class names, and the vision model that reads them."""

import csv
import gzip
import io
import json
import math
import shutil
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from featcal.data.images import class_names
from featcal.errors import BadFile, MissingPath
from reproduction.prepare.onnx import processor
from reproduction.prepare.sources import Source, load_task, write_sources

SPLITS = {"train": 400, "validation": 80, "stream": 256, "test": 200}  # rows of each task
DIGITS = "digits"  # of scikit-learn, UCI's optical recognition of handwritten digits
DIGITS_SHA = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
SCALE = 100.0  # CLIP's; features and heads have unit length
# Where ViTModel keeps what Dinov2Model calls so.
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
        sources[task] = Source(
            location=task,
            kind="folder",
            paper_name=task,
            description="Real images; see reproduction/real_images",
            classes=class_names(folder / task),
            templates=("a photo of {}",),
            splits={split: split for split in SPLITS},
        )
    write_sources(folder, sources)


def write_digits(folder: Path) -> None:
    """Write scikit-learn's handwritten digits, drawn into splits by a seed. Raises: BadFile."""
    import datasets
    from PIL import Image

    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    packed = file.read_bytes()
    if sha256(packed).hexdigest() != DIGITS_SHA:
        raise BadFile(file, "has another check-sum", "install scikit-learn again")
    rows = np.array(list(csv.reader(io.StringIO(gzip.decompress(packed).decode()))), dtype=float)
    levels = np.round(rows[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    label = datasets.ClassLabel(names=[str(digit) for digit in range(10)])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    order, start = np.random.default_rng(0).permutation(len(rows)), 0
    folder.mkdir(parents=True)
    for split, count in SPLITS.items():
        chosen, start = order[start : start + count], start + count
        table = {"image": [Image.fromarray(levels[row]) for row in chosen]}
        table["label"] = rows[chosen, 64].astype(int).tolist()
        datasets.Dataset.from_dict(table, features).to_parquet(folder / f"{split}.parquet")


def write_vision_and_heads(
    dinov2: Path, data: Path, tasks: Sequence[str], size: int, store: Path
) -> None:
    """Write the vision model to store/base/, and logit scale and a head per task to
    store/heads.safetensors: class means of its features over training images.
    """
    from safetensors.torch import save_file

    from featcal.evaluation.accuracy import class_mean_head
    from featcal.files import atomic_path
    from featcal.models.load import load_model
    from featcal.models.save import save_model

    model, base = as_vit(load_model(dinov2), size), store / "base"
    save_model(model, base)
    text = json.dumps(processor(size), indent=2) + "\n"
    (base / "preprocessor_config.json").write_text(text, "utf-8")
    tensors = {"logit_scale": torch.tensor(math.log(SCALE))}
    for task in tasks:
        tensors[f"head/{task}"] = class_mean_head(model, None, load_task(data, task, "train", base))
    with atomic_path(store / "heads.safetensors") as hidden:
        save_file(tensors, hidden)


@torch.no_grad()
def as_vit(dinov2: Any, size: int) -> nn.Module:
    """Return a Dinov2Model as a plain ViTModel that reads square pictures of `size` pixels.

    Layer scales are folded into the linears before them and positions interpolated once. The pooler
    is the identity, so that the pooled output is the class token after the last norm, as before.
    """
    from transformers import ViTConfig, ViTModel

    own = dinov2.config
    names = "hidden_size num_hidden_layers num_attention_heads patch_size layer_norm_eps"
    sizes = {name: getattr(own, name) for name in names.split()}
    sizes |= {"intermediate_size": own.hidden_size * own.mlp_ratio, "image_size": size}
    config = ViTConfig(**sizes, hidden_dropout_prob=0.0, pooler_act="linear")
    vit, given, state = ViTModel(config).eval(), dinov2.state_dict(), {}
    tokens = torch.zeros(1, (size // own.patch_size) ** 2 + 1, own.hidden_size)
    positions = dinov2.embeddings.interpolate_pos_encoding(tokens, size, size)
    given["embeddings.position_embeddings"] = positions
    for name, value in given.items():
        block = name.partition(".attention." if ".attention." in name else ".mlp.")[0]
        if ".attention.o_proj." in name or ".attention.output.dense." in name:
            scale = given[f"{block}.layer_scale1.lambda1"]
        elif ".mlp.fc2." in name:
            scale = given[f"{block}.layer_scale2.lambda1"]
        elif "layer_scale" in name or "mask_token" in name:
            continue
        else:
            scale = torch.ones(1)
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = value * (scale[:, None] if value.ndim == 2 else scale)
    state |= {"pooler.dense.weight": torch.eye(own.hidden_size)}
    state |= {"pooler.dense.bias": torch.zeros(own.hidden_size)}
    vit.load_state_dict(state)
    return vit
