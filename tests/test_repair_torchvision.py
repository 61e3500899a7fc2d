"""`scripts/repair_torchvision.py`, in an environment with a tiny torch and torchvision."""

import os
import subprocess
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "repair_torchvision.py"
TORCH = """
class library:
    class Library:
        declared = []
        def __init__(self, name, kind):
            assert (name, kind) == ("torchvision", "FRAGMENT")
        def define(self, schema):
            self.declared.append(schema.partition("(")[0])
"""
NEEDS_OPERATORS = """
import torch
from . import operators
for name in ("nms", "qnms"):
    if name not in torch.library.Library.declared:
        raise RuntimeError(f"operator torchvision::{name} does not exist")
"""


@pytest.fixture
def environment(tmp_path):
    """An environment with a torch, and the .pth file that earlier versions left there."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "torch.py").write_text(TORCH)
    (site / "featcal_torchvision_mend.pth").write_text("raise SystemExit('an old hook')\n")
    return site


def python(site, *words):
    """Run the environment's Python; a PYTHONPATH would show it another torch."""
    command = [site.parents[2] / "bin" / "python", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize(
    ("code", "before", "left", "after"),
    [
        (NEEDS_OPERATORS, "does not exist", ["_torchvision_operators"], ""),
        ("import torch", "", [], ""),
        ("raise RuntimeError('another fault')", "another fault", [], "another fault"),
        (None, "No module", [], "No module"),
    ],
)
def test_only_a_torchvision_that_lacks_its_operators_is_repaired(
    environment, code, before, left, after
):
    if code:
        (environment / "torchvision").mkdir()
        (environment / "torchvision/__init__.py").write_text(code)
        (environment / "torchvision/operators.py").write_text("")
    load = "import sys; assert 'torch' not in sys.modules; import torchvision"
    assert before in python(environment, "-c", load).stderr
    for _ in range(2):
        done = python(environment, SCRIPT)
        assert done.returncode == 0, done.stderr
    found = {path.stem for path in environment.glob("*torchvision_*")}
    assert sorted(found) == left
    stderr = python(environment, "-c", load).stderr
    assert after in stderr and bool(after) == bool(stderr)
