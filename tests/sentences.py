"""A small sentence encoder of the real class with its tokenizer, and a task of sentences."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers as tf

WORDS = ["red", "green", "blue", "stone", "river", "cloud", "the", "a", "of", "is"]
CLASSES = ("red", "green", "blue")


def encoder(folder: Path) -> Path:
    """BertModel with two blocks of 32, and a tokenizer with one token per word."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    torch.manual_seed(5)
    config = tf.BertConfig(
        vocab_size=15,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    tf.BertModel(config).save_pretrained(folder)
    tf.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def task(folder: Path, count: int = 60, seed: int = 7) -> Path:
    """Sentences of 2 to 12 words, each with one word of its class in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "labels.json").write_text(
        json.dumps({"classes": CLASSES, "templates": ["{}", "a {} stone"]})
    )
    for number, split in enumerate(("train", "validation", "test", "stream")):
        draw = np.random.default_rng([seed, number])
        labels = draw.integers(0, 3, count)
        texts = [
            " ".join([CLASSES[label], *draw.choice(WORDS[3:], draw.integers(1, 12))])
            for label in labels
        ]
        pq.write_table(
            pa.table({"text": texts, "label": labels.astype(np.int64)}), folder / f"{split}.parquet"
        )
    return folder
