"""The edits of the page *Extend it* work in a copy of the package; result files are read as shown."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
import torch
from transformers import PLBartConfig, PLBartModel

from featcal.errors import BadPlan
from featcal.models.load import load_vision
from featcal.models.plan import plan_for

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "book/extend.md").read_text("utf-8")


def marked(mark: str, language: str = "python") -> str:
    """Return the block of code below a mark."""
    block = rf"^<!-- {re.escape(mark)} -->\n```{language}\n(.*?)^```$"
    return re.search(block, PAGE, re.M | re.S)[1]


MERGE = re.search(r"^featcal (merge median .*)$", PAGE, re.M)[1].split()
MERGER, FAMILIES = "featcal/merging/methods/median.py", "featcal/models/plan.py"
STUDY, SETTINGS = "reproduction/studies/order.py", "pipeline/studies.yaml"
USED = f"""
from pathlib import Path
from featcal.cli import main as cli
assert cli.main({MERGE}) == 0
{marked("run")}
from reproduction.experiments import load_experiments
from reproduction.studies import order
study = load_experiments(Path("params.yaml")).studies["order"]["clip_b32-8"]
order.make_and_score = lambda label, setup, models: [
    (model.setting, model.settings.order, model.draw.samples) for model in models
]
print(study.run(None, Path("models")).scores)
"""


@pytest.fixture(scope="module")
def used(tmp_path_factory) -> tuple[Path, list[str]]:
    """Return a copy of the project with the page's edits, and what one interpreter prints there."""
    folder = tmp_path_factory.mktemp("scratch")
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.parquet")
    for name in ("featcal", "reproduction", "suites", "pipeline"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copyfile(ROOT / "params.yaml", folder / "params.yaml")
    for file in (MERGER, STUDY):
        (folder / file).write_text(marked(f"file: {file}"))
    source, table = (folder / FAMILIES).read_text(), "\nKNOWN = {\n"
    assert source.count(table) == 1
    (folder / FAMILIES).write_text(source.replace(table, table + marked(f"entry: {FAMILIES}")))
    with (folder / SETTINGS).open("a") as text:
        text.write(marked(f"lines: {SETTINGS}", "yaml"))
    checkpoints.clip_folder(folder / "base")
    for seed, task in enumerate(("mnist", "dtd"), start=1):
        checkpoints.vision_folder(folder / "models" / task, seed)
    how = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(folder)}}
    done = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.splitlines()


def test_a_merger_is_one_file(used):
    names = "base", "models/mnist", "models/dtd", "merged"
    models = (load_vision(used[0] / name) for name in names)
    base, one, two, merged = (model.encoder.layers[0].mlp.fc1.weight.detach() for model in models)
    lower = torch.minimum(one, two)  # torch's median of two
    torch.testing.assert_close(merged, (base + lower) / 2)


def test_a_family_is_one_entry(used):
    """Without the entry the model is refused."""
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 48, "vocab_size": 97}
    with torch.device("meta"), pytest.raises(BadPlan, match="several lists"):
        plan_for(PLBartModel(PLBartConfig(**sizes)))
    assert used[1][-2] == "['encoder.00', 'encoder.01', 'decoder.00', 'decoder.01']"


def test_a_study_is_one_file_and_its_settings(used):
    assert used[1][-1] == "[('forward', 'forward', 256), ('stale', 'stale', 256)]"


def test_every_path_of_the_layout_exists():
    cells = " ".join(re.findall(r"^\| (`.+?) \|", PAGE.split("(layout)=")[1], re.M))
    paths = re.findall(r"`(.+?)`", cells)
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_the_page_on_result_files_reads_them(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "book/reference/results.md").read_text("utf-8")
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(compile(code, "results.md", "exec"), {})
    assert "suite" in capsys.readouterr().out
