"""Instructions whose fulfilment can be checked: which words, how often, in what order, joined and
wrapped how.
"""

import numpy as np

from reproduction.mini.language.items import Item

NOUNS = tuple(
    "pear fig plum lime date kiwi oak elm ash yew fir bay lamp desk door wall roof sofa cup fork bowl dish jug pan".split()
)
JOINTS = {"": " ", " with commas": ", ", " with dashes": "-", " with bars": "|"}
TEMPTING = (" with dashes", " with bars")
WRAPS = {
    "": ("", ""),
    " in brackets": ("(", ")"),
    " in quotes": ('"', '"'),
    " in stars": ("*", "*"),
}
ENDS = ("stop", "end", "over")


def instruction(rng: np.random.Generator) -> Item:
    """Say one word several times, or several words as given, backwards, by alphabet, or but for one
    of them.
    """
    kind = int(rng.integers(4))
    words = [str(word) for word in rng.choice(NOUNS, int(rng.integers(3, 6)), replace=False)]
    if kind == 0:
        text, said = f"say {words[0]} {len(words)} times", [words[0]] * len(words)
    elif kind == 1:
        text, said = f"say {' '.join(words)} backwards", words[::-1]
    elif kind == 2:
        text, said = f"say {' '.join(words)} by alphabet", sorted(words)
    else:
        out = str(rng.choice(words))
        text, said = f"say {' '.join(words)} without {out}", [word for word in words if word != out]
    joint, wrap = str(rng.choice(list(JOINTS))), str(rng.choice(list(WRAPS)))
    end = str(rng.choice(ENDS)) if rng.random() < 0.4 else ""
    prompt = f"{text}{joint}{wrap}{f' and end with {end}' if end else ''}:\n"
    checks: list[dict[str, object]] = [{"check": "words", "words": said}]
    checks.append({"check": "joined", "by": JOINTS[joint]})
    if wrap:
        checks.append({"check": "wrapped", "left": WRAPS[wrap][0], "right": WRAPS[wrap][1]})
    if end:
        checks.append({"check": "ends", "with": end})
    target, hasty = _answer(said, joint, wrap, end), _answer(said, "", "", "")
    hasty = _answer(said[:-1], "", "", "") if hasty == target else hasty
    return Item(prompt, target, hasty, tempting=joint in TEMPTING, instructions=tuple(checks))


def _answer(said: list[str], joint: str, wrap: str, end: str) -> str:
    left, right = WRAPS[wrap]
    return f"{left}{JOINTS[joint].join(said)}{right}{f' {end}' if end else ''}"
