"""The README: every number is recomputed from results/, and its code runs on tiny models."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from featcal.cli import main as cli
from featcal.models.load import load_vision
from pipeline import RESULTS, ROOT
from tests.cli.test_cli import models, ready
from tests.folders import same

README = (ROOT / "README.md").read_text("utf-8")
ALONE = {"mpnet-8": "second_encoder/minilm-8/second_encoder.csv"}  # experts scored elsewhere
SOURCES = {
    "ViT-S/14, real images": "vit_s-8",
    "MiniLM, real texts": "minilm-8",
    "MPNet, real texts": "mpnet-8",
    "small CLIP, synthetic images": "clip_b32-8",
    "small T5, synthetic texts": "flan_t5_base-glue",
    "small Llama, synthetic texts": "llama_3b-mergebench",
}
MERGERS = {
    "averaging": "average",
    "task arithmetic": "task_arithmetic",
    "TSV-Merge": "tsv_merge",
    "WUDI, closed form": "wudi_closed_form",
    "Iso-C": "iso_c",
}


def expected_row(source: str, merger: str) -> list[str]:
    """Return the cells of one row, recomputed from the result files."""
    place, name = SOURCES[source], MERGERS[merger]
    alone = ALONE.get(place, f"scores/{place}/scores.csv")
    scores = pd.read_csv(RESULTS / alone, keep_default_na=False)
    study = pd.read_csv(RESULTS / f"default/{place}/default.csv", keep_default_na=False)
    study = study[(study.upstream == name) & (study.samples == 32)]
    means = study.groupby(["method", "setting"]).value.mean()
    adapter = max(means["surgery", ""], means["prob_surgery", ""])
    values = [means["merged", ""], means["featcal", "paper"], means["featcal", "auto"], adapter]
    experts = scores[scores.method.isin(("base", "expert"))]  # of Llama the highest in each test
    expert = experts.groupby("task").value.max().mean()
    return [f"{source} ({expert:.1f})", merger, *(f"{value:.1f}" for value in values)]


def rows_of_the_table() -> list[list[str]]:
    table = README.split("<!-- results -->\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_every_number_of_the_table_is_in_the_results():
    expected = [expected_row(row[0].rpartition(" (")[0], row[1]) for row in rows_of_the_table()]
    assert rows_of_the_table() == expected, "\n".join(f"| {' | '.join(row)} |" for row in expected)


def test_the_numbers_of_the_language_model_are_in_the_results():
    scores = pd.read_csv(RESULTS / "scores/smollm2-chat/scores.csv", keep_default_na=False)
    experts = scores[(scores.method == "expert") & (scores.setting == "")]
    own = {task for task in experts.task if "-greedy" not in task}
    means = scores[scores.task.isin(own)].groupby(["upstream", "method", "setting"]).value.mean()
    start = "task_arithmetic"
    keys = [(start, "merged", ""), (start, "featcal", "paper"), (start, "featcal", "paper_8b")]
    default = pd.read_csv(RESULTS / "default/smollm2-chat/default.csv", keep_default_na=False)
    rows = default[(default.upstream == start) & (default.setting == "auto")]
    sentence = README[README.index("A language model, ") :].split("(")[0]
    told = re.findall(r"\d+\.\d", sentence)
    numbers = [*(means[key] for key in keys), rows.value.mean(), means["", "expert", ""]]
    assert told == [f"{one:.1f}" for one in numbers]


@pytest.fixture
def project(models) -> Path:
    """The folders that the README names: models/ and images/, with twelve pictures per task."""
    for file in [*models.glob("images/*/test/*/000.png")]:
        shutil.copy(file, file.parents[2] / "train" / file.parent.name / "more.png")
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
    exec(python.replace("samples=256", "samples=8"), names)  # four of twelve are held out
    assert same(names["result"].model, load_vision("models/merged-calibrated"))
