"""What a run was planned to need, against what a process that does nothing else really took:
memory, disk, operations.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
from processes import run_program

from featcal.settings import PRESETS

SCRIPT = Path(__file__).parents[1] / "memory_of_a_run.py"
SIZES = ("--width", "512", "--blocks", "2", "--tasks", "2", "--samples", "6", "--batch", "3")
BEST = PRESETS["best"]
MORE = {"prior": 0.1, "residual": 1.0}
GIVEN = {"in memory": [], "on disk": ["--host-memory", "0"], "best": ["--settings", json.dumps(BEST)],
         "prior": ["--settings", json.dumps(MORE)]}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the first run writes the models of all."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("given", GIVEN)
def test_memory_and_disk_of_a_real_run_are_within_25_percent_of_the_plan(folder, given, tmp_path):
    done = run_program([sys.executable, SCRIPT, folder, *SIZES, *GIVEN[given]], tmp_path / "told")
    shutil.rmtree(folder / "run")
    told = json.loads(done.stdout.splitlines()[-1])["planned, took"]
    assert told["flops"][0] == pytest.approx(told["flops"][1], rel=0.02)
    assert told["host"][0] == pytest.approx(told["host"][1], rel=0.25)
    assert told["disk"][0] == pytest.approx(told["disk"][1], rel=0.25)
