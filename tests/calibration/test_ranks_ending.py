"""What ends one of several processes ends all of them, with one message; and torchrun's command."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial

import pytest
import tiny
import torch
from processes import environment, free_port, run, together
from safetensors.torch import load_file
from test_cli import CALIBRATE, models, ready, tree  # noqa: F401 - two fixtures
from test_ranks import OUT, QK, assert_same_records, clip

from featcal import calibrate
from featcal.calibration import ranks as torchrun
from featcal.calibration.observe import Systems
from featcal.calibration.ranks import current, process_group
from featcal.cli import main as cli
from featcal.core.moments import every_token
from featcal.core.ridge import RidgeSystem
from featcal.errors import BadBatches, BadSetting, RankLostError, RemoteRankError


def differing(ranks, folder):
    ranks.summed(Systems({(QK, OUT)[ranks.rank]: [RidgeSystem.zero(3, 2)]}, {}))


def failing(rank, error, ranks, folder):
    """One process fails: the second before a meeting, the first after it, at the end."""
    with ranks.fail_together():
        if ranks.rank == rank == 1:
            raise error
        ranks.together()
        if ranks.rank == rank:
            raise error


OURS = RuntimeError("a fault of ours")
MISTAKES = {
    "between meetings": (partial(failing, 1, BadBatches("mnist", "is empty")), 3, 1, "mnist"),
    "at the end": (partial(failing, 0, BadBatches("dtd", "is empty")), 2, 0, "dtd"),
    "of ours": (partial(failing, 1, OURS), 2, 1, "a fault of ours"),
    "by all": (differing, 2, 0, "share inputs differently"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_one_process_reports_an_error_and_all_end(case, tmp_path):
    work, world, teller, text = MISTAKES[case]
    ends = together(work, world, tmp_path)
    assert all(text in end["text"] for end in ends)
    assert [rank for rank, end in enumerate(ends) if end["error"] != "RemoteRankError"] == [teller]


def killed(ranks, folder):
    """The second process is killed while its first task is observed in the last block."""

    def rule(name, last, w):
        if last and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return every_token(name, last, w)

    calibrate(**clip(), settings=tiny.PAPER, token_weights=rule)


def test_killed_process_ends_the_others_with_a_message(tmp_path):
    start = time.monotonic()
    first, second = together(killed, 2, tmp_path)
    assert time.monotonic() - start < 30
    assert first["error"] == "RankLostError" and second == {}
    assert "ended before its time" in first["text"]


def reporting_late(work, rank, world, port, folder):
    """The second process takes its time to tell what went wrong; the other looks whether it has."""
    os.environ.update(environment(rank, world, port))
    try:
        with process_group():
            work(current(), folder)
    except RemoteRankError:
        os._exit(0 if (folder / "reported").exists() else 1)
    except RuntimeError:
        time.sleep(0.5)
        (folder / "reported").touch()
        os._exit(0)


def test_no_process_ends_before_the_failed_one_has_reported(tmp_path):
    assert run(reporting_late, partial(failing, 1, OURS), 2, tmp_path) == [0, 0]


def test_missing_process_times_out(monkeypatch):
    for name, value in environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "TRANSFER_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(RankLostError), process_group():
        pass


def command(arguments, rank, world, port, folder):
    """The command line in one process, what it prints in a file."""
    os.environ.update(environment(rank, world, port))
    os.chdir(folder)
    with (folder / f"{rank}.txt").open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        sys.stdout = sys.stderr = printed
        code = cli.main(arguments)
    os._exit(code)


def test_command_line_error_is_printed_once_and_all_exit_with_2(models):  # noqa: F811
    for picture in (models / "images/mnist/train").rglob("*.png"):
        picture.write_bytes(b"no picture")  # of the second task, which the second process reads
    assert run(command, CALIBRATE, 2, models) == [cli.MISTAKE] * 2
    printed = [(models / f"{rank}.txt").read_text() for rank in range(2)]
    begins = re.findall(r"^featcal(?: \(process 1\))?:", printed[1], re.MULTILINE)
    assert printed[0] == "" and len(begins) == 1 and "images/mnist" in printed[1]
    assert not (models / "new").exists()


def test_torchrun_writes_the_folder_of_one_process(models, capsys):  # noqa: F811
    """Two processes of torchrun's, as a user starts them."""
    program = "-m torch.distributed.run --standalone --nproc-per-node 2 -m featcal".split()
    command, how = [sys.executable, *program, *CALIBRATE], {"timeout": 240, "check": False}
    done = subprocess.run(command, cwd=models, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("calibrated model: new") == 1 and done.stderr.count("vision.01") == 1
    assert cli.main([*CALIBRATE[:-1], "alone"]) == 0
    assert tree(models / "new").keys() == tree(models / "alone").keys()
    folders = models / "new", models / "alone"
    several, one = (load_file(folder / "model.safetensors") for folder in folders)
    for name in one:  # float32 models
        torch.testing.assert_close(several[name], one[name], rtol=0, atol=1e-6)
    first, second = (json.loads((folder / "featcal.json").read_text()) for folder in folders)
    assert first["settings"] == second["settings"]
    assert_same_records(first["blocks"], second["blocks"])


def test_incomplete_torchrun_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BadSetting, match="RANK.*torchrun"), process_group():
        pass
