"""The blocks of code in the book and in README are run as they stand."""

import re
from pathlib import Path

import pytest
import torch

from featcal.merging.registry import METHODS, methods_table
from featcal.models.families import KNOWN

ROOT = Path(__file__).parent.parent


def code_of(page: str) -> list[str]:
    """The blocks of Python on a page of the book."""
    return re.findall(
        r"^```python\n(.*?)^```$",
        (ROOT / "book" / page).read_text("utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )


@pytest.fixture
def tables():
    """Restore the tables that the page adds to."""
    methods_table()  # loads every method: a module is imported, and so registered, only once
    before = [(table, dict(table)) for table in (KNOWN, METHODS)]
    yield
    for table, content in before:
        table.clear()
        table.update(content)


def test_the_page_on_extending_runs_from_top_to_bottom(tables, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = code_of("extend.md")
    assert len(blocks) == 4
    assert len(blocks[0].splitlines()) <= 8  # a family in eight lines
    namespace = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, "extend.md", "exec"), namespace)
    assert capsys.readouterr().out.splitlines() == [
        "['encoder.00', 'encoder.01', 'decoder.00', 'decoder.01']",
        "40 ('bright', 'dark')",
    ]
    halves = [
        namespace[name].state_dict()["encoder.layers.0.fc1.weight"] for name in ("halfway", "base")
    ]
    middle = (
        torch.stack(
            [e.state_dict()["encoder.layers.0.fc1.weight"] for e in namespace["experts"].values()]
        )
        .median(0)
        .values
    )
    assert torch.allclose(halves[0], (halves[1] + middle) / 2)


def test_the_page_on_result_files_reads_them(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for block in code_of("reference/results.md"):
        exec(compile(block, "results.md", "exec"), {})
    assert "suite" in capsys.readouterr().out
