"""Judge a generated answer of a drawn test: a number, a letter, checkable instructions, a program.

Every check is a function of the test's row and the answer, of which only the first line counts.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from reproduction.language.programs import passes

Row = Mapping[str, Any]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LETTER = re.compile(r"\b[A-Z]\b")
WORD = re.compile(r"[a-z]+", re.IGNORECASE)


def first_line(answer: str) -> str:
    """Return the part of a generated text that counts."""
    return answer.split("\n", 1)[0]


def arithmetic(row: Row, answer: str) -> bool:
    """Return whether the last numbers of answer and target are equal."""
    found, wanted = last_number(first_line(answer)), last_number(row["target"])
    return found is not None and found == wanted


def last_number(text: str) -> float | None:
    """Return the last number in a text. A minus right after a digit is an operator: 35-3 ends in
    3.
    """
    numbers = NUMBER.findall(re.sub(r"(?<=\d)-", " ", text))
    return float(numbers[-1]) if numbers else None


def letter(row: Row, answer: str) -> bool:
    """Return whether the last single capitals of answer and target are equal."""
    found, wanted = LETTER.findall(first_line(answer)), LETTER.findall(row["target"])
    return bool(found) and found[-1:] == wanted[-1:]


def program(row: Row, answer: str) -> bool:
    """Return whether the row's header, continued by the answer, passes the row's tests."""
    return passes(row["header"] + first_line(answer) + "\n", row["tests"])


def instructions(row: Row, answer: str) -> bool:
    """Return whether an answer fulfils every check in the row's JSON list `instructions`.

    Each check names its kind: words (all words, in order), joined (by what), wrapped (left and
    right), ends (the last word).
    """
    checks: list[dict[str, Any]] = json.loads(row["instructions"])
    text = first_line(answer).strip()
    body = text  # without the last word
    for check in checks:
        if check["check"] == "ends":
            body = body.removesuffix(check["with"]).rstrip()
    inner = body  # and without the wrapping
    for check in checks:
        if check["check"] == "wrapped":
            inner = inner.removeprefix(check["left"]).removesuffix(check["right"])

    def fulfilled(check: dict[str, Any]) -> bool:
        if check["check"] == "words":
            return WORD.findall(body) == check["words"]
        if check["check"] == "joined":
            return inner == check["by"].join(WORD.findall(inner))
        if check["check"] == "wrapped":
            ends = body.startswith(check["left"]) and body.endswith(check["right"])
            return len(body) > 1 and ends
        if check["check"] == "ends":
            last = WORD.findall(text)[-1:]
            return last == [check["with"]] and text.endswith(f" {check['with']}")
        raise KeyError(check["check"])

    return bool(checks) and all(fulfilled(check) for check in checks)


CHECKS: dict[str, Callable[[Row, str], bool]] = {
    "arithmetic": arithmetic, "letter": letter, "instructions": instructions, "program": program,
}  # fmt: skip
NEEDED = {
    "arithmetic": ("target",), "letter": ("target",), "instructions": ("instructions",),
    "program": ("tests", "header"),
}  # fmt: skip
