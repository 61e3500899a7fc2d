"""The GPU part of the rehearsal at a small size on the CPU, and memory that runs out."""

import language
import pytest
import torch
from test_cli import refused

from featcal.cli import main as cli
from scripts import full_size

BRIEF = {"samples": 6, "tasks": ("mnist", "dtd")}
TEXT = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "num_layers": 1}
TEXT |= {"num_decoder_layers": 1, "vocab_size": 64}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 2, "image_size": 64}
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 70 GiB is ours."


@pytest.mark.parametrize(
    "size", [full_size.vision(**VISION), full_size.text(**TEXT)], ids=["vision", "text"]
)
def test_both_architectures_are_built_merged_and_calibrated(size):
    took = full_size.calibrated(size, "cpu", **BRIEF)
    assert took.merge > 0 and took.calibration > 0 and took.peak == 0
    assert 0 < took.last.relative_drift < 1


def test_full_sizes_are_those_of_the_papers_models():
    with torch.device("meta"):
        vision, text = full_size.vision().build(), full_size.text().build()
    assert sum(p.numel() for p in vision.parameters()) == 87_456_000
    # the published count; this version ties the head of a new model to its embeddings, which the
    # published one does not
    assert sum(p.numel() for p in text.parameters()) + 32128 * 768 == 247_577_856


def test_without_a_gpu_it_says_that_it_needs_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert full_size.report() == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), MemoryError()])
def test_memory_that_runs_out_is_one_message_and_nothing_half_written(
    tmp_path, monkeypatch, capsys, error
):
    for seed, name in enumerate(("base", "expert", "merged")):
        language.folder(tmp_path / name, "llama", seed)
    language.jsonl(tmp_path / "train.jsonl", [{"text": text} for text in language.WORDS])

    def full(*_, **__):
        raise error

    monkeypatch.setattr(torch.linalg, "cholesky_ex", full)
    monkeypatch.chdir(tmp_path)
    models = "calibrate --merged merged --base base --expert a=expert --data a=train.jsonl"
    message = refused(
        f"{models} --samples 4 --preset paper --batch 2 --out new".split(), tmp_path, capsys
    )
    assert "not enough memory" in message and "--set batch=8" in message


def test_another_fault_keeps_its_traceback(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("featcal.cli.inputs.model_folder", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli.main(["inspect", "anything"])
