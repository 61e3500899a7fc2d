"""Tiny Python functions: a string function to be completed, and a list function to be written from
one line.

An answer is checked by running it on inputs that the prompt does not show; the expected outputs
come from the meaning of the words, not from the reference program.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reproduction.mini.language.items import Item

LETTERS = "ABCDEF"
INPUTS = 4  # asserts of one program


@dataclass(frozen=True)
class Step:
    """One operation on a string: its words, what it does, the code around the code so far. `loose`:
    binds weaker than a slice.
    """

    words: str
    apply: Callable[[str], str]
    code: Callable[[str], str]
    loose: bool = False


def string_step(rng: np.random.Generator) -> Step:
    kind, k = int(rng.integers(9)), int(rng.integers(2, 5))
    x, y = (str(letter) for letter in rng.choice(list(LETTERS), 2, replace=False))
    steps = (
        Step("reverse", lambda s: s[::-1], lambda c: f"{c}[::-1]"),
        Step(f"drop first {k}", lambda s: s[k:], lambda c: f"{c}[{k}:]"),
        Step(
            f"drop last {k}",
            lambda s: s[: len(s) - k] if k <= len(s) else "",
            lambda c: f"{c}[:-{k}]",
        ),
        Step(f"keep first {k}", lambda s: s[:k], lambda c: f"{c}[:{k}]"),
        Step(f"keep last {k}", lambda s: s[max(0, len(s) - k) :], lambda c: f"{c}[-{k}:]"),
        Step(f"repeat {k}", lambda s: s * k, lambda c: f"{c}*{k}", loose=True),
        Step(f"add {x}", lambda s: s + x, lambda c: f'{c}+"{x}"', loose=True),
        Step(
            f"change {x} to {y}", lambda s: s.replace(x, y), lambda c: f'{c}.replace("{x}","{y}")'
        ),
        Step("sort", lambda s: "".join(sorted(s)), lambda c: f'"".join(sorted({c}))'),
    )
    return steps[kind]


def string_function(rng: np.random.Generator) -> Item:
    """def f(s) with two or three steps in a comment; the expression after `return` is to be
    written.
    """
    steps = [string_step(rng) for _ in range(int(rng.integers(2, 4)))]
    prompt = f"def f(s):\n # {', '.join(step.words for step in steps)}\n return"
    inputs = ["".join(rng.choice(list(LETTERS), int(rng.integers(6, 10)))) for _ in range(INPUTS)]
    tests = tuple(f"assert f({text!r}) == {_after(steps, text)!r}" for text in inputs)
    hasty = len(steps) > 2
    return Item(
        prompt,
        f" {_expression(steps)}",
        f" {_expression(steps[:-1])}",
        hasty,
        header=prompt,
        tests=tests,
    )


def _after(steps: list[Step], text: str) -> str:
    for step in steps:
        text = step.apply(text)
    return text


def _expression(steps: list[Step]) -> str:
    code, loose = "s", False
    for step in steps:
        code = step.code(f"({code})" if loose and step.words != "sort" else code)
        loose = step.loose
    return code


@dataclass(frozen=True)
class ListStep:
    """One operation on a list: its words, what it does, and the comprehension around the code so
    far.
    """

    words: str
    apply: Callable[[list[int]], list[int]]
    code: Callable[[str], str]


def list_step(rng: np.random.Generator) -> ListStep:
    kind, k = int(rng.integers(7)), int(rng.integers(2, 9))
    steps = (
        ListStep(
            "keep even",
            lambda a: [x for x in a if x % 2 == 0],
            lambda c: f"[x for x in {c} if x%2==0]",
        ),
        ListStep(
            "keep odd",
            lambda a: [x for x in a if x % 2 == 1],
            lambda c: f"[x for x in {c} if x%2==1]",
        ),
        ListStep(
            f"keep over {k}",
            lambda a: [x for x in a if x > k],
            lambda c: f"[x for x in {c} if x>{k}]",
        ),
        ListStep(
            f"keep under {k}",
            lambda a: [x for x in a if x < k],
            lambda c: f"[x for x in {c} if x<{k}]",
        ),
        ListStep(f"add {k}", lambda a: [x + k for x in a], lambda c: f"[x+{k} for x in {c}]"),
        ListStep(f"subtract {k}", lambda a: [x - k for x in a], lambda c: f"[x-{k} for x in {c}]"),
        ListStep(
            f"multiply by {k}", lambda a: [x * k for x in a], lambda c: f"[x*{k} for x in {c}]"
        ),
    )
    return steps[kind]


RESULTS: tuple[tuple[str, Callable[[list[int]], object], str], ...] = (
    ("total", sum, "sum({})"),
    ("sort", sorted, "sorted({})"),
    ("reverse", lambda a: a[::-1], "{}[::-1]"),
)


def list_function(rng: np.random.Generator) -> Item:
    """A function of a list from one line: two steps and what to make of the result; the last step
    comes first in the code.
    """
    first, second = list_step(rng), list_step(rng)
    words, collect, outer = RESULTS[int(rng.integers(len(RESULTS)))]
    prompt = f"write f: {first.words}, {second.words}, {words}\n"
    target = f"f=lambda a:{outer.format(second.code(first.code('a')))}"
    inputs = [[int(x) for x in rng.integers(0, 12, int(rng.integers(4, 8)))] for _ in range(INPUTS)]
    tests = tuple(
        f"assert f({items!r}) == {collect(second.apply(first.apply(items)))!r}" for items in inputs
    )
    hasty = f"f=lambda a:{outer.format(first.code('a'))}"
    return Item(prompt, target, hasty, tempting=words == "total", tests=tests)
