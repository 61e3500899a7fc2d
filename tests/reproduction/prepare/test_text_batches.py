"""Texts as calibration batches: neither padding nor batch size changes a weight; their descriptions."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from families import without_float32
from language import folder
from tiny import PAPER, averaged, difference, shifted

from featcal import calibrate
from featcal.data.texts import Sample
from featcal.models.load import load_model
from reproduction.experiments import Reading
from reproduction.prepare import texts as batches_of
from reproduction.prepare.texts import text_batches

WORDS = "a cat/the dog/ships sail far away/on/one more line/red/two more of them/no".split("/")
ANSWERS = ("yes", "no", "maybe so", "3.5")
READINGS = [
    ("t5", Reading(decoder="start")),
    ("llama", Reading()),
    ("llama", Reading(counted="answer")),
]


def taught(task):
    """Prompts of very different lengths with their answers, others for every task."""
    turned = WORDS[len(task) :] + WORDS[: len(task)]
    return [Sample(f"row {i}", f"is it {word}?", ANSWERS[i % 4]) for i, word in enumerate(turned)]


@pytest.fixture
def texts(monkeypatch):
    """Stands in for the folder of texts."""
    monkeypatch.setattr(batches_of, "load_texts", lambda _, task, split: taught(task))
    return Path("texts")


def read(base, texts, reading, size, tasks=("a", "bb")):
    return {task: text_batches(base, texts, task, 8, 3, size, reading) for task in tasks}


def calibrated(base, batches, reading):
    model = load_model(base).double()
    experts = {task: shifted(model, 10 + seed) for seed, task in enumerate(batches)}
    models = {"base": model, "experts": experts, "plan": batches_of.plan_of_reading(base, reading)}
    merged, settings = averaged(list(experts.values())), PAPER.but(norm=False)
    return calibrate(merged, batches=batches, settings=settings, **models)


def padded(batch, extra):
    """Every tensor of a batch made longer on the right by tokens that do not count."""
    fill = {"labels": -100}
    pad = torch.nn.functional.pad
    return {k: pad(v, (0, extra), value=fill.get(k, 0)) for k, v in batch.items()}


@pytest.mark.parametrize(("kind", "reading"), READINGS)
def test_padding_and_batching_change_no_weight(tmp_path, texts, monkeypatch, kind, reading):
    base = folder(tmp_path / kind, kind)
    without_float32(monkeypatch, load_model(base))
    together, alone = (read(base, texts, reading, size) for size in (8, 1))
    # one by one nothing is padded
    assert len({batch["input_ids"].shape[1] for batch in alone["a"]}) > 2
    expected = calibrated(base, together, reading)
    wider = {task: [padded(batch, 5) for batch in batches] for task, batches in together.items()}
    for other in (alone, wider):
        actual = calibrated(base, other, reading)
        assert difference(actual.model, expected.model) < 1e-9
        for report, block in zip(actual.blocks, expected.blocks, strict=True):
            assert report.tokens == block.tokens
            assert report.relative_drift == pytest.approx(block.relative_drift, rel=1e-4)


def test_what_is_read_is_what_counts(tmp_path, texts):
    """Every byte is a token, and every text and target ends with one more."""
    prompts = sum(len(sample.text) for sample in taught("a"))
    answers = sum(len(sample.target) for sample in taught("a"))
    t5, llama = folder(tmp_path / "t5", "t5"), folder(tmp_path / "llama", "llama")
    expected = {
        (t5, Reading()): [prompts + 8, answers + 8],
        (t5, Reading(decoder="start")): [prompts + 8, 8],
        (t5, Reading(tokens=4)): [4 * 8, sum(min(4, len(s.target) + 1) for s in taught("a"))],
        (llama, Reading()): [prompts + answers + 8],
        (llama, Reading(counted="answer")): [answers + 8],
        (llama, Reading(counted="prompt")): [prompts],
        (llama, Reading(tokens=4)): [4 * 8],
    }
    for (base, reading), tokens in expected.items():
        blocks = calibrated(base, read(base, texts, reading, 8, ("a",)), reading).blocks
        assert [block.tokens for block in blocks if block.name.endswith(".00")] == tokens, reading


def test_the_draw_is_of_the_seed_and_takes_what_there_is(tmp_path, texts):
    base, draws = folder(tmp_path / "t5", "t5"), ((4, 1), (4, 1), (4, 2), (99, 1))
    batches = [text_batches(base, texts, "a", n, seed, 8, Reading())[0] for n, seed in draws]
    ids = [batch["input_ids"] for batch in batches]
    assert torch.equal(ids[0], ids[1]) and not torch.equal(ids[0], ids[2])
    assert [len(batch) for batch in ids] == [4, 4, 4, 8]


ROWS = dict(
    sst2={"sentence": ["fine"], "label": [1], "idx": [0]},
    math={"prompt": ["1+1="], "completion": ["2\n"]},
    gsm8k={"prompt": ["one and one?\n"], "target": ["1+1=2"]},
)


def test_a_task_is_told_by_its_first_prompt_and_answer(tmp_path):
    for task, answer in {"sst2": "positive", "math": "2", "gsm8k": "1+1=2"}.items():
        (tmp_path / task).mkdir()
        Dataset.from_dict(ROWS[task]).to_parquet(str(tmp_path / task / "test.parquet"))
        fields = {"location": task, "kind": "folder", "paper_name": task, "description": "A task."}
        source = batches_of.TextSource(**fields, splits={"test": "test"})
        batches_of.write_text_sources(tmp_path, {task: source})
        described = batches_of.described_task(tmp_path, task, source)
        assert described["rows"] == {"test": 1} and described["description"] == "A task."
        assert described["example"]["answer"] == answer and described["example"]["prompt"]


def test_of_texts_on_the_hub_nothing_is_fetched(tmp_path):
    fields = {"location": "nyu-mll/glue", "kind": "hub", "paper_name": "CoLA", "config": "cola"}
    source = batches_of.TextSource(**fields, splits={"train": "train"}, revision="abc")
    described = batches_of.described_task(tmp_path, "cola", source)
    assert "rows" not in described and described["location"] == "nyu-mll/glue"
