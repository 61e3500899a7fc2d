"""The estimate of a calibration, against counters and measurements of real runs."""

import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
import transformers as tf
from families import FAMILIES, GROUPED, experiment
from processes import run_program
from tiny import PAPER
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import featcal
from featcal.calibration.choose import STREAM
from featcal.calibration.estimate import Job, estimate, model_shape
from featcal.cli.plan import meta_batch
from featcal.models.plan import plan_for

SCRIPT = Path(__file__).parents[1] / "memory_of_a_run.py"
D, TOKENS = 32, 5  # of tests.tiny.clip
ATEN = torch.ops.aten
LEFT_OUT = {  # of torch's own counter
    ATEN.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1],
    ATEN.linalg_cholesky_ex: lambda left, *_, **__: left[0] ** 3 // 3,
    ATEN.cholesky_solve: lambda right, left, *_, **__: 2 * left[0] ** 2 * right[1],
    ATEN.linalg_solve_triangular: lambda left, right, **__: right[0] ** 2 * right[1],
    ATEN._grouped_mm: lambda left, right, *_, **__: 2 * left[0] * left[1] * right[-1],
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *qkv, **__: sdpa_flop_count(*qkv[:3]),
}


def real_run(name):
    """Arguments of `featcal.calibrate` with more tokens than any linear has inputs."""
    if name == "clip":
        return tiny.experiment(torch.float32, count=60, batch=12)
    ids = torch.randint(2, 97, (24, 9), generator=tiny.seeded(0)).split(8)
    own = {"decoder_input_ids"} if name == "t5" else set()
    given = experiment(FAMILIES[name], torch.float32)
    batches = [dict.fromkeys({"input_ids", *own}, part) for part in ids]
    return given | {"batches": dict.fromkeys(given["experts"], batches)}


def on_meta(model):
    return type(model)._from_config(model.config).to("meta").eval()


@pytest.mark.parametrize(
    ("name", "settings"),
    [("clip", PAPER), ("clip", STREAM), ("t5", PAPER), ("llama", STREAM), ("bert", "auto")],
    ids=lambda value: value if isinstance(value, str) else str(value.ridge),
)
def test_operations_are_within_20_percent_of_those_that_torch_counts_in_a_run(name, settings):
    given = real_run(name)
    batches = next(iter(given["batches"].values()))
    with FlopCounterMode(display=False, custom_mapping=LEFT_OUT) as counted:
        featcal.calibrate(**given, settings=settings)
    model = on_meta(given["base"])
    first = {key: value.to("meta") for key, value in batches[0].items()}
    size, samples = (sum(len(next(iter(b.values()))) for b in bs) for bs in (batches[:1], batches))
    job = Job(len(given["experts"]), samples, size, settings)
    needs = estimate(model_shape(model, plan_for(model), first, settings), job)
    assert sum(needs["operations"].values()) == pytest.approx(counted.get_total_flops(), rel=0.2)


@pytest.mark.parametrize("more", [[], ["--host-memory", "0"]], ids=["in memory", "on disk"])
def test_memory_and_disk_are_within_25_percent_of_those_of_a_real_run(tmp_path, more):
    sizes = "--width 512 --layers 2 --tasks 2 --samples 24 --batch 6 --root models".split()
    command = [sys.executable, SCRIPT, *sizes, *more]
    done = run_program(command, tmp_path / "printed", tmp_path)
    result = json.loads(done.stdout.splitlines()[-1])
    for what, took in result["took"].items():
        assert result["estimated"][what] == pytest.approx(took, rel=0.25), what


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"host_memory": 1000}, (0, 1000, -1000)),
        ({"device_memory": 1000}, (0, 0, 0)),
        ({"device_memory": 1000, "on_gpu": True}, (1000, -1000, 0)),
        ({"device_memory": 10, "host_memory": 20, "on_gpu": True}, (10, 20, -30)),
    ],
)
def test_features_beyond_a_budget_wait_in_the_next_place(more, expected):
    whole = 2 * 3 * 7 * TOKENS * D * 4
    model = on_meta(tiny.clip(dtype=torch.float32))
    shape = model_shape(model, plan_for(model), meta_batch(model, 3, None, False), PAPER)
    needs = estimate(shape, Job(3, 7, 3, **more))
    waiting = [needs[place].get("waiting features", 0) for place in ("device", "host", "disk")]
    wanted = [whole + size if size < 0 else size for size in expected]
    assert waiting == ([0, whole, 0] if expected == (0, 0, 0) else wanted)
    assert bool(needs["device"]) == more.get("on_gpu", False)


def test_a_mixture_is_estimated_with_all_of_its_experts():
    model = on_meta(tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED, num_local_experts=4)))
    batch = meta_batch(model, 2, 9, True)
    block = model_shape(model, plan_for(model), batch, PAPER.but(norm=False)).blocks[0]
    assert sum(".experts." in s.linears[0] for s in block.sites) == 2 * 4 and block.routed > 0
