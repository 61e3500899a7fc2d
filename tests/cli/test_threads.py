"""What commands say about threads before torch is imported."""

import os
import subprocess
import sys

import pytest

from featcal.cli import start as threads


@pytest.mark.parametrize(
    ("told", "count"), [("150000 100000", "2"), ("max 100000", None), (None, None)]
)
def test_waiting_threads_sleep_and_a_containers_share_bounds_their_number(
    told, count, tmp_path, monkeypatch
):
    if told:
        (tmp_path / "cpu.max").write_text(told + "\n")
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    threads.share_machine()
    assert os.environ.get("OMP_NUM_THREADS") == count
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE" and os.environ["KMP_BLOCKTIME"] == "0"


def test_the_module_shares_the_machine_as_the_program_does():
    code = """
import atexit, os, runpy, sys
atexit.register(lambda: print(os.environ["OMP_WAIT_POLICY"]))
sys.argv[1:] = ["--version"]
runpy.run_module("featcal", run_name="__main__")
"""
    environment = {name: value for name, value in os.environ.items() if name not in threads.WAITING}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.split()[-1]) == (0, "PASSIVE")
