"""The README: every number is recomputed from results/, and its code runs on tiny models."""

import math
import re
from pathlib import Path
from statistics import fmean

import pandas as pd
import pytest

from featcal.cli import main as cli
from featcal.models.load import load_vision
from tests.cli.test_cli import models, ready

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
RESULTS = ROOT / "results" / "mini"
SOURCES = {
    "ViT-S/14, real images": "scores/vit_s-8/scores.csv",
    "MiniLM, texts": "scores/minilm-8/scores.csv",
    "MPNet, texts": "second_encoder/minilm-8/second_encoder.csv",
    "small CLIP, drawn images": "scores/clip_b32-8/scores.csv",
}
MERGERS = {
    "averaging": "average",
    "task arithmetic": "task_arithmetic",
    "WUDI": "wudi",
    "WUDI, closed form": "wudi_closed_form",
}


def accuracy(scores: pd.DataFrame, merger: str, method: str, setting: str = "") -> float:
    """Return the mean over tasks and seeds, NaN where nothing was run."""
    keys = scores[["upstream", "method", "setting"]].agg(tuple, axis=1)
    values = scores.value[keys == (merger, method, setting)]
    return fmean(values) if len(values) else math.nan


def expected_row(source: str, merger: str) -> list[str]:
    """Return the cells of one row, recomputed from the result files."""
    scores = pd.read_csv(RESULTS / SOURCES[source], keep_default_na=False)
    name = MERGERS[merger]
    adapters = pd.Series(
        accuracy(scores, name, method, setting)
        for method in ("surgery", "prob_surgery")
        for setting in ("suite", "paper")
    )
    values = [accuracy(scores, name, "merged")]
    values += [accuracy(scores, name, "featcal", setting) for setting in ("paper", "suite")]
    values.append(float(adapters.max()))
    cells = ["not run" if math.isnan(value) else f"{value:.1f}" for value in values]
    return [f"{source} ({accuracy(scores, '', 'expert'):.1f})", merger, *cells]


def rows_of_the_table() -> list[list[str]]:
    table = README.split("<!-- results -->\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_every_number_of_the_table_is_in_the_results():
    expected = [expected_row(row[0].rpartition(" (")[0], row[1]) for row in rows_of_the_table()]
    assert rows_of_the_table() == expected, "\n".join(f"| {' | '.join(row)} |" for row in expected)


def test_the_table_shows_what_the_sentences_below_it_say():
    values = [[float(cell) for cell in row[2:] if cell != "not run"] for row in rows_of_the_table()]
    full = [row for row in values if len(row) == 4]
    for setting in (1, 2):
        assert any(row[setting] < row[0] for row in full)
    assert any(row[3] > max(row[1:3]) for row in full)
    weak = [row for row in rows_of_the_table() if row[1] in ("averaging", "task arithmetic")]
    raised = [(row[2], cell) for row in weak for cell in row[3:5] if cell != "not run"]
    assert min(float(cell) - float(merged) for merged, cell in raised) > 5


@pytest.fixture
def project(models) -> Path:
    """The folders that the README names: models/ and images/."""
    (models / "models").mkdir()
    for name in ("base", "mnist", "dtd"):
        (models / name).rename(models / "models" / name)
    return models


def test_commands_and_python_run_and_calibrate_alike(project, capsys):
    """As written, but for the number of samples in Python and a prompt of known words."""
    shell = next(b for b in re.findall(r"```bash\n(.*?)```", README, re.S) if "featcal merge" in b)
    (python,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in python.splitlines() if line.strip()]) <= 8
    commands = re.findall(r"^featcal (.*)", shell.replace("\\\n", " "), re.M)
    assert [line.split()[0] for line in commands] == ["merge", "fix", "evaluate", "inspect"]
    prompt = {"evaluate": ["--template", "a photo of a {}"]}  # the tiny tokenizer knows few words
    for command in commands:
        words = command.split()
        assert cli.main([*words, *prompt.get(words[0], [])]) == 0, command
    assert "no NaN" in capsys.readouterr().out
    names: dict = {}
    exec(python.replace("samples=256", "samples=5"), names)  # four of nine are held out
    written = load_vision("models/merged-calibrated").state_dict()
    for name, value in names["result"].model.state_dict().items():
        assert value.equal(written[name]), name
