"""The settings key by key, with comments of params.yaml, meanings of words.yaml, values of mini."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from reference.markdown import escaped

FILES = ("params.yaml", "pipeline/models.yaml", "pipeline/studies.yaml")
SUITES = ("mini", "paper", "files")
APART = ("suite", "featcal", "mergers", "tasks", "methods")  # no experiments


@cache
def meanings(root: Path) -> dict[str, dict[str, str]]:
    """Return the meanings by list and key."""
    return yaml.safe_load((root / "book" / "reference" / "words.yaml").read_text("utf-8"))


def text(root: Path) -> str:
    """Return every group of params.yaml, then of pipeline/studies.yaml, as MyST."""
    comments = {
        group: comment
        for name in FILES
        for group, comment in comments_of((root / name).read_text("utf-8")).items()
    }
    parts = []
    for group, entries in groups(root).items():
        parts.append(f"## {group.replace('_', ' ')}\n\n")
        parts.append(f"{escaped(comments[group])}\n\n" if comments.get(group) else "")
        names = [f"`{name}`" for name in entries]
        parts.append(
            f"{len(names)} {'entry' if len(names) == 1 else 'entries'} of `{group}:`, {', '.join(names)}.\n\n"
        )
        for key, values in keys_of(entries).items():
            in_mini = f" In `mini`: {_values(values)}" if values else ""
            parts.append(f"- `{key}`: {escaped(meaning(root, group, key))}{in_mini}\n")
        parts.append("\n")
    return "".join(parts)


def groups(root: Path) -> dict[str, Any]:
    """Return the entries by group, of both files."""
    all_groups = {
        group: own
        for name in FILES
        for group, own in yaml.safe_load((root / name).read_text("utf-8")).items()
    }
    return {group: entries for group, entries in all_groups.items() if group not in APART}


def meaning(root: Path, group: str, key: str) -> str:
    """Return the meaning of a key in this group, else everywhere; empty if words.yaml has neither."""
    known = meanings(root)["keys"]
    return known.get(f"{group}.{key}") or known.get(key, "")


def comments_of(source: str) -> dict[str, str]:
    """Return the comment lines directly above each group."""
    comments: dict[str, str] = {}
    lines: list[str] = []
    for line in source.splitlines():
        group = re.match(r"^(\w+):", line)
        if line.startswith("#"):
            lines.append(line.lstrip("# "))
        else:
            if group and lines:
                comments[group[1]] = " ".join(lines)
            lines = []
    return comments


def keys_of(entries: Any) -> dict[str, list[Any]]:
    """Return every key of a group, in order, with its plain values in `mini`; suites are no keys."""
    values_by_key: dict[str, list[Any]] = {}

    def walk(node: Any, suite: str) -> None:
        for key, value in node.items():
            inner = str(key) if key in SUITES and suite == "" else suite
            if inner == suite:
                values = values_by_key.setdefault(str(key), [])
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
    return values_by_key


def _values(values: list[Any]) -> str:
    """Return at most four values as YAML writes them."""
    shown = [
        f"`{yaml.safe_dump(value, default_flow_style=True, width=200).splitlines()[0]}`"
        for value in values[:4]
    ]
    return ", ".join(shown) + (" …" if len(values) > 4 else "")
