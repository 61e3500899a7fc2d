"""Jobs in processes of their own: at most `n_jobs` at a time; failures name their job."""

import os
import time

import pytest
import torch

from featcal.errors import BadSetting, FeatCalError
from reproduction.engine.workers import alone


def where(_):
    return os.getpid(), torch.get_num_threads()


def span(_):
    start = time.time()
    time.sleep(0.2)
    return start, time.time()


def refused():
    raise BadSetting("samples", 0, "must be more")


def killed():
    os._exit(9)


def jobs(count):
    return {f"job {i}": (i,) for i in range(count)}


def test_every_job_has_a_process_of_its_own_with_its_threads():
    found = dict(alone("test", where, jobs(3), 2, 1))
    assert len({process for process, _ in found.values()} | {os.getpid()}) == 4
    assert {threads for _, threads in found.values()} == {1}


def test_one_at_a_time_is_one_at_a_time_and_in_order():
    spans = list(dict(alone("test", span, jobs(3), 1, 1)).values())
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))


def test_what_a_job_raises_is_raised():
    with pytest.raises(FeatCalError, match="must be more"):
        dict(alone("test", refused, {"job": ()}, 1, 1))


def test_a_process_that_dies_is_named():
    with pytest.raises(FeatCalError, match=r"job: its process ended .* \(exit code 9\)"):
        dict(alone("test", killed, {"job": ()}, 1, 1))
