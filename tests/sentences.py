"""A small sentence encoder of the real class with its tokenizer, and a task of sentences."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers as tf
from tiny import TEXT

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
