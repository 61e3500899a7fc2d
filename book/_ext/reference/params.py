"""The settings key by key: groups with their own comments, keys with meanings from words.yaml and
the values of `mini`.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from reference.markdown import escaped, table

FILES = ("params.yaml", "pipeline/studies.yaml")
SUITES = ("mini", "paper", "files")
APART = ("suite", "methods", "exp")  # not experiments


@cache
def words(root: Path) -> dict[str, dict[str, str]]:
    """Meanings by list and word."""
    return yaml.safe_load((root / "book" / "reference" / "words.yaml").read_text("utf-8"))


def text(root: Path) -> str:
    """Every group of params.yaml, then of pipeline/studies.yaml, as MyST."""
    comments = {
        group: words
        for name in FILES
        for group, words in comments_of((root / name).read_text("utf-8")).items()
    }
    parts = []
    for group, entries in groups(root).items():
        parts.append(f"## {group.replace('_', ' ')}\n\n")
        parts.append(f"{escaped(comments[group])}\n\n" if comments.get(group) else "")
        names = [f"`{name}`" for name in entries]
        parts.append(
            f"{len(names)} {'entry' if len(names) == 1 else 'entries'} of `{group}:`, {', '.join(names)}.\n\n"
        )
        rows = [
            [f"`{key}`", escaped(meaning(root, group, key)), _values(values)]
            for key, values in keys_of(entries).items()
        ]
        parts.append(table(["Key", "Meaning", "In `mini`"], rows) if rows else "")
    return "".join(parts)


def groups(root: Path) -> dict[str, Any]:
    """Entries by group, of both files."""
    found = {
        group: own
        for name in FILES
        for group, own in yaml.safe_load((root / name).read_text("utf-8")).items()
    }
    return {group: entries for group, entries in found.items() if group not in APART}


def meaning(root: Path, group: str, key: str) -> str:
    """What a key means: in this group, else everywhere; empty where words.yaml has neither."""
    known = words(root)["keys"]
    return known.get(f"{group}.{key}") or known.get(key, "")


def comments_of(source: str) -> dict[str, str]:
    """The comment lines that stand directly above a group."""
    found: dict[str, str] = {}
    lines: list[str] = []
    for line in source.splitlines():
        group = re.match(r"^(\w+):", line)
        if line.startswith("#"):
            lines.append(line.lstrip("# "))
        else:
            if group and lines:
                found[group[1]] = " ".join(lines)
            lines = []
    return found


def keys_of(entries: Any) -> dict[str, list[Any]]:
    """Every key below the entries of a group, in order, with the plain values it has in `mini`;
    suites are no keys.
    """
    found: dict[str, list[Any]] = {}

    def walk(node: Any, suite: str) -> None:
        for key, value in node.items():
            inner = str(key) if key in SUITES and suite == "" else suite
            if inner == suite:
                values = found.setdefault(str(key), [])
                plain = not isinstance(value, dict) and not (
                    isinstance(value, list) and value and isinstance(value[0], dict)
                )
                if plain and suite in ("", "mini") and value not in values:
                    values.append(value)
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, dict):
                    walk(one, inner)

    for entry in entries.values():
        if isinstance(entry, dict):
            walk(entry, "")
    return found


def _values(values: list[Any]) -> str:
    """At most four values as YAML has them."""
    shown = [
        f"`{yaml.safe_dump(value, default_flow_style=True, width=200).splitlines()[0]}`"
        for value in values[:4]
    ]
    return ", ".join(shown) + (" …" if len(values) > 4 else "")
