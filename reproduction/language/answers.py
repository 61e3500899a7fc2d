"""Whether a generated answer is right, as pure functions of texts: a number, a letter, instructions
that can be checked.

Programs are run elsewhere (reproduction.language.sandbox). Knows nothing of models and harnesses.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LETTER = re.compile(r"\b[A-Z]\b")
WORD = re.compile(r"[a-z]+", re.IGNORECASE)


def first_line(answer: str) -> str:
    """What counts of a generated text: everything before its first line break."""
    return answer.split("\n", 1)[0]


def arithmetic(answer: str, target: str) -> bool:
    """Whether the last numbers of both texts are equal; an answer without a number is wrong.

    A minus directly behind a digit is an operator: 35-3 ends in 3.
    """
    found, wanted = last_number(first_line(answer)), last_number(target)
    return found is not None and found == wanted


def last_number(text: str) -> float | None:
    """The last number in a text, or None."""
    numbers = NUMBER.findall(re.sub(r"(?<=\d)-", " ", text))
    return float(numbers[-1]) if numbers else None


def letter(answer: str, target: str) -> bool:
    """Whether the last capitals that stand alone are equal in both texts, as in "it is fish, so B";
    without one it is wrong.
    """
    found, wanted = LETTER.findall(first_line(answer)), LETTER.findall(target)
    return bool(found) and found[-1:] == wanted[-1:]


def instructions(answer: str, checks_json: str) -> bool:
    """Whether an answer fulfils every check of a prompt (prompt-level, strict: nothing around it is
    forgiven but blanks).

    checks_json: a JSON list of objects, each with "check", the name of one below, and its
    arguments:
      words: "words", all words said, in order; joined: "by", what stands between them;
      wrapped: "left" and "right"; ends: "with", a last word behind everything else.
    Raises: KeyError for a check that does not exist.
    """
    checks: list[dict[str, Any]] = json.loads(checks_json)
    text = first_line(answer).strip()
    return bool(checks) and all(CHECKS[check["check"]](text, check, checks) for check in checks)


def _body(text: str, checks: list[dict[str, Any]]) -> str:
    """The answer without the last word that was asked for."""
    for check in checks:
        if check["check"] == "ends":
            text = text.removesuffix(check["with"]).rstrip()
    return text


def _inner(text: str, checks: list[dict[str, Any]]) -> str:
    """The body without what it was to be wrapped in."""
    text = _body(text, checks)
    for check in checks:
        if check["check"] == "wrapped":
            text = text.removeprefix(check["left"]).removesuffix(check["right"])
    return text


def _words(text: str, check: Mapping[str, Any], checks: list[dict[str, Any]]) -> bool:
    return WORD.findall(_body(text, checks)) == check["words"]


def _joined(text: str, check: Mapping[str, Any], checks: list[dict[str, Any]]) -> bool:
    inner = _inner(text, checks)
    return inner == check["by"].join(WORD.findall(inner))


def _wrapped(text: str, check: Mapping[str, Any], checks: list[dict[str, Any]]) -> bool:
    body = _body(text, checks)
    return len(body) > 1 and body.startswith(check["left"]) and body.endswith(check["right"])


def _ends(text: str, check: Mapping[str, Any], checks: list[dict[str, Any]]) -> bool:
    return (
        bool(WORD.findall(text))
        and WORD.findall(text)[-1] == check["with"]
        and text.endswith(f" {check['with']}")
    )


CHECKS: dict[str, Callable[[str, Mapping[str, Any], list[dict[str, Any]]], bool]] = {
    "words": _words,
    "joined": _joined,
    "wrapped": _wrapped,
    "ends": _ends,
}
