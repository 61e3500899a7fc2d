"""Parquet files of the Llama's texts: what the experts are trained on, and the six tests."""

import json
from collections.abc import Mapping
from pathlib import Path

from featcal.files import atomic_path
from reproduction.mini.language.domains import TESTS, test_items, training_items
from reproduction.mini.language.items import Item

TRAINING = {"train": 6000, "validation": 300}  # of each domain
TESTING = {"validation": 200, "test": 300}  # of each test


def write_domain(
    domain: str, folder: Path, seed: int, counts: Mapping[str, int] = TRAINING
) -> None:
    """<folder>/{train,validation}.parquet with prompt and completion, as an expert is trained on
    them.
    """
    for split, count in counts.items():
        items = training_items(domain, split, count, seed)
        rows = {
            "prompt": [item.prompt for item in items],
            "completion": [f"{item.target}\n" for item in items],
        }
        _write(rows, Path(folder) / f"{split}.parquet")


def write_test(key: str, folder: Path, seed: int, counts: Mapping[str, int] = TESTING) -> None:
    """<folder>/{validation,test}.parquet with prompt, target and what the test's check needs
    besides.
    """
    for split, count in counts.items():
        rows = [test_row(key, item) for item in test_items(key, split, count, seed)]
        _write(
            {name: [row[name] for row in rows] for name in rows[0]},
            Path(folder) / f"{split}.parquet",
        )


def test_row(key: str, item: Item) -> dict[str, object]:
    """One prompt of a test: programs bring header and tests, instructions their checks as JSON, a
    question its choices.
    """
    row: dict[str, object] = {"prompt": item.prompt, "target": item.target}
    if TESTS[key].check == "program":
        return row | {"header": item.header, "tests": list(item.tests)}
    if TESTS[key].check == "instructions":
        return row | {"instructions": json.dumps(list(item.instructions))}
    if TESTS[key].check == "letter":
        return row | {"choices": list(item.choices)}
    return row


def _write(rows: dict[str, list], path: Path) -> None:
    from datasets import Dataset

    with atomic_path(path) as hidden:
        Dataset.from_dict(rows).to_parquet(str(hidden))
