"""`pip install .` installs the library alone, which works without the reproduction's needs."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NOT_NEEDED = ("dvc", "papermill", "matplotlib", "scipy", "sklearn", "reproduction")
CALIBRATES = f"""
import logging, os, signal, sys, warnings
from importlib.util import find_spec

sys.path.insert(0, sys.argv[1])
there = [name for name in {(*NOT_NEEDED, "pandas")} if find_spec(name)]
assert not there, there

def python_state():
    lists = sys.meta_path, sys.path_hooks, warnings.filters, logging.root.handlers
    return [*map(list, lists), dict(os.environ), signal.getsignal(2)]

def torch_state():
    products = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    kept = torch.get_num_threads, torch.get_default_dtype, torch.is_grad_enabled, torch.initial_seed
    return [*products, *(ask() for ask in kept), torch.are_deterministic_algorithms_enabled()]

before = python_state()
import featcal
assert python_state() == before
assert not {{"torch", "torchvision", "transformers", "numpy"}} & sys.modules.keys()
assert featcal.__file__.startswith(sys.argv[1]), featcal.__file__

import torch
torch.manual_seed(7)
before = torch_state()
featcal.merge, featcal.calibrate, featcal.surgery
assert torch_state() == before

from transformers import CLIPVisionConfig, CLIPVisionModel

sizes = dict(hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2)
config = CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
base, *others = (CLIPVisionModel(config).eval() for _ in range(3))
experts = dict(zip("ab", others))
merged = featcal.merge("average", base, experts)
batches = {{task: [{{"pixel_values": torch.randn(4, 3, 8, 8)}}] for task in experts}}
settings = featcal.Calibration(ridge=1e-3, anchor_blend=2.0, interpolation=0.3)
result = featcal.calibrate(merged, base=base, experts=experts, batches=batches, settings=settings)
assert [0 < block.relative_drift < 2 for block in result.blocks] == [True, True], result.blocks
before, after = merged.state_dict(), result.model.state_dict()
assert any(not torch.equal(before[name], after[name]) for name in before)
print("calibrated")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the sources, built by what is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    for package in ("featcal", "reproduction"):
        computed = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / package, folder / package, ignore=computed)
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    how = {"cwd": folder, "capture_output": True, "text": True}
    how["env"] = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], **how)
    assert done.returncode == 0, done.stderr
    return folder / "dist" / done.stdout.split()[-1]


def test_the_wheel_holds_the_library_and_no_models(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "featcal").rglob("*.py")}
    assert names == {*sources, "featcal/card_template.md"} and wheel.stat().st_size < 2**20


def needed() -> dict[str, Distribution]:
    """What `pip install .` brings without extras, by name, as it is installed here."""
    found: dict[str, Distribution] = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = [Requirement(line) for line in project["dependencies"]]
    while asked:
        one = asked.pop()
        name = canonicalize_name(one.name)
        if name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found[name] = distribution(one.name)
            asked += [Requirement(line) for line in found[name].requires or ()]
    return found


def test_with_the_wheel_alone_two_modules_are_merged_and_calibrated(wheel, tmp_path):
    """Next to the wheel are its own dependencies, except pandas, which only `datasets` needs."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for name, one in needed().items():
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if name != "pandas" and not (site / top).exists():
                (site / top).symlink_to(one.locate_file(top))
    command = [sys.executable, "-I", "-S", "-c", CALIBRATES, str(site)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "calibrated\n"), done.stderr
