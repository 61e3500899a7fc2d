"""The edits of the page *Extend it* work in a copy of the package; result files are read as shown."""

import os
import re
import shlex
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


def marked(mark: str) -> str:
    """Return the block of Python below a mark."""
    return re.search(rf"^<!-- {re.escape(mark)} -->\n```python\n(.*?)^```$", PAGE, re.M | re.S)[1]


def copied(folder: Path, *names: str) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.parquet")
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)


@pytest.fixture(scope="module")
def copy_of_featcal(tmp_path_factory) -> Path:
    """A folder with a copy of the package that has the page's merger and family."""
    folder = tmp_path_factory.mktemp("scratch")
    copied(folder, "featcal")
    merger, families = "featcal/merging/methods/median.py", "featcal/models/plan.py"
    (folder / merger).write_text(marked(f"file: {merger}"))
    source, table = (folder / families).read_text(), "\nKNOWN = {\n"
    assert source.count(table) == 1
    entry = marked(f"entry: {families}")
    (folder / families).write_text(source.replace(table, table + entry))
    return folder


def python(package: Path, *arguments: str, cwd: Path) -> str:
    """Return what a fresh interpreter with that copy of the package prints."""
    how = {"cwd": cwd, "env": os.environ | {"PYTHONPATH": str(package)}}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_merger_is_one_file(copy_of_featcal, tmp_path):
    checkpoints.clip_folder(tmp_path / "base")
    for seed, task in enumerate(("mnist", "dtd"), start=1):
        checkpoints.vision_folder(tmp_path / "models" / task, seed)
    command = re.search(r"^featcal (merge median .*)$", PAGE, re.M)[1]
    python(copy_of_featcal, "-m", "featcal", *shlex.split(command), cwd=tmp_path)
    base, one, two, merged = (
        load_vision(tmp_path / name).state_dict()["encoder.layers.0.mlp.fc1.weight"]
        for name in ("base", "models/mnist", "models/dtd", "merged")
    )
    lower = torch.minimum(one, two)  # torch's median of two
    torch.testing.assert_close(merged, (base + lower) / 2)


def test_a_family_is_one_entry(copy_of_featcal, tmp_path):
    """Without the entry the model is refused."""
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 48, "vocab_size": 97}
    with torch.device("meta"), pytest.raises(BadPlan, match="several lists"):
        plan_for(PLBartModel(PLBartConfig(**sizes)))
    printed = python(copy_of_featcal, "-c", marked("run"), cwd=tmp_path)
    names = ["encoder.00", "encoder.01", "decoder.00", "decoder.01"]
    assert printed.splitlines()[-1] == str(names)


def test_a_study_is_one_file_and_its_settings(tmp_path):
    """In a copy of the project: the settings are read, and the models are those of the page."""
    copied(tmp_path, "featcal", "reproduction", "suites", "pipeline")
    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    study, settings = "reproduction/studies/order.py", "pipeline/studies.yaml"
    (tmp_path / study).write_text(marked(f"file: {study}"))
    lines = re.search(rf"<!-- lines: {settings} -->\n```yaml\n(.*?)^```$", PAGE, re.M | re.S)[1]
    with (tmp_path / settings).open("a") as text:
        text.write(lines)
    code = """
from pathlib import Path
from reproduction.experiments import load_experiments
from reproduction.studies import order
study = load_experiments(Path("params.yaml")).studies["order"]["clip_b32-8"]
order.make_and_score = lambda label, setup, models: [
    (model.setting, model.settings.order, model.draw.samples) for model in models
]
print(study.run(None, Path("models")).scores)
"""
    printed = python(tmp_path, "-c", code, cwd=tmp_path)
    assert printed.strip() == "[('forward', 'forward', 256), ('stale', 'stale', 256)]"


def test_every_path_of_the_layout_exists():
    table = PAGE.split("(layout)=")[1]
    cells = " ".join(re.findall(r"^\| (`.+?) \|", table, re.M))
    paths = re.findall(r"`(.+?)`", cells)
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_the_page_on_result_files_reads_them(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "book/reference/results.md").read_text("utf-8")
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(compile(code, "results.md", "exec"), {})
    assert "suite" in capsys.readouterr().out
