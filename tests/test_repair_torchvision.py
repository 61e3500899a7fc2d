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


def torchvision(site, code):
    (site / "torchvision").mkdir()
    (site / "torchvision" / "__init__.py").write_text(code)
    (site / "torchvision" / "operators.py").write_text("")


def python(site, *words):
    """Run the environment's Python; a PYTHONPATH would show it another torch."""
    command = [site.parents[2] / "bin" / "python", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def repaired(site):
    """The files that the script leaves behind, after two runs of it."""
    for _ in range(2):
        done = python(site, SCRIPT)
        assert done.returncode == 0, done.stderr
    return sorted(path.name for path in site.glob("*torchvision_*"))


def test_missing_operators_are_declared_on_the_first_import(environment):
    torchvision(environment, NEEDS_OPERATORS)
    assert "does not exist" in python(environment, "-c", "import torchvision").stderr
    assert repaired(environment) == ["_torchvision_operators.pth", "_torchvision_operators.py"]
    code = "import sys; assert 'torch' not in sys.modules; import torchvision, torch; print(torch.library.Library.declared)"
    done = python(environment, "-c", code)
    assert (done.stdout, done.stderr) == ("['nms', 'qnms']\n", "")


@pytest.mark.parametrize("code", ["import torch", "raise RuntimeError('another fault')", None])
def test_a_torchvision_that_loads_fails_otherwise_or_is_missing_is_left_alone(environment, code):
    if code:
        torchvision(environment, code)
    assert repaired(environment) == []
    found = python(environment, "-c", "import torchvision").stderr
    assert ("another fault" in found, "No module" in found) == ("another" in (code or ""), not code)
