"""The estimate of a calibration, against counters and measurements of real runs."""

import json
import os
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import transformers as tf
from families import FAMILIES, GROUPED, experiment
from processes import run
from tiny import PAPER
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import featcal
from benchmarks.growth import planned_bytes, run_calibration, write_models
from featcal.calibration.choose import STREAM
from featcal.calibration.estimate import Job, estimate, model_shape
from featcal.cli.plan import meta_batch
from featcal.errors import BadCapture
from featcal.models.plan import plan_for

ATEN = torch.ops.aten
LEFT_OUT = {  # of torch's own counter
    ATEN.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1],
    ATEN.linalg_cholesky_ex: lambda left, *_, **__: left[0] ** 3 // 3,
    ATEN.cholesky_solve: lambda right, left, *_, **__: 2 * left[0] ** 2 * right[1],
    ATEN.linalg_solve_triangular: lambda left, right, **__: right[0] ** 2 * right[1],
    ATEN._grouped_mm: lambda left, right, *_, **__: 2 * left[0] * left[1] * right[-1],
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *qkv, **__: sdpa_flop_count(*qkv[:3]),
}
SIZES = Namespace(width=512, layers=2, tasks=2, samples=24, batch=6, device="cpu", clock=0)
RUNS = [("clip", PAPER), ("clip", STREAM), ("t5", PAPER), ("llama", STREAM), ("bert", "auto")]


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


@pytest.mark.parametrize(("name", "settings"), RUNS, ids=lambda own: getattr(own, "ridge", own))
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


class Files:
    """The most bytes below a folder while the `with` ran, looked at before a file is removed."""

    def __init__(self, folder: Path):
        self.folder, self.peak, self.watching = folder, 0, False
        sys.addaudithook(self.before)

    def before(self, event: str, _: tuple[object, ...]) -> None:
        if self.watching and event in {"os.remove", "os.rename", "os.truncate", "os.rmdir"}:
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        sizes = {}  # by inode: a file may have two names
        for place, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # a thread may remove one meanwhile
                    about = os.stat(os.path.join(place, name))
                    sizes[about.st_ino] = about.st_size
        return sum(sizes.values())

    def __enter__(self) -> "Files":
        self.watching = True
        return self

    def __exit__(self, *_: object) -> None:
        self.peak, self.watching = max(self.peak, self.now()), False


def measured(host_memory, rank, world, port, folder):
    """Estimate and measure memory and disk of a calibration from folders, in a process of its own."""
    root = folder / "models"
    estimated, files = planned_bytes(SIZES, root, host_memory), Files(root)
    stored = files.now()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    with files:
        host = run_calibration(SIZES, root, host_memory)["host_bytes"]
    took = {"host": host, "disk": files.peak - stored}
    (folder / "measured.json").write_text(json.dumps({"estimated": estimated, "took": took}))


@pytest.mark.parametrize("host_memory", [None, 0], ids=["in memory", "on disk"])
def test_memory_and_disk_are_within_25_percent_of_those_of_a_real_run(tmp_path, host_memory):
    write_models(SIZES, tmp_path / "models")
    assert run(measured, host_memory, 1, tmp_path) == [0]
    result = json.loads((tmp_path / "measured.json").read_text())
    for what, took in result["took"].items():
        assert result["estimated"][what] == pytest.approx(took, rel=0.25), what


def test_a_mixture_is_estimated_with_all_of_its_experts():
    model = on_meta(tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED, num_local_experts=4)))
    batch = meta_batch(model, 2, 9, True)
    block = model_shape(model, plan_for(model), batch, PAPER.but(norm=False)).blocks[0]
    assert sum(".experts." in s.linears[0] for s in block.sites) == 2 * 4 and block.routed > 0


@pytest.mark.parametrize(("name", "times"), [("Llama", 4), ("Granite", 7)])
def test_scores_are_counted_and_whole_where_a_model_changes_them(name, times):
    config = getattr(tf, f"{name}Config")(**GROUPED, **{"logits_scaling": 8.0} if times > 4 else {})
    model = on_meta(getattr(tf, f"{name}ForCausalLM")(config))
    shape = model_shape(model, plan_for(model), meta_batch(model, 2, 9, True))
    assert shape.scores == times * 4 * 2 * 9 * config.vocab_size
    for job in (Job(1, 256, 2, "auto"), Job(1, 256, 2)):
        host = estimate(replace(shape, scores=10**9), job)["host"]
        assert host.get("scores") == (10**9 if job.settings == "auto" else None)


def test_a_linear_may_run_twice_where_it_is_not_solved():
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
    model = on_meta(tf.DebertaV2Model(tf.DebertaV2Config(**tiny.TEXT | relative)))
    given = model, plan_for(model), meta_batch(model, 2, 7, True)
    block = model_shape(*given, PAPER.but(modules=("value_proj", "dense"))).blocks[0]
    ends = [name.rsplit(".", 1)[-1] for site in block.sites for name in site.linears]
    assert ends == ["value_proj", "dense", "dense", "dense"] and block.sites[0].reach > 0
    with pytest.raises(BadCapture, match="query_proj: ran twice"):
        model_shape(*given, PAPER)
