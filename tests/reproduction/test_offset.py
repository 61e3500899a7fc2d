"""The offset per task: experts answer as before, and the merged model is off by what is left."""

import encoders
import pytest
import torch

import featcal
from featcal.errors import BadSetting
from featcal.models.load import load_as_calibrated, load_tokenizer
from reproduction.prepare.offset import TABLE, at_positions, with_offsets
from reproduction.prepare.sources import TOKENS, load_sentences

SCALE = 0.3
FIRSTS = {"a": 0, "b": TOKENS}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Base, experts, and all three with offsets of very different size."""
    folder = tmp_path_factory.mktemp("offset")
    base = encoders.encoder(folder / "base")
    offsets = {first: torch.full((32,), 0.1 * (first + 1)) for first in FIRSTS.values()}
    moved, plain = {"base": with_offsets(base, folder / "moved", offsets, None)}, {}
    for seed, (task, first) in enumerate(FIRSTS.items(), start=1):
        expert = load_as_calibrated(base)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            for parameter in expert.parameters():
                parameter += 0.05 * torch.randn(parameter.shape)
        plain[task] = folder / f"plain {task}"
        expert.save_pretrained(plain[task])
        load_tokenizer(base).save_pretrained(plain[task])
        moved[task] = with_offsets(plain[task], folder / task, offsets, first)
    return folder, base, plain, moved, offsets


def test_an_expert_with_offsets_answers_its_own_task_as_before(made):
    folder, base, plain, moved, _ = made
    encoders.task(folder / "texts")
    for task in FIRSTS:
        samples = load_sentences(folder / "texts", "test", base)
        moved_texts = at_positions(FIRSTS, task, samples).batches(None, 7)
        before, after = (load_as_calibrated(path) for path in (plain[task], moved[task]))
        with torch.no_grad():
            for batch, other in zip(samples.batches(None, 7), moved_texts, strict=True):
                want = before(**batch).last_hidden_state
                assert torch.allclose(after(**other).last_hidden_state, want, rtol=0, atol=1e-5)


def test_task_arithmetic_keeps_the_share_of_the_offset_that_no_expert_undoes(made):
    folder, _, plain, moved, offsets = made
    base, experts = moved["base"], {task: moved[task] for task in FIRSTS}
    merged = featcal.merge("task_arithmetic", base, experts, scale=SCALE).get_parameter(TABLE)
    usual = load_as_calibrated(made[1]).get_parameter(TABLE)
    expert_tables = [load_as_calibrated(path).get_parameter(TABLE) for path in plain.values()]
    for first in FIRSTS.values():
        for row in range(TOKENS):
            want = usual[row] + SCALE * sum(table[row] - usual[row] for table in expert_tables)
            want = want + (1 - SCALE) * offsets[first]
            assert torch.allclose(merged[first + row], want, rtol=0, atol=1e-5)


def test_more_positions_than_the_model_has_are_refused(made, tmp_path):
    with pytest.raises(BadSetting, match="512"):
        with_offsets(made[1], tmp_path / "out", {500: torch.zeros(32)}, None)
