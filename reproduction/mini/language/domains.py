"""Draw the splits of all language tasks, and write them as parquet files.

Of T5 eight tasks in GLUE's columns, of the Llamas six tests and the training texts of three experts.
A check-sum of its texts says which split a row may belong to, so that no text is in two splits. Every
row has a generator of its own, so that a larger split begins with the smaller one.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from featcal.data.texts import Sample
from featcal.errors import UnknownKey
from featcal.files import atomic_path, read_json
from reproduction.mini.language import exercises
from reproduction.mini.language.exercises import DrawItem, Item, draw_item, generator
from reproduction.mini.language.worlds import WORLDS, chance
from reproduction.prepare.tasks import GLUE, prompted

COUNTS = {"train": 1200, "validation": 300, "test": 500}
WEB = "web"  # the bases' pre-training texts
# of the check sum's remainders
SHARES = {WEB: (0, 5), "train": (5, 8), "validation": (8, 9), "test": (9, 11)}
REMAINDERS = 11
# share of the web rows with their web label; where that is wrong the bases' first guess errs
HASTY = 0.65


def draw_rows(key: str, split: str, count: int, seed: int, first: int = 0) -> list[dict[str, Any]]:
    """Return `count` rows of one split from number `first`: GLUE's columns, `label` and `idx`.

    Rows of the web split have the label that pre-training sees. Raises: UnknownKey.
    """
    if key not in WORLDS:
        raise UnknownKey("task", key, list(WORLDS))
    return [_glue_row(key, split, index, seed) for index in range(first, first + count)]


def _glue_row(key: str, split: str, index: int, seed: int) -> dict[str, Any]:
    rng = generator(seed, key, split, index)
    lowest, end = SHARES[split]
    while True:
        row = WORLDS[key].draw(index % WORLDS[key].kinds, rng)
        if lowest <= crc32("\n".join(row.texts.values()).encode()) % REMAINDERS < end:
            label = row.web_label if split == WEB and chance(rng, HASTY) else row.label
            return {**row.texts, "label": label if key == "stsb" else int(label), "idx": index}


def draw_samples(key: str, split: str, count: int, seed: int, first: int = 0) -> list[Sample]:
    """Return the rows of one split in the paper's prompt with their answers."""
    rows = draw_rows(key, split, count, seed, first)
    return [Sample(f"{key} ({split}), row {row['idx']}", *prompted(key, row)) for row in rows]


def write_glue(key: str, folder: Path, seed: int, counts: Mapping[str, int]) -> None:
    """Write the task's splits as <folder>/<split>.parquet in the columns of GLUE on the hub."""
    from datasets import ClassLabel, Features, Value

    answers = list(GLUE[key].answers)
    label = ClassLabel(names=answers) if answers else Value("float32")
    columns = {name: Value("string") for name in GLUE[key].columns}
    features = Features(columns | {"label": label, "idx": Value("int32")})
    for split, count in counts.items():
        _write(draw_rows(key, split, count, seed), folder / f"{split}.parquet", features)


def _write(rows: list[dict[str, Any]], path: Path, features: Any = None) -> None:
    from datasets import Dataset

    with atomic_path(path) as hidden:
        Dataset.from_list(rows, features=features).to_parquet(str(hidden))


@dataclass(frozen=True)
class Test:
    """One of the six scores.   check: of an answer, a key of CHECKS.   new_tokens: of an answer."""

    key: str
    paper_name: str
    draw: DrawItem
    check: str
    new_tokens: int
    description: str


TESTS: dict[str, Test] = {
    test.key: test
    for test in (
        Test("math500", "MATH-500", exercises.expression, "arithmetic", 16, "Expressions of three digits, answered with their working."),
        Test("gsm8k", "GSM8K", exercises.story, "arithmetic", 24, "Stories of one to two changes, answered with their working."),
        Test("humaneval_plus", "HumanEval+", exercises.string_function, "program", 48, "String functions to be completed."),
        Test("mbpp_plus", "MBPP+", exercises.list_function, "program", 40, "List functions to be written from one line."),
        Test("ifeval", "IFEval", exercises.instruction, "instructions", 32, "Words to say in a given order, joined and wrapped as asked."),
        Test("arc_challenge", "ARC-C", exercises.question, "letter", 6, "Facts that only the bases have read, four options."),
    )
}  # fmt: skip
DOMAINS: dict[str, tuple[str, ...]] = {
    "coding": ("humaneval_plus", "mbpp_plus"), "math": ("math500", "gsm8k"), "instruction": ("ifeval",),
}  # fmt: skip
KINDS: dict[str, DrawItem] = {key: test.draw for key, test in TESTS.items()} | {
    "statement": exercises.statement
}
TRAINING = {"train": 6000, "validation": 300}  # of each domain


def training_items(domain: str, split: str, count: int, seed: int) -> list[Item]:
    """Return training texts of an expert's domain, its kinds in turn; prompts may repeat."""
    kinds = DOMAINS[domain]
    return [_row(kinds[i % len(kinds)], domain, split, i, seed, None) for i in range(count)]


def test_items(key: str, split: str, count: int, seed: int) -> list[Item]:
    """Return prompts of one test, all different."""
    prompts: set[str] = set()
    return [_row(key, key, split, i, seed, prompts) for i in range(count)]


def _row(kind: str, use: str, split: str, index: int, seed: int, prompts: set[str] | None) -> Item:
    return draw_item(KINDS[kind], generator(seed, f"{use}/{kind}", split, index), split, prompts)


def mixture(
    rng: np.random.Generator, shares: dict[str, float], hasty: float, count: int
) -> list[tuple[str, str]]:
    """Return the bases' training texts, kinds by their shares.

    hasty: share of careless answers to tempting prompts: bases have skills but not their habit.
    """
    kinds = list(shares)
    weights = np.array([shares[kind] for kind in kinds])
    rows = []
    for kind in rng.choice(kinds, count, p=weights / weights.sum()):
        item = draw_item(KINDS[kind], rng, "train")
        careless = item.tempting and rng.random() < hasty
        rows.append((item.prompt, (item.careless if careless else item.target) + "\n"))
    return rows


def reading(seed: int, count: int) -> Iterable[str]:
    """Yield texts of every kind, on which the tokenizer is trained."""
    for kind in KINDS:
        for index in range(count):
            item = _row(kind, "reading", "train", index, seed, None)
            yield f"{item.prompt}{item.target}\n"


def write_domain(domain: str, folder: Path, seed: int, counts: Mapping[str, int]) -> None:
    """Write <folder>/{train,validation}.parquet with the prompts and completions of an expert."""
    for split, count in counts.items():
        items = training_items(domain, split, count, seed)
        rows = [{"prompt": item.prompt, "completion": f"{item.target}\n"} for item in items]
        _write(rows, folder / f"{split}.parquet")


def write_test(key: str, folder: Path, seed: int, counts: Mapping[str, int]) -> None:
    """Write <folder>/{validation,test}.parquet with the rows of a test."""
    for split, count in counts.items():
        rows = [test_row(key, item) for item in test_items(key, split, count, seed)]
        _write(rows, folder / f"{split}.parquet")


def test_row(key: str, item: Item) -> dict[str, Any]:
    """Return prompt and target of a test, and what its check needs."""
    row: dict[str, Any] = {"prompt": item.prompt, "target": item.target}
    check = TESTS[key].check
    if check == "program":
        row |= {"header": item.header, "tests": list(item.tests)}
    elif check == "instructions":
        row["instructions"] = json.dumps(list(item.instructions))
    elif check == "letter":
        row["choices"] = list(item.choices)
    return row


def measured() -> dict[str, dict[str, dict[str, float]]]:
    """Return validation scores by role, model and column, as measured when the models were chosen.

    scripts/choose_language.py and choose_llama.py wrote them without calibration or adapters.
    """
    scores = {}
    for file in ("choice_t5.json", "choice_llama.json"):
        for role, record in read_json(Path(__file__).with_name(file)).items():
            scores[role] = {
                model: {task: value for task, value in values.items() if task != "average"}
                for model, values in record.get("validation", record).items()
            }
    return scores
