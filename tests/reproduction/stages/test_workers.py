"""Jobs in worker processes: results, errors and Ctrl-C arrive as they would without them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from featcal.errors import Diverged, FeatCalError
from reproduction.engine.workers import fan_out

ROOT = Path(__file__).parents[3]


def doubled(number: int) -> int:
    return 2 * number


def threads() -> int:
    import torch

    return torch.get_num_threads()


def diverged(task: str) -> None:
    raise Diverged(task, 3, "lr", 0.1, "NaN")


@pytest.mark.parametrize("workers", [0, 2])
def test_every_job_gives_its_result_under_its_name(workers):
    jobs = {str(n): (n,) for n in range(5)}
    assert dict(fan_out("double", doubled, jobs, workers)) == {str(n): 2 * n for n in range(5)}


@pytest.mark.parametrize(("workers", "fresh"), [(0, False), (1, False), (1, True)])
def test_a_mistake_found_in_a_worker_keeps_its_message(workers, fresh):
    with pytest.raises(FeatCalError) as raised:
        dict(fan_out("train", diverged, {"mnist": ("mnist",)}, workers, fresh=fresh))
    assert str(raised.value) == str(Diverged("mnist", 3, "lr", 0.1, "NaN"))


SLEEPERS = """
import sys
sys.path.insert(0, {tests!r})
from test_workers import asleep
from reproduction.engine.workers import fan_out
if __name__ == "__main__":
    dict(fan_out("sleep", asleep, {{str(n): ({folder!r}, n) for n in range(4)}}, 2))
"""


def asleep(folder: str, number: int) -> None:
    Path(folder, f"{number}-{os.getpid()}").touch()
    time.sleep(60)


def test_ctrl_c_ends_the_workers_and_starts_no_further_job(tmp_path):
    script = tmp_path / "sleepers.py"
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    script.write_text(SLEEPERS.format(tests=str(Path(__file__).parent), folder=str(jobs)))
    options: dict = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "stderr": subprocess.PIPE}
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, str(script)]
    running = subprocess.Popen(command, text=True, start_new_session=True, **options)
    deadline = time.monotonic() + 300
    while len(list(jobs.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)
    errors = running.communicate(timeout=20)[1]
    started = [int(job.name.split("-")[1]) for job in jobs.iterdir()]
    assert len(started) == 2 and "KeyboardInterrupt" in errors and "leaked" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def process_and_threads(_):
    return os.getpid(), threads()


def killed():
    os._exit(9)


def test_every_fresh_job_has_a_process_of_its_own_with_its_threads_and_others_have_one_thread():
    jobs = {f"job {i}": (i,) for i in range(3)}
    results = dict(fan_out("test", process_and_threads, jobs, 2, threads=2, fresh=True))
    assert len({process for process, _ in results.values()} | {os.getpid()}) == 4
    assert {threads for _, threads in results.values()} == {2}
    assert dict(fan_out("threads", threads, {"one": ()}, 1)) == {"one": 1}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_process_that_dies_ends_the_jobs_with_a_way_out(fresh):
    with pytest.raises(FeatCalError, match="(?s)its processes ended .*short of memory"):
        dict(fan_out("test", killed, {"job": ()}, 1, fresh=fresh))
