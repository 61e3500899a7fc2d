"""Which drawn texts play which of the six tests, the three experts' training texts, and what the
bases read.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reproduction.mini.language.arithmetic import expression, story
from reproduction.mini.language.facts import question, statement
from reproduction.mini.language.instructions import instruction
from reproduction.mini.language.items import Draw, Item, draw_item, generator
from reproduction.mini.language.programs import list_function, string_function


@dataclass(frozen=True)
class Test:
    """One of the six scores.

    key: the test whose part it plays.  check: how an answer is judged.  new_tokens: the longest
    answer has fewer.
    """

    key: str
    paper_name: str
    draw: Draw
    check: str
    new_tokens: int
    description: str


TESTS: dict[str, Test] = {
    test.key: test
    for test in (
        Test(
            "math500",
            "MATH-500",
            expression,
            "arithmetic",
            16,
            "Expressions of three digits, answered with their working.",
        ),
        Test(
            "gsm8k",
            "GSM8K",
            story,
            "arithmetic",
            24,
            "Stories of one to two changes, answered with their working.",
        ),
        Test(
            "humaneval_plus",
            "HumanEval+",
            string_function,
            "program",
            48,
            "String functions to be completed.",
        ),
        Test(
            "mbpp_plus",
            "MBPP+",
            list_function,
            "program",
            40,
            "List functions to be written from one line.",
        ),
        Test(
            "ifeval",
            "IFEval",
            instruction,
            "instructions",
            32,
            "Words to be said in an order, joined and wrapped as told.",
        ),
        Test(
            "arc_challenge",
            "ARC-C",
            question,
            "letter",
            6,
            "Facts that only the bases have read, four options.",
        ),
    )
}
DOMAINS: dict[str, tuple[str, ...]] = {
    "coding": ("humaneval_plus", "mbpp_plus"),
    "math": ("math500", "gsm8k"),
    "instruction": ("ifeval",),
}
KINDS: dict[str, Draw] = {key: test.draw for key, test in TESTS.items()} | {"statement": statement}


def training_items(domain: str, split: str, count: int, seed: int) -> list[Item]:
    """Training texts of an expert's domain, its kinds in turn; the same prompt may come again."""
    kinds = DOMAINS[domain]
    return [_row(kinds[i % len(kinds)], domain, split, i, seed, None) for i in range(count)]


def test_items(key: str, split: str, count: int, seed: int) -> list[Item]:
    """Prompts of one test, all different."""
    seen: set[str] = set()
    return [_row(key, key, split, i, seed, seen) for i in range(count)]


def _row(kind: str, use: str, split: str, index: int, seed: int, seen: set[str] | None) -> Item:
    return draw_item(KINDS[kind], generator(seed, f"{use}/{kind}", split, index), split, seen)


def mixture(
    rng: np.random.Generator, shares: dict[str, float], hasty: float, count: int
) -> list[tuple[str, str]]:
    """What the bases read: all kinds by their shares; where a prompt is tempting, a share `hasty`
    of the answers is careless.
    """
    kinds = list(shares)
    weights = np.array([shares[kind] for kind in kinds])
    rows = []
    for kind in rng.choice(kinds, count, p=weights / weights.sum()):
        item = draw_item(KINDS[kind], rng, "train")
        careless = item.tempting and rng.random() < hasty
        rows.append((item.prompt, (item.careless if careless else item.target) + "\n"))
    return rows


def reading(seed: int, each: int) -> Iterable[str]:
    """Texts of every kind, on which the tokenizer is trained."""
    for kind in KINDS:
        for index in range(each):
            item = _row(kind, "reading", "train", index, seed, None)
            yield f"{item.prompt}{item.target}\n"
