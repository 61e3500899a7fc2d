"""Several processes give the weights of one, the same bits on all, and end together."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import families
import pytest
import tiny
import torch
from processes import environment, free_port, run, start_server, together
from safetensors.torch import load_file, save_file
from test_cli import CALIBRATE, models, ready, tree  # noqa: F401 - two fixtures
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from featcal import calibrate
from featcal.calibration import choose
from featcal.calibration import ranks as torchrun
from featcal.calibration.observe import Systems
from featcal.calibration.ranks import Ranks, current, process_group
from featcal.calibration.scratch import RunFolder
from featcal.cli import main as cli
from featcal.core.moments import every_token
from featcal.core.ridge import RidgeSystem
from featcal.errors import BadBatches, BadSetting, RankLostError, RemoteRankError

BEYOND = tiny.PAPER.but(order="sites", residual=1.0, affine="joint")
EXPERIMENTS = {
    "clip": tiny.experiment,
    "t5": lambda: families.experiment(families.FAMILIES["t5"], experts=("a", "b")),
    "beyond": lambda: tiny.experiment(count=20) | {"settings": BEYOND},
    "auto": lambda: tiny.experiment(count=32, batch=8) | {"settings": "auto"},
    "overflow": lambda: tiny.experiment(count=32, batch=8) | {"settings": "auto"},
}


def calibrated(given, name):
    """Tensors and records; T5's norms compute in float64 throughout."""
    with pytest.MonkeyPatch.context() as patch:
        families.without_float32(patch, given["base"])
        few = {"paper": tiny.PAPER, "stream": choose.STREAM.but(anchor_blend=2.0)}
        few |= {"far": tiny.PAPER.but(anchor_blend=1e300)} if name == "overflow" else {}
        patch.setattr(choose, "CANDIDATES", few)
        result = calibrate(**{"settings": tiny.PAPER} | given)
    assert result.blocks
    tensors = {name: tensor.detach().clone() for name, tensor in result.model.named_parameters()}
    return tensors, [asdict(block) for block in result.blocks]


def untouched():
    raise AssertionError("batches of another process's task were read")
    yield


def calibrate_own(name, ranks, folder):
    """Calibrate with the models and batches of this process's tasks; write the tensors to a file."""
    given = EXPERIMENTS[name]()
    for task in set(given["experts"]) - set(ranks.mine(given["experts"])):
        given["experts"][task], given["batches"][task] = Path("is not there"), untouched()
    tensors, blocks = calibrated(given, name)
    save_file(tensors, folder / f"{ranks.rank}.safetensors")
    return blocks


def assert_same_records(records, expected):
    """Equal but for the last of the digits that are kept, which the order of sums may change."""
    for block, other in zip(records, expected, strict=True):
        near = {k: v if k == "name" else pytest.approx(v, rel=1e-5) for k, v in other.items()}
        assert block == near


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_several_processes_agree_bit_by_bit_and_with_one_process(name, tmp_path):
    world = 3 if name == "clip" else 2
    ends = together(partial(calibrate_own, name), world, tmp_path)
    assert all("result" in end and end == ends[0] for end in ends), ends
    first, *others = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(world))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    tensors, blocks = calibrated(EXPERIMENTS[name](), name)
    torch.testing.assert_close(tensors, first, rtol=0, atol=1e-12)
    assert_same_records(ends[0]["result"], blocks)


def test_tasks_are_dealt_in_sorted_order_to_no_more_processes_than_there_are():
    ranks, dealt = Ranks(), []
    ranks.world = 3
    for ranks.rank in range(3):
        dealt.append(ranks.mine(["svhn", "dtd", "mnist", "gtsrb", "stl10"]))
    assert dealt == [["dtd", "stl10"], ["gtsrb", "svhn"], ["mnist"]]
    with pytest.raises(BadSetting, match="3 .* at most 2, the number of tasks"):
        ranks.mine({"mnist", "dtd"})


def written_by_two(stop, name, ranks, folder):
    """Calibrate into a folder; with `stop` the first process dies after its first solved block."""
    if stop and ranks.first:
        keep = RunFolder.keep

        def keep_and_die(self, *solved):
            keep(self, *solved)
            os._exit(9)

        RunFolder.keep = keep_and_die
    lines = []
    calibrate(**tiny.experiment(), settings=tiny.PAPER, out=folder / name, progress=lines.append)
    return lines


def test_several_processes_resume_after_one_was_killed_with_the_same_bytes(tmp_path):
    together(partial(written_by_two, False, "whole"), 2, tmp_path)
    _, second = together(partial(written_by_two, True, "out"), 2, tmp_path)
    assert second["error"] == "RankLostError" and not (tmp_path / "out").exists()
    for file in tmp_path.glob("*.json"):
        file.unlink()
    first, second = together(partial(written_by_two, False, "out"), 2, tmp_path)
    assert ["solved before" in line for line in first["result"]] == [True, False]
    assert second["result"] == [] and not list(tmp_path.glob(".*"))
    assert tree(tmp_path / "whole") == tree(tmp_path / "out")


def differing(ranks, folder):
    ranks.summed(Systems({("q_proj", "k_proj")[ranks.rank :]: [RidgeSystem.zero(3, 2)]}, {}))


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

    calibrate(**tiny.experiment(), settings=tiny.PAPER, token_weights=rule)


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


def printing(arguments, folder):
    """Return the exit code of the command line in one process, what it prints in a file."""
    os.chdir(folder)
    with (folder / f"{os.environ['RANK']}.txt").open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        sys.stdout = sys.stderr = printed
        return cli.main(arguments)


def command(arguments, rank, world, port, folder):
    os.environ.update(environment(rank, world, port))
    os._exit(printing(arguments, folder))


def test_command_line_error_is_printed_once_and_all_exit_with_2(models):  # noqa: F811
    for picture in (models / "images/mnist/train").rglob("*.png"):
        picture.write_bytes(b"no picture")  # of the second task, which the second process reads
    assert run(command, CALIBRATE, 2, models) == [cli.MISTAKE] * 2
    printed = [(models / f"{rank}.txt").read_text() for rank in range(2)]
    begins = re.findall(r"^featcal(?: \(process 1\))?:", printed[1], re.MULTILINE)
    assert printed[0] == "" and len(begins) == 1 and "images/mnist" in printed[1]
    assert not (models / "new").exists()


def slow_to_write(arguments, folder):
    """The other process reads a solved block after the first has written it."""

    def late(self, *solved, keep=RunFolder.keep):
        time.sleep(0.3)
        keep(self, *solved)

    if os.environ["RANK"] == "0":
        RunFolder.keep = late
    assert printing(arguments, folder) == 0  # with an error the other waits for this one's end


def test_torchrun_writes_the_folder_of_one_process(models):  # noqa: F811
    """Two processes of torch's launcher, in the environment that it makes for them."""
    start_server()
    how = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0}
    launched = LaunchConfig(1, 1, 2, start_method="forkserver", **how)
    elastic_launch(launched, slow_to_write)(CALIBRATE, models)
    first, second = ((models / f"{rank}.txt").read_text() for rank in range(2))
    assert first.count("calibrated model: new") == first.count("vision.01  2 tasks") == 1
    assert second == ""
    assert cli.main([*CALIBRATE[:-1], "alone"]) == 0
    assert tree(models / "new").keys() == tree(models / "alone").keys()
    folders = models / "new", models / "alone"
    several, one = (load_file(folder / "model.safetensors") for folder in folders)
    torch.testing.assert_close(several, one, rtol=0, atol=1e-6)  # float32 models
    first, second = (json.loads((folder / "featcal.json").read_text()) for folder in folders)
    assert first["settings"] == second["settings"]
    assert_same_records(first["blocks"], second["blocks"])


def test_incomplete_torchrun_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BadSetting, match="RANK.*torchrun"), process_group():
        pass
