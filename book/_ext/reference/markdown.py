"""Small pieces of MyST, and docstrings as MyST."""

import re
from collections.abc import Iterable

SPECIAL = re.compile(r"([\\*_{}\[\]<>$|#~])")
CODE = re.compile(
    r"(?<![`\w-])--[a-z][a-z-]*|(?<!`)\{['\"][^}]*\}"
)  # else typography turns these into dashes and round quotes
ITEM = re.compile(r"^(\s*)([A-Za-z_]\w*(?:, \w+)*):\s+(\S.*)$")


def escaped(text: str) -> str:
    """Return plain text as MyST; backticks, options and dictionaries become code."""
    parts = re.split(r"(`[^`]*`)", CODE.sub(r"`\g<0>`", text))
    return "".join(part if part.startswith("`") else SPECIAL.sub(r"\\\1", part) for part in parts)


def block(code: str, language: str = "text") -> str:
    """Return a fenced block."""
    return f"```{language}\n{code.rstrip()}\n```\n"


def defined(items: Iterable[tuple[str, str]]) -> str:
    """Return a definition list of MyST terms and meanings."""
    return "".join(f"{term}\n: {meaning}\n\n" for term, meaning in items)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a table of MyST cells."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n\n"
    )


def docstring(text: str) -> str:
    """Return a docstring as MyST: paragraphs, and `name: meaning` as a definition list.

    A line that is indented further than the term above it continues that term.
    """
    out: list[str] = []
    items: list[tuple[str, str]] = []
    depth, paragraph = 0, ""

    def close() -> None:
        nonlocal paragraph
        out.extend([f"{escaped(paragraph)}\n\n"] * bool(paragraph))
        out.extend(
            [defined((f"`{name}`", escaped(meaning)) for name, meaning in items)] * bool(items)
        )
        paragraph = ""
        items.clear()

    for line in text.splitlines():
        item, indent = ITEM.match(line), len(line) - len(line.lstrip())
        if not line.strip() or line.strip() == "Args:":
            close()
        elif (
            item
            and not paragraph
            and (not items or indent <= depth or indent in (2, 6) and indent > depth)
        ):
            depth = len(item[1])
            items.append((item[2], item[3]))
        elif items and indent > depth:
            items[-1] = (items[-1][0], f"{items[-1][1]} {line.strip()}")
        else:
            paragraph += (" " if paragraph else "") + line.strip()
    close()
    return "".join(out)
