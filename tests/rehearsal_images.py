"""Tiny CLIPs, experts and the twenty image data sets of the rehearsal, in the hub's layouts."""

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import datasets
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny import make, shifted
from tokenizers import pre_tokenizers
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from featcal.data.places import quiet_datasets
from reproduction.prepare.tasks import TASKS, load_prompts

ROWS = {"train": 64, "validation": 12, "test": 12}
PART = "-00000-of-00001.parquet"
SIDE = 32  # of what a model reads; the hub's models read 224
POSITIONS = 128  # of texts, whose tokens are single characters; the hub's models read 77
START, END = "<|startoftext|>", "<|endoftext|>"
# width, blocks, projection
WIDTHS = {"openai/clip-vit-base-patch32": (32, 2, 16), "openai/clip-vit-large-patch14": (48, 3, 24)}
CONFIGURED = {name: name for name in ("mnist", "fashion_mnist")} | {
    "svhn": "cropped_digits", "emnist_letters": "emnist-letters",
}  # fmt: skip


def drawn(*keys: str | int) -> np.random.Generator:
    """A generator of its own for every draw."""
    return np.random.default_rng([crc32(str(key).encode()) for key in keys])


def made(name: str, build: Callable[[], torch.nn.Module]) -> Any:
    """A model in float32 whose weights follow from its name."""
    return make(build, crc32(name.encode()), torch.float32)


def fine_tuned(name: str, base: torch.nn.Module) -> Any:
    return shifted(base, crc32(name.encode()), 0.02)


def clip_model(name: str) -> CLIPModel:
    """Build a CLIPModel with the hub's wrong end token of 2."""
    width, blocks, projection = WIDTHS[name]
    common = {"intermediate_size": 2 * width, "num_hidden_layers": blocks, "num_attention_heads": 4}
    common |= {"hidden_size": width}
    text = {**common, "vocab_size": len(tokenizer()), "max_position_embeddings": POSITIONS}
    text |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    vision = {**common, "image_size": SIDE, "patch_size": 16}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection)
    return made(name, lambda: CLIPModel(config))


def tokenizer() -> CLIPTokenizer:
    """Return CLIP's own class on single characters, each also as the end of a word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{byte}</w>" for byte in alphabet), START, END]
    numbered = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=numbered, merges=[], model_max_length=POSITIONS)


def clip_folder(folder: Path, name: str, safetensors: bool = True) -> Path:
    """Write it as OpenAI published it in 2021, with position counters among the weights."""
    model = clip_model(name)
    folder.mkdir(parents=True)
    state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    positions = {"text": POSITIONS, "vision": model.vision_model.embeddings.num_positions}
    for part, count in positions.items():
        state[f"{part}_model.embeddings.position_ids"] = torch.arange(count)[None]
    if safetensors:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "pytorch_model.bin").write_bytes(b"a pickle, which is never fetched")
    told = {"architectures": ["CLIPModel"], "transformers_version": "4.16.0.dev0"}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | told))
    processor = dict.fromkeys(("do_resize", "do_center_crop", "do_normalize"), True)
    processor |= {"size": SIDE, "crop_size": SIDE, "resample": 3}
    processor |= {"feature_extractor_type": "CLIPFeatureExtractor"}
    processor |= {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
    processor |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer().save_pretrained(folder)
    return folder


def expert_folder(folder: Path, name: str, base: CLIPModel) -> Path:
    """Write a CLIPVisionModel as transformers 4 saved it: names prefixed, no processor."""
    tower = fine_tuned(name, base.vision_model)
    folder.mkdir(parents=True)
    state = {f"vision_model.{key}": one.contiguous() for key, one in tower.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"architectures": ["CLIPVisionModel"], "transformers_version": "4.38.1"}
    told |= {"torch_dtype": "float32", "dtype": None}
    (folder / "config.json").write_text(json.dumps(base.config.vision_config.to_dict() | told))
    (folder / "README.md").write_text(f"---\nbase_model:\n- openai/clip-vit\n---\n# {name}\n")
    return folder


def image_models(
    folder: Path, sizes: tuple[str, ...], tasks: tuple[str, ...]
) -> dict[str, Path | dict[str, Path]]:
    """Write CLIPs, an expert for every task, and the model trained on eight."""
    found: dict[str, Path | dict[str, Path]] = {}
    for size in sizes:
        name = f"openai/clip-vit-{size}"
        main = clip_folder(folder / size, name, safetensors=size != "base-patch32")
        found[name] = main
        # its safetensors are the hub's own conversion, in a pull request
        if size == "base-patch32":
            found[name] = {"main": main, "refs/pr/21": clip_folder(folder / f"{size}-pr", name)}
        base = clip_model(name)
        for task in (*tasks, "TA8_mtl"):
            expert = f"tanganke/clip-vit-{size}_{task}"
            found[expert] = expert_folder(folder / expert, expert, base)
    return found


def image_data(folder: Path, tasks: tuple[str, ...]) -> dict[str, Path]:
    """The data sets of these tasks, by their ids on the hub."""
    for task in tasks:
        _shards(folder / task, task) if TASKS[task].columns else _parquet(folder / task, task)
    return {f"datasets/{TASKS[task].hub_id}": folder / task for task in tasks}


def _parquet(folder: Path, task: str) -> None:
    """One file a split, and a README.md that names configurations and splits."""
    entry, config = TASKS[task], CONFIGURED.get(task)
    splits = list(dict.fromkeys((entry.train_split, entry.test_split)))
    configs = {config: splits} if config else {"data": splits}
    if task == "svhn":  # its other configuration is the default, and of another kind
        configs["full_numbers"] = ["train", "test"]
    for name, own in configs.items():
        for split in own:
            write_table(folder / name / f"{split}{PART}", _table(task, split))
    describe(folder, configs, "full_numbers")


def write_table(file: Path, table: datasets.Dataset) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with quiet_datasets():
        table.to_parquet(file)


def describe(folder: Path, configs: Mapping[str, list[str]], default: str = "") -> None:
    """A README.md that names configurations, each a folder, and their splits."""
    described: list[dict] = []
    for name, splits in configs.items():
        files = [{"split": split, "path": f"{name}/{split}-*"} for split in splits]
        own = {"config_name": "default" if name == "data" else name, "data_files": files}
        described.append(own | ({"default": True} if name == default else {}))
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(described)}\n---\n")


def _table(task: str, split: str) -> datasets.Dataset:
    classes = load_prompts(task).classes
    count = ROWS.get(split, ROWS["test"])
    numbers = [int(n) for n in drawn(task, split, "labels").integers(0, len(classes), count)]
    pictures = [picture(task, split, i) for i in range(count)]
    label, labels = datasets.ClassLabel(names=list(classes)), numbers
    if task == "pcam":
        label, labels = datasets.Value("bool"), [bool(n) for n in numbers]
    columns = {"image": pictures, "label": labels}
    features = {"image": datasets.Image(), "label": label}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def picture(task: str, split: str, row: int) -> Image.Image:
    """Draw coloured noise, not square; grey and square where the data set is."""
    grey = "mnist" in task or task == "emnist_letters"
    height, width = (28, 28) if grey else (40, 48)
    generator = drawn(task, split, row)
    noise = generator.integers(0, 96, (height, width, 3)) + generator.integers(0, 160, 3)
    image = Image.fromarray(noise.astype(np.uint8), "RGB")
    return image.convert("L") if grey else image


def _shards(folder: Path, task: str) -> None:
    """Write a webdataset: four tar files a split, with pairs of jpg and cls."""
    classes = load_prompts(task).classes
    folder.mkdir(parents=True)
    (folder / "classnames.txt").write_text("\n".join(classes))
    for split in ("train", "test"):
        (folder / split).mkdir()
        (folder / split / "nshards.txt").write_text("4")
        count = ROWS[split] // 4
        for shard in range(4):
            with tarfile.open(folder / split / f"{shard}.tar", "w") as archive:
                for row in range(shard * count, (shard + 1) * count):
                    _add(archive, f"s{row:07d}.cls", str(row % len(classes)).encode())
                    stored = io.BytesIO()
                    picture(task, split, row).convert("L").save(stored, "JPEG")
                    _add(archive, f"s{row:07d}.jpg", stored.getvalue())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
