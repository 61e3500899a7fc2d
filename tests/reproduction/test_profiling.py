"""The profiler finds memory of a known amount, also in a child process, and integrates power."""

import mmap
import subprocess
import sys
import time

import pytest
import torch

from reproduction import profiling
from reproduction.profiling import energy, profiled

SIZE = 120 * profiling.MIB
TOUCH = f"import time; held = bytearray({SIZE}); held[::4096] = b'x' * len(held[::4096]); time.sleep(0.8)"


def touched(size):
    """Return memory that is new to the process, with one byte of every page written."""
    memory = mmap.mmap(-1, size)
    memory[::4096] = b"x" * len(memory[::4096])
    return memory


def test_an_allocation_is_found_although_it_is_gone_before_anybody_looked(monkeypatch):
    monkeypatch.setattr(profiling, "INTERVAL", 60)
    value, cost = profiled(lambda: len(touched(SIZE)))
    assert value == SIZE and 119 <= cost.memory_mib <= 130 and cost.energy_wh is None


def test_what_was_held_before_does_not_count():
    memory = touched(SIZE)
    _, cost = profiled(lambda: None)
    assert cost.memory_mib < 5 and len(memory) == SIZE


def test_memory_of_a_child_counts():
    _, cost = profiled(lambda: subprocess.run([sys.executable, "-c", TOUCH], check=True))
    assert 119 <= cost.memory_mib <= 160


def test_energy_is_the_power_of_torchs_first_gpu_over_time(monkeypatch):
    gpus = []
    monkeypatch.setattr(torch.cuda, "power_draw", lambda gpu: gpus.append(gpu) or 360_000)
    monkeypatch.setattr(profiling, "INTERVAL", 0.02)
    _, cost = profiled(lambda: time.sleep(0.5), gpu=True)
    assert 0.5 <= cost.seconds < 2 and set(gpus) == {0}
    assert cost.energy_wh == pytest.approx(360 * cost.seconds / 3600, rel=0.15)


def test_trapezoids_are_exact_for_a_power_that_rises_evenly():
    rising = [(t, 100 * t) for t in (0.0, 1.0, 4.0, 36.0)]
    assert energy(rising) == pytest.approx(100 * 36**2 / 2 / 3600, abs=1e-4)
    assert energy([]) is None and energy([(0.0, 1.0)]) is None


def test_without_a_meter_energy_is_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "power_draw", lambda gpu: 1 / 0)
    assert profiled(lambda: None, gpu=True)[1].energy_wh is None
