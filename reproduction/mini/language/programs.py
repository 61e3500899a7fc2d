"""Draw tiny Python functions: a string function to be completed, a list function from one line.

Answers are judged on inputs that the prompt does not show. The expected outputs come from the
meaning of the words, not from the reference program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reproduction.mini.language.exercises import Item

LETTERS = "ABCDEF"
INPUTS = 4  # asserts of one program


@dataclass(frozen=True)
class Step:
    """One operation: its words, what it does, and the code around the code so far.

    loose: its code binds weaker than a slice.
    """

    words: str
    apply: Callable[[Any], Any]
    code: Callable[[str], str]
    loose: bool = False


def string_step(rng: np.random.Generator) -> Step:
    """Draw one of nine operations on a string."""
    kind, k = int(rng.integers(9)), int(rng.integers(2, 5))
    x, y = (str(letter) for letter in rng.choice(list(LETTERS), 2, replace=False))
    return (
        Step("reverse", lambda s: s[::-1], lambda c: f"{c}[::-1]"),
        Step(f"drop first {k}", lambda s: s[k:], lambda c: f"{c}[{k}:]"),
        Step(f"drop last {k}", lambda s: s[: max(0, len(s) - k)], lambda c: f"{c}[:-{k}]"),
        Step(f"keep first {k}", lambda s: s[:k], lambda c: f"{c}[:{k}]"),
        Step(f"keep last {k}", lambda s: s[max(0, len(s) - k) :], lambda c: f"{c}[-{k}:]"),
        Step(f"repeat {k}", lambda s: s * k, lambda c: f"{c}*{k}", loose=True),
        Step(f"add {x}", lambda s: s + x, lambda c: f'{c}+"{x}"', loose=True),
        Step(
            f"change {x} to {y}", lambda s: s.replace(x, y), lambda c: f'{c}.replace("{x}","{y}")'
        ),
        Step("sort", lambda s: "".join(sorted(s)), lambda c: f'"".join(sorted({c}))'),
    )[kind]


def string_function(rng: np.random.Generator) -> Item:
    """Draw def f(s) with two or three steps in a comment, whose return value is to be written."""
    steps = [string_step(rng) for _ in range(int(rng.integers(2, 4)))]
    prompt = f"def f(s):\n # {', '.join(step.words for step in steps)}\n return"
    inputs = ["".join(rng.choice(list(LETTERS), int(rng.integers(6, 10)))) for _ in range(INPUTS)]
    tests = tuple(f"assert f({text!r}) == {_after(steps, text)!r}" for text in inputs)
    target, careless = f" {_expression(steps)}", f" {_expression(steps[:-1])}"
    return Item(prompt, target, careless, len(steps) > 2, header=prompt, tests=tests)


def _after(steps: list[Step], value: Any) -> Any:
    for step in steps:
        value = step.apply(value)
    return value


def _expression(steps: list[Step]) -> str:
    code, loose = "s", False
    for step in steps:
        code = step.code(f"({code})" if loose and step.words != "sort" else code)
        loose = step.loose
    return code


def list_step(rng: np.random.Generator) -> Step:
    """Draw one of seven operations on a list."""
    kind, k = int(rng.integers(7)), int(rng.integers(2, 9))

    def kept(words: str, condition: str, keep: Callable[[int], bool]) -> Step:
        code = f"[x for x in {{}} if {condition}]"
        return Step(words, lambda a: [x for x in a if keep(x)], code.format)

    def mapped(words: str, element: str, change: Callable[[int], int]) -> Step:
        return Step(words, lambda a: [change(x) for x in a], f"[{element} for x in {{}}]".format)

    return (
        kept("keep even", "x%2==0", lambda x: x % 2 == 0),
        kept("keep odd", "x%2==1", lambda x: x % 2 == 1),
        kept(f"keep over {k}", f"x>{k}", lambda x: x > k),
        kept(f"keep under {k}", f"x<{k}", lambda x: x < k),
        mapped(f"add {k}", f"x+{k}", lambda x: x + k),
        mapped(f"subtract {k}", f"x-{k}", lambda x: x - k),
        mapped(f"multiply by {k}", f"x*{k}", lambda x: x * k),
    )[kind]


RESULTS: tuple[tuple[str, Callable[[list[int]], object], str], ...] = (
    ("total", sum, "sum({})"), ("sort", sorted, "sorted({})"), ("reverse", lambda a: a[::-1], "{}[::-1]"),
)  # fmt: skip


def list_function(rng: np.random.Generator) -> Item:
    """Draw a function of a list from one line: two steps and a result, which comes first in the
    code.
    """
    first, second = list_step(rng), list_step(rng)
    words, collect, outer = RESULTS[int(rng.integers(len(RESULTS)))]
    prompt = f"write f: {first.words}, {second.words}, {words}\n"
    target = f"f=lambda a:{outer.format(second.code(first.code('a')))}"
    inputs = [[int(x) for x in rng.integers(0, 12, int(rng.integers(4, 8)))] for _ in range(INPUTS)]
    tests = tuple(
        f"assert f({items!r}) == {collect(_after([first, second], items))!r}" for items in inputs
    )
    careless = f"f=lambda a:{outer.format(first.code('a'))}"
    return Item(prompt, target, careless, words == "total", tests=tests)
