"""Small pieces of MyST, and docstrings as MyST."""

import re
from collections.abc import Iterable

SPECIAL = re.compile(r"([\\*_{}\[\]<>$|#~])")
CODE = re.compile(
    r"(?<![`\w-])--[a-z][a-z-]*|(?<!`)\{['\"][^}]*\}"
)  # typography would make a dash and round quotes of these
ITEM = re.compile(r"^(\s*)([A-Za-z_]\w*(?:, \w+)*):\s+(\S.*)$")


def escaped(text: str) -> str:
    """Plain text as MyST; what stands in backticks is code, and so are options and dictionaries
    without them.
    """
    parts = re.split(r"(`[^`]*`)", CODE.sub(r"`\g<0>`", text))
    return "".join(part if part.startswith("`") else SPECIAL.sub(r"\\\1", part) for part in parts)


def block(code: str, language: str = "text") -> str:
    """Lines of code or output."""
    return f"```{language}\n{code.rstrip()}\n```\n"


def defined(items: Iterable[tuple[str, str]]) -> str:
    """A list of terms and what they mean, both MyST."""
    return "".join(f"{term}\n: {meaning}\n\n" for term, meaning in items)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table; cells are MyST without bars of their own."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n\n"
    )


def docstring(text: str) -> str:
    """A docstring: paragraphs as they are, `name: meaning` as a list of terms; "Args:" alone only
    announces such a list.

    A line that is indented further than the term above it goes on with that term.
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
        found, indent = ITEM.match(line), len(line) - len(line.lstrip())
        if not line.strip() or line.strip() == "Args:":
            close()
        elif (
            found
            and not paragraph
            and (not items or indent <= depth or indent in (2, 6) and indent > depth)
        ):
            depth = len(found[1])
            items.append((found[2], found[3]))
        elif items and indent > depth:
            items[-1] = (items[-1][0], f"{items[-1][1]} {line.strip()}")
        else:
            paragraph += (" " if paragraph else "") + line.strip()
    close()
    return "".join(out)
