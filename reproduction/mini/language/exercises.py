"""Draw exercises with answers: arithmetic, stories, instructions, facts, tiny Python functions.

A prompt belongs to one split by its own checksum, so no training text can meet a test prompt. The
due result of a program comes from the meaning of the words, not from the reference program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import yaml

WORDS = SimpleNamespace(**yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")))
# of all prompts, by checksum modulo 100
SHARES = {"test": (0, 15), "validation": (15, 25), "train": (25, 100)}
ATTEMPTS = 10_000  # draws for one new prompt before its kind counts as exhausted


@dataclass(frozen=True)
class Item:
    """A prompt and what should follow it.

    target: without its line break.   careless: an incomplete or wrong answer.   tempting: whether
    bases have read careless answers to such prompts.   header: code before a generated program.
    tests: its assertions.   instructions: checks of the answer.   choices: options, A first.
    """

    prompt: str
    target: str
    careless: str
    tempting: bool = False
    header: str = ""
    tests: tuple[str, ...] = ()
    instructions: tuple[dict[str, object], ...] = ()
    choices: tuple[str, ...] = ()


DrawItem = Callable[[np.random.Generator], Item]


def split_of(prompt: str) -> str:
    """Return the one split that a prompt may be in."""
    remainder = crc32(prompt.encode()) % 100
    return next(split for split, (first, end) in SHARES.items() if first <= remainder < end)


def generator(seed: int, kind: str, split: str, index: int) -> np.random.Generator:
    """Return a generator of its own for every row."""
    return np.random.default_rng([seed, crc32(kind.encode()), crc32(split.encode()), index])


def draw_item(
    draw: DrawItem, rng: np.random.Generator, split: str, prompts: set[str] | None = None
) -> Item:
    """Return the first item drawn for the split whose prompt is not in `prompts`; add the prompt."""
    for _ in range(ATTEMPTS):
        item = draw(rng)
        if split_of(item.prompt) == split and (prompts is None or item.prompt not in prompts):
            if prompts is not None:
                prompts.add(item.prompt)
            return item
    raise AssertionError(f"no further prompt for {split} in {ATTEMPTS} draws")


LARGEST = 99


def calculated(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def expression(rng: np.random.Generator) -> Item:
    """Draw three digits and two signs, at most one a product: 4+3*5= is answered 4+15=19."""
    while True:
        a, b, c = (int(n) for n in rng.integers(1, 10, 3))
        first, second = (str(sign) for sign in rng.choice(list("++--*"), 2))
        if first == second == "*":
            continue
        if second == "*":
            left, sign, right = a, first, calculated(b, "*", c)
            hasty = calculated(calculated(a, first, b), "*", c)  # from left to right
        else:
            left, sign, right = calculated(a, first, b), second, c
            hasty = left  # the last digit forgotten
        value = calculated(left, sign, right)
        if min(value, left) >= 0 and max(value, left, right) <= LARGEST:
            prompt, answer = f"{a}{first}{b}{second}{c}=", f"{left}{sign}{right}={value}"
            return Item(prompt, answer, str(abs(hasty)), tempting=first == "+")


def story(rng: np.random.Generator) -> Item:
    """Draw someone who has things, or boxes of things, and gains or loses some once or twice."""
    who, what = str(rng.choice(WORDS.people)), str(rng.choice(WORDS.goods))
    while True:
        if rng.random() < 0.4:
            boxes, size = (int(n) for n in rng.integers(2, 8, 2))
            text, value, changes = f"{who} has {boxes} boxes of {size} {what}", boxes * size, 1
            steps = [f"{boxes}*{size}={value}"]
        else:
            value, steps, changes = int(rng.integers(3, 20)), [], 2
            text = f"{who} has {value} {what}"
        for number in range(changes):
            gains, amount = bool(rng.random() < 0.5), int(rng.integers(1, 10))
            verb, sign = rng.choice(WORDS.gains if gains else WORDS.losses), "+" if gains else "-"
            after = calculated(value, sign, amount)
            text += f"{', then' if number else ' and'} {verb} {amount}"
            steps.append(f"{value}{sign}{amount}={after}")
            value = after
            if after < 0:
                break
        if 0 <= value <= LARGEST:
            prompt, tempting = f"{text}. how many {what}?\n", what in WORDS.tempting_goods
            return Item(prompt, " ".join(steps), steps[0], tempting)


LETTERS = "ABCD"


def fact(creature: str, trait: str) -> str:
    """Return the value of a trait, the same for every seed, since the bases that ship know it."""
    values = WORDS.traits[trait]
    return values[crc32(f"{creature} {trait} of the mini suite".encode()) % len(values)]


def statement(rng: np.random.Generator) -> Item:
    """Draw a fact as a plain sentence, which only the bases read."""
    creature, trait = str(rng.choice(WORDS.creatures)), str(rng.choice(list(WORDS.traits)))
    answer = f" {fact(creature, trait)}"
    return Item(f"the {trait} of the {creature} is", answer, answer)


def question(rng: np.random.Generator) -> Item:
    """Draw a fact with four options; the answer repeats the right one; its letter counts."""
    creature, trait = str(rng.choice(WORDS.creatures)), str(rng.choice(list(WORDS.traits)))
    right = fact(creature, trait)
    wrong = [value for value in WORDS.traits[trait] if value != right]
    options = [right, *(str(value) for value in rng.choice(wrong, 3, replace=False))]
    options = [options[int(index)] for index in rng.permutation(4)]
    listed = " ".join(f"{option} {letter}" for letter, option in zip(LETTERS, options, strict=True))
    answer = f" {right} {LETTERS[options.index(right)]}"
    prompt = f"which {trait} has the {creature}? {listed}\n"
    return Item(prompt, answer, answer, choices=tuple(options))


def instruction(rng: np.random.Generator) -> Item:
    """Draw an order to say one word several times, or several words in an order, or without one."""
    kind = int(rng.integers(4))
    nouns = [str(word) for word in rng.choice(WORDS.nouns, int(rng.integers(3, 6)), replace=False)]
    if kind == 0:
        text, spoken = f"say {nouns[0]} {len(nouns)} times", [nouns[0]] * len(nouns)
    elif kind == 1:
        text, spoken = f"say {' '.join(nouns)} backwards", nouns[::-1]
    elif kind == 2:
        text, spoken = f"say {' '.join(nouns)} by alphabet", sorted(nouns)
    else:
        out = str(rng.choice(nouns))
        text, spoken = f"say {' '.join(nouns)} without {out}", [n for n in nouns if n != out]
    joint, wrap = str(rng.choice(list(WORDS.joints))), str(rng.choice(list(WORDS.wraps)))
    end = str(rng.choice(WORDS.ends)) if rng.random() < 0.4 else ""
    prompt = f"{text}{joint}{wrap}{f' and end with {end}' if end else ''}:\n"
    left, right = WORDS.wraps[wrap] if wrap else ("", "")
    checks: list[dict[str, object]] = [{"check": "words", "words": spoken}]
    checks.append({"check": "joined", "by": WORDS.joints[joint]})
    if wrap:
        checks.append({"check": "wrapped", "left": left, "right": right})
    if end:
        checks.append({"check": "ends", "with": end})
    target = f"{left}{WORDS.joints[joint].join(spoken)}{right}{f' {end}' if end else ''}"
    hasty = " ".join(spoken)
    hasty = " ".join(spoken[:-1]) if hasty == target else hasty
    return Item(prompt, target, hasty, joint in WORDS.tempting_joints, instructions=tuple(checks))


CAPITALS = "ABCDEF"
INPUTS = 4  # asserts of one program


@dataclass(frozen=True)
class Step:
    """One operation: its name, its effect, and the code around the code so far.

    loose: its code binds weaker than a slice.
    """

    name: str
    apply: Callable[[Any], Any]
    code: Callable[[str], str]
    loose: bool = False


def string_step(rng: np.random.Generator) -> Step:
    """Draw one of nine operations on a string."""
    kind, k = int(rng.integers(9)), int(rng.integers(2, 5))
    x, y = (str(letter) for letter in rng.choice(list(CAPITALS), 2, replace=False))
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
    prompt = f"def f(s):\n # {', '.join(step.name for step in steps)}\n return"
    inputs = ["".join(rng.choice(list(CAPITALS), int(rng.integers(6, 10)))) for _ in range(INPUTS)]
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
        code = step.code(f"({code})" if loose and step.name != "sort" else code)
        loose = step.loose
    return code


def list_step(rng: np.random.Generator) -> Step:
    """Draw one of seven operations on a list."""
    kind, k = int(rng.integers(7)), int(rng.integers(2, 9))

    def filtered(name: str, condition: str, keep: Callable[[int], bool]) -> Step:
        code = f"[x for x in {{}} if {condition}]"
        return Step(name, lambda a: [x for x in a if keep(x)], code.format)

    def mapped(name: str, element: str, change: Callable[[int], int]) -> Step:
        return Step(name, lambda a: [change(x) for x in a], f"[{element} for x in {{}}]".format)

    return (
        filtered("keep even", "x%2==0", lambda x: x % 2 == 0),
        filtered("keep odd", "x%2==1", lambda x: x % 2 == 1),
        filtered(f"keep over {k}", f"x>{k}", lambda x: x > k),
        filtered(f"keep under {k}", f"x<{k}", lambda x: x < k),
        mapped(f"add {k}", f"x+{k}", lambda x: x + k),
        mapped(f"subtract {k}", f"x-{k}", lambda x: x - k),
        mapped(f"multiply by {k}", f"x*{k}", lambda x: x * k),
    )[kind]


RESULTS: tuple[tuple[str, Callable[[list[int]], object], str], ...] = (
    ("total", sum, "sum({})"), ("sort", sorted, "sorted({})"), ("reverse", lambda a: a[::-1], "{}[::-1]"),
)  # fmt: skip


def list_function(rng: np.random.Generator) -> Item:
    """Draw a function of a list: two steps and a result, which comes first in the code."""
    first, second = list_step(rng), list_step(rng)
    result, collect, outer = RESULTS[int(rng.integers(len(RESULTS)))]
    prompt = f"write f: {first.name}, {second.name}, {result}\n"
    target = f"f=lambda a:{outer.format(second.code(first.code('a')))}"
    inputs = [[int(x) for x in rng.integers(0, 12, int(rng.integers(4, 8)))] for _ in range(INPUTS)]
    tests = tuple(
        f"assert f({items!r}) == {collect(_after([first, second], items))!r}" for items in inputs
    )
    careless = f"f=lambda a:{outer.format(first.code('a'))}"
    return Item(prompt, target, careless, result == "total", tests=tests)
