"""What commands say about threads before torch is imported."""

import os

import pytest

from featcal.cli import threads


@pytest.mark.parametrize(("told", "count"), [("150000 100000", "2"), ("max 100000", None), (None, None)])
def test_waiting_threads_sleep_and_a_containers_share_bounds_their_number(told, count, tmp_path, monkeypatch):
    if told:
        (tmp_path / "cpu.max").write_text(told + "\n")
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    threads.share_machine()
    assert os.environ.get("OMP_NUM_THREADS") == count
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE" and os.environ["KMP_BLOCKTIME"] == "0"
