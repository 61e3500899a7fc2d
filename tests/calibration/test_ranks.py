"""Several processes give the numbers of one, and the same bits on all of them."""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

import families
import pytest
import tiny
import torch
from processes import together
from safetensors.torch import load_file, save_file

from featcal import calibrate
from featcal.calibration import choose
from featcal.calibration.observe import Systems
from featcal.calibration.ranks import Ranks, owners
from featcal.calibration.resume import RunFolder
from featcal.core.ridge import RidgeSystem, Solution
from featcal.errors import BadSetting

QK, OUT = ("q_proj", "k_proj"), ("out_proj",)


def clip():
    return tiny.experiment()


def t5():
    return families.experiment(families.FAMILIES["t5"], experts=("a", "b"))


def beyond():
    settings = tiny.PAPER.but(order="sites", residual=1.0, affine="joint")
    return tiny.experiment(count=20) | {"settings": settings}


def auto():
    return tiny.experiment(count=32, batch=8) | {"settings": "auto"}


def calibrated(given):
    """Tensors and records; T5's norms compute in float64 throughout."""
    with pytest.MonkeyPatch.context() as patch:
        families.without_float32(patch, given["base"])
        few = {"paper": tiny.PAPER, "stream": choose.STREAM.but(anchor_blend=2.0)}
        patch.setattr(choose, "CANDIDATES", few)
        result = calibrate(**{"settings": tiny.PAPER} | given)
    assert result.blocks
    tensors = {name: tensor.detach().clone() for name, tensor in result.model.named_parameters()}
    return tensors, [asdict(block) for block in result.blocks]


def untouched():
    raise AssertionError("batches of another process's task were read")
    yield


def calibrate_own(build, ranks, folder):
    """Calibrate with the models and batches of this process's tasks; write the tensors to a file."""
    given = build()
    for task in set(given["experts"]) - set(ranks.mine(given["experts"])):
        given["experts"][task], given["batches"][task] = Path("is not there"), untouched()
    tensors, blocks = calibrated(given)
    save_file(tensors, folder / f"{ranks.rank}.safetensors")
    return blocks


def assert_same_records(records, expected):
    """Equal but for the last of the digits that are kept, which the order of sums may change."""
    for block, other in zip(records, expected, strict=True):
        assert block == {
            key: v if isinstance(v, str) else pytest.approx(v, rel=1e-5) for key, v in other.items()
        }


@pytest.mark.parametrize(("build", "world"), [(clip, 3), (t5, 2), (beyond, 2), (auto, 2)])
def test_several_processes_agree_bit_by_bit_and_with_one_process(build, world, tmp_path):
    ends = together(partial(calibrate_own, build), world, tmp_path)
    assert all("result" in end and end == ends[0] for end in ends), ends
    first, *others = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(world))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    tensors, blocks = calibrated(build())
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, first[name], rtol=0, atol=1e-12)
    assert_same_records(ends[0]["result"], blocks)


def test_tasks_are_dealt_in_sorted_order_to_no_more_processes_than_there_are():
    ranks, dealt = Ranks(), []
    ranks.world = 3
    for ranks.rank in range(3):
        dealt.append(ranks.mine(["svhn", "dtd", "mnist", "gtsrb", "stl10"]))
    assert dealt == [["dtd", "stl10"], ["gtsrb", "svhn"], ["mnist"]]
    with pytest.raises(BadSetting, match="3 .* at most 2, the number of tasks"):
        ranks.mine({"mnist", "dtd"})


def test_owners_balance_the_load_whatever_the_order():
    widths = {("q",): 768, ("v",): 768, ("out",): 768, ("fc1",): 768, ("fc2",): 3072}
    table = owners(widths, 2)
    assert table == owners(dict(reversed(widths.items())), 2) and table.keys() == widths.keys()
    assert [site for site, owner in table.items() if owner == table["fc2",]] == [("fc2",)]
    equal = owners({(str(n),): 64 for n in range(8)}, 4)
    assert sorted(equal.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def summed_and_shared(ranks, folder):
    """What arrives of column-major tensors: sums, and solutions of one site each."""
    mine = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T + ranks.rank  # (3, 2)
    rest = mine[:, 0].clone(), mine[0].clone(), mine[0, 0].clone()
    system = RidgeSystem(torch.eye(3, dtype=torch.float64), mine.clone(), *rest)
    norm = torch.stack([*(mine[:, 0] * (i + 1) for i in range(4)), torch.ones(3).double()])
    systems = ranks.summed(Systems({QK: [system]}, {"norm": [norm]}))
    sums = {"+".join(site): one.right.tolist() for site, [one] in systems.sites.items()}
    [norm] = systems.norms["norm"]
    solved = ranks.shared({(QK, OUT)[ranks.rank]: Solution(mine, mine[:, 1], 2.0 + ranks.rank)})
    shared = {
        "+".join(s): [r.weight.tolist(), r.bias.tolist(), r.conditioning] for s, r in solved.items()
    }
    return [sums, [norm[3].tolist(), norm[4, 0].item()], shared]


def test_column_major_tensors_arrive_as_they_are(tmp_path):
    first, second = (end["result"] for end in together(summed_and_shared, 2, tmp_path))
    weight = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    plus = [[x + 1 for x in row] for row in weight]
    total = torch.tensor(weight) + torch.tensor(plus)
    assert first[0] == {"q_proj+k_proj": total.tolist()}
    assert second[0] == {}  # the site belongs to the first
    assert first[1] == second[1] == [[4.0, 12.0, 20.0], 2.0]
    shared = {"out_proj": [plus, [4.0, 5.0, 6.0], 3.0]}
    shared["q_proj+k_proj"] = [weight, [3.0, 4.0, 5.0], 2.0]
    assert first[2] == second[2] == shared


def written_by_two(stop, name, ranks, folder):
    """Calibrate into a folder; with `stop` the first process dies after its first solved block."""
    if stop and ranks.first:
        keep = RunFolder.keep

        def keep_and_die(self, *solved):
            keep(self, *solved)
            os._exit(9)

        RunFolder.keep = keep_and_die
    lines = []
    calibrate(**clip(), settings=tiny.PAPER, out=folder / name, progress=lines.append)
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
    whole, again = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "out")
    )
    assert whole == again
