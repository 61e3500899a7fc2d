"""Small encoders of the real classes, of sentences and of pictures, and a task of sentences."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers as tf
from tiny import TEXT

from reproduction.prepare.photos import CONFIG

WORDS = ["red", "green", "blue", "stone", "river", "cloud", "the", "a", "of", "is"]
CLASSES = ("red", "green", "blue")


def encoder(folder: Path) -> Path:
    """BertModel with two blocks of 32, and a tokenizer with one token per word."""
    folder.mkdir(parents=True, exist_ok=True)
    special = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]))
    torch.manual_seed(5)
    tf.BertModel(tf.BertConfig(**TEXT | {"vocab_size": 15})).save_pretrained(folder)
    tf.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def task(folder: Path, count: int = 60, seed: int = 7) -> Path:
    """Sentences of 2 to 12 words, each with one word of its class in it."""
    folder.mkdir(parents=True, exist_ok=True)
    labelled = {"classes": CLASSES, "templates": ["{}", "a {} stone"]}
    (folder / "labels.json").write_text(json.dumps(labelled))
    for number, split in enumerate(("train", "validation", "test", "stream")):
        draw = np.random.default_rng([seed, number])
        labels = draw.integers(0, 3, count)
        others = [draw.choice(WORDS[3:], draw.integers(1, 12)) for _ in labels]
        texts = [" ".join([CLASSES[at], *more]) for at, more in zip(labels, others, strict=True)]
        rows = pa.table({"text": texts, "label": labels.astype(np.int64)})
        pq.write_table(rows, folder / f"{split}.parquet")
    return folder


def dinov2(folder: Path) -> Path:
    """Dinov2Model with two blocks of 32, layer scales and positions that are drawn."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 70}
    torch.manual_seed(6)
    model = tf.Dinov2Model(tf.Dinov2Config(**{**CONFIG, **small}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lambda" in name or "position" in name or name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
