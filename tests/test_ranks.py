"""Several processes: the numbers of one, the same bits on all of them, and one end for all when one of them ends.

They are forked from a server that has loaded what they need, so that each starts at once, and talk over loopback.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import families
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_cli import CALIBRATE, models, ready, tree  # noqa: F401 - two fixtures

from featcal import calibrate, cli
from featcal.calibration.block import Systems
from featcal.calibration.ranks import Ranks, current, owners
from featcal.calibration.torchrun import started
from featcal.core.norm import NormSystem
from featcal.core.ridge import RidgeSystem, Solution
from featcal.core.weighting import every_token
from featcal.errors import BadBatches, BadSetting, TooManyRanks

FORKS = multiprocessing.get_context("forkserver")
QK, OUT = ("q_proj", "k_proj"), ("out_proj",)


@pytest.fixture(scope="module", autouse=True)
def server():
    """Starts what the processes are forked from, with this file and all it imports loaded."""
    FORKS.set_forkserver_preload(["featcal", "test_ranks"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in told.items()}


def member(work, rank, world, port, folder):
    """One process; writes what its work returned or raised."""
    os.environ.update(environment(rank, world, port))
    torch.set_num_threads(1)
    try:
        with started():
            end = {"said": work(current(), folder)}
    except Exception as error:
        end = {"error": type(error).__name__, "text": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(end))


def run(target, work, world, folder) -> list[int]:
    """Exit codes of `world` processes that all ran `target(work, rank, world, port, folder)`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [FORKS.Process(target=target, args=(work, rank, world, port, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging
    return [process.exitcode for process in processes]


def together(work, world, folder) -> list[dict]:
    """What each of `world` processes returned or raised from `work(ranks, folder)`; {} where one was killed."""
    run(member, work, world, folder)
    written = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in written]


def clip():
    return tiny.experiment()


def t5():
    return families.experiment(families.FAMILIES["t5"], experts=("a", "b"))


def calibrated(given):
    """Tensors and records; T5's norms compute in float64 throughout."""
    with pytest.MonkeyPatch.context() as patch:
        families.without_float32(patch, given["base"])
        result = calibrate(**given, settings=tiny.PAPER)
    return dict(result.model.named_parameters()), [asdict(block) for block in result.blocks]


def untouched():
    raise AssertionError("batches of another process's task were read")
    yield


def calibrate_own(build, ranks, folder):
    """Calibrates with the models and batches of this process's tasks alone; the tensors into a file."""
    given = build()
    for task in set(given["experts"]) - set(ranks.mine(given["experts"])):
        given["experts"][task], given["batches"][task] = Path("is not there"), untouched()
    tensors, blocks = calibrated(given)
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, folder / f"{ranks.rank}.safetensors")
    return blocks


def assert_same_records(found, expected):
    """Equal but for the last of the digits that are kept, which another order of sums may turn over."""
    for block, other in zip(found, expected, strict=True):
        assert block == {key: v if isinstance(v, str) else pytest.approx(v, rel=1e-5) for key, v in other.items()}


@pytest.mark.parametrize(("build", "world"), [(clip, 2), (clip, 3), (t5, 2)], ids=["clip on 2", "clip on 3", "t5 on 2"])
def test_several_processes_give_the_numbers_of_one_and_agree_to_the_bit(build, world, tmp_path):
    ends = together(partial(calibrate_own, build), world, tmp_path)
    assert all("said" in end for end in ends), ends
    first, *others = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(world))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    assert all(end == ends[0] for end in ends)
    tensors, blocks = calibrated(build())
    assert max(float((tensor.detach() - first[name]).abs().max()) for name, tensor in tensors.items()) < 1e-12
    assert_same_records(ends[0]["said"], blocks)


def test_tasks_are_dealt_in_the_order_of_names_and_none_is_left_or_taken_twice():
    tasks, dealt = ["svhn", "dtd", "mnist", "gtsrb", "stl10"], []
    for rank in range(3):
        ranks = Ranks()
        ranks.rank, ranks.world = rank, 3
        dealt.append(ranks.mine(tasks))
    assert dealt == [["dtd", "stl10"], ["gtsrb", "svhn"], ["mnist"]]


def test_more_processes_than_tasks_are_refused_with_the_way_to_use_them():
    ranks = Ranks()
    ranks.world = 3
    with pytest.raises(TooManyRanks, match="3 processes for 2 tasks.*\n.*at most 2.*\n.*side by side"):
        ranks.mine({"mnist", "dtd"})


def test_one_process_is_given_back_what_it_hands_in():
    ranks, systems, solutions = current(), Systems({}, {}), {}
    assert type(ranks) is Ranks and ranks.first
    assert ranks.summed(systems) is systems and ranks.shared(solutions) is solutions
    assert list(ranks.gathered({"mnist": 1, "dtd": 2}).items()) == [("dtd", 2), ("mnist", 1)]
    assert ranks.mine({"mnist", "dtd"}) == ["dtd", "mnist"] and ranks.together() is None


def test_every_site_has_one_owner_whatever_the_order_and_the_loads_are_as_even_as_whole_sites_allow():
    widths = {("q",): 768, ("v",): 768, ("out",): 768, ("fc1",): 768, ("fc2",): 3072}
    table = owners(widths, 2)
    assert table == owners(dict(reversed(widths.items())), 2) and table.keys() == widths.keys()
    assert [site for site, owner in table.items() if owner == table["fc2",]] == [("fc2",)]
    equal = owners({(str(n),): 64 for n in range(8)}, 4)
    assert sorted(equal.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def summed_and_shared(ranks, folder):
    """What arrives of column-major tensors: sums, and solutions of one site each."""
    mine = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T + ranks.rank  # (3, 2), column-major
    system = RidgeSystem(torch.eye(3, dtype=torch.float64), mine.clone(), mine[:, 0].clone(), mine[0].clone(), mine[0, 0].clone())
    norm = NormSystem(*(mine[:, 0] * (i + 1) for i in range(4)), 1.0)
    systems = ranks.summed(Systems({QK: system}, {"norm": norm}))
    sums = {"+".join(site): system.right.tolist() for site, system in systems.sites.items()}
    norms = [systems.norms["norm"].right_shift.tolist(), systems.norms["norm"].tasks]
    solved = {(QK, OUT)[ranks.rank]: Solution(mine, mine[:, 1], 2.0 + ranks.rank)}
    shared = {"+".join(s): [r.weight.tolist(), r.bias.tolist(), r.conditioning] for s, r in ranks.shared(solved).items()}
    return [sums, norms, shared]


def test_column_major_tensors_arrive_as_they_are(tmp_path):
    first, second = (end["said"] for end in together(summed_and_shared, 2, tmp_path))
    weight = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    plus = [[x + 1 for x in row] for row in weight]
    assert first[0] == {"q_proj+k_proj": [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(weight, plus, strict=True)]}
    assert second[0] == {}  # the site belongs to the first
    assert first[1] == second[1] == [[4.0, 12.0, 20.0], 2.0]
    assert first[2] == second[2] == {"out_proj": [plus, [4.0, 5.0, 6.0], 3.0], "q_proj+k_proj": [weight, [3.0, 4.0, 5.0], 2.0]}


def differing(ranks, folder):
    ranks.summed(Systems({(QK, OUT)[ranks.rank]: RidgeSystem.zero(3, 2)}, {}))


def failing(error, ranks, folder):
    """The second process fails in the middle of a calibration, the others go on to their next meeting."""
    with ranks.ending_as_one():
        if ranks.rank == 1:
            raise error
        ranks.together()


def failing_at_the_end(error, ranks, folder):
    """The first process fails where it alone has something to do."""
    with ranks.ending_as_one():
        ranks.together()
        if ranks.first:
            raise error


MISTAKES = {
    "between meetings": (partial(failing, BadBatches("mnist", "is empty")), 1, "mnist"),
    "at the end": (partial(failing_at_the_end, BadBatches("dtd", "is empty")), 0, "dtd"),
    "by all": (differing, 0, "share inputs differently"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_by_one_process_and_ends_all(case, tmp_path):
    work, teller, text = MISTAKES[case]
    ends = together(work, 3 if case == "between meetings" else 2, tmp_path)
    assert all(text in end["text"] for end in ends)
    assert [rank for rank, end in enumerate(ends) if end["error"] != "FoundElsewhere"] == [teller]


def killed(ranks, folder):
    """The second process is killed while its first task is observed in the last block."""

    def rule(name, last, w):
        if last and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return every_token(name, last, w)

    calibrate(**clip(), settings=tiny.PAPER, token_weights=rule)


@pytest.mark.parametrize("work", [killed, partial(failing, RuntimeError("a fault of ours"))], ids=["killed", "a traceback"])
def test_a_dead_process_ends_the_others_at_once_and_with_a_message(work, tmp_path):
    start = time.monotonic()
    first, second = together(work, 2, tmp_path)
    assert time.monotonic() - start < 30
    assert first["error"] == "LostRank" and "ended before its time" in first["text"]
    assert second.get("error") != "LostRank"


def command(arguments, rank, world, port, folder):
    """The command line in one process, what it prints in a file."""
    os.environ.update(environment(rank, world, port))
    os.chdir(folder)
    with (folder / f"{rank}.txt").open("w") as told:
        os.dup2(told.fileno(), 1)
        os.dup2(told.fileno(), 2)
        sys.stdout = sys.stderr = told
        code = cli.main(arguments)
    os._exit(code)


def test_a_mistake_on_the_command_line_is_printed_once_and_every_process_exits_with_2(models):  # noqa: F811
    for picture in (models / "images/mnist/train").rglob("*.png"):
        picture.write_bytes(b"no picture")  # of the second task, which the second process reads
    assert run(command, CALIBRATE, 2, models) == [cli.MISTAKE] * 2
    told = [(models / f"{rank}.txt").read_text() for rank in range(2)]
    assert told[0] == "" and told[1].count("featcal:") == 1 and "images/mnist" in told[1]
    assert not (models / "new").exists()


def test_a_mistake_that_all_find_is_printed_by_the_first_alone(models):  # noqa: F811
    assert run(command, [*CALIBRATE, "--device", "tpu"], 3, models) == [cli.MISTAKE] * 3
    told = [(models / f"{rank}.txt").read_text() for rank in range(3)]
    assert told[1:] == ["", ""] and told[0].count("featcal:") == 1 and "tpu" in told[0]


def test_more_processes_than_tasks_are_one_message_on_the_command_line(models):  # noqa: F811
    assert run(command, CALIBRATE, 3, models) == [cli.MISTAKE] * 3
    told = [(models / f"{rank}.txt").read_text() for rank in range(3)]
    assert told[1:] == ["", ""] and "3 processes for 2 tasks" in told[0]


def torchrun(arguments, folder):
    """Two processes of torchrun's, as a user starts them."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_torchrun_writes_the_folder_of_one_process(models, capsys):  # noqa: F811
    done = torchrun(["-m", "featcal.cli", *CALIBRATE], models)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("calibrated model: new") == 1 and done.stderr.count("vision.01") == 1
    assert cli.main([*CALIBRATE[:-1], "alone"]) == 0
    assert tree(models / "new").keys() == tree(models / "alone").keys()
    several, one = (load_file(models / name / "model.safetensors") for name in ("new", "alone"))
    assert max(float((several[name] - one[name]).abs().max()) for name in one) < 1e-6  # float32 models
    first, second = (json.loads((models / name / "featcal.json").read_text()) for name in ("new", "alone"))
    assert first["settings"] == second["settings"]
    assert_same_records(first["blocks"], second["blocks"])


KILLED = """
import os, signal
from featcal.calibration.ranks import current
from featcal.calibration.torchrun import started
with started():
    current().together()
    if not current().first:
        os.kill(os.getpid(), signal.SIGKILL)
    current().together()
"""


def test_a_process_killed_under_torchrun_ends_the_run(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    start = time.monotonic()
    assert torchrun(["killed.py"], tmp_path).returncode != 0
    assert time.monotonic() - start < 60


def test_an_environment_of_several_processes_that_cannot_find_each_other_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BadSetting, match="RANK.*torchrun"), started():
        pass
