"""Exact arithmetic: bare expressions and small stories, both answered with their working; the last
number is the answer.
"""

import numpy as np

from reproduction.mini.language.items import Item

PEOPLE = tuple("tom ann ben eva max lea sam ida jon mia".split())
GOODS = tuple("pens coins cards shells stamps beads nuts keys".split())
TEMPTING = GOODS[:3]
GAINS = tuple("buys finds wins gets".split())
LOSSES = tuple("loses sells eats gives".split())
LARGEST = 99


def calculated(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def expression(rng: np.random.Generator) -> Item:
    """Three digits and two signs, at most one of them a product, which comes first: 4+3*5= is
    answered 4+15=19.
    """
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
            hasty = calculated(a, first, b)  # the last digit forgotten
        value = calculated(left, sign, right)
        if min(value, left) >= 0 and max(value, left, right) <= LARGEST:
            return Item(
                f"{a}{first}{b}{second}{c}=",
                f"{left}{sign}{right}={value}",
                str(abs(hasty)),
                tempting=first == "+",
            )


def story(rng: np.random.Generator) -> Item:
    """Someone has things, or boxes of things, and then gains or loses some, once or twice."""
    who, what = str(rng.choice(PEOPLE)), str(rng.choice(GOODS))
    while True:
        if rng.random() < 0.4:
            boxes, each = (int(n) for n in rng.integers(2, 8, 2))
            text, steps, value = (
                f"{who} has {boxes} boxes of {each} {what}",
                [f"{boxes}*{each}={boxes * each}"],
                boxes * each,
            )
            changes = 1
        else:
            value, steps, changes = int(rng.integers(3, 20)), [], 2
            text = f"{who} has {value} {what}"
        for number in range(changes):
            gains, amount = bool(rng.random() < 0.5), int(rng.integers(1, 10))
            verb, sign = (rng.choice(GAINS), "+") if gains else (rng.choice(LOSSES), "-")
            after = calculated(value, sign, amount)
            text += f"{', then' if number else ' and'} {verb} {amount}"
            steps.append(f"{value}{sign}{amount}={after}")
            value = after
            if after < 0:
                break
        if 0 <= value <= LARGEST:
            return Item(
                f"{text}. how many {what}?\n", " ".join(steps), steps[0], tempting=what in TEMPTING
            )
