"""Experts of language models: what is learnt, what stays, and PEFT's forward as oracle."""

import json

import pytest
import torch
from language import folder
from tiny import difference, same_bits

from featcal.data.texts import Sample, input_of, reader_for
from featcal.errors import BadData, BadFile, Diverged
from featcal.models.load import load_model
from featcal.models.lora import CONFIG
from reproduction.prepare.fine_tune import fine_tune_text
from reproduction.prepare.suite import FineTuneText, Lora
from reproduction.prepare.texts import IGNORED, example_batch, tokenized_example

SHORT = FineTuneText(steps=30, lr=5e-3, batch=8, warm_up=3)
PAIRS = enumerate([("a cat", "yes"), ("a red", "no")] * 8)
TAUGHT = [Sample(f"row {i}", f"is {word}?", answer) for i, (word, answer) in PAIRS]


def loss(model, path):
    reader = reader_for([path], input_of(model), None)
    examples = [tokenized_example(sample, reader) for sample in TAUGHT]
    with torch.no_grad():
        return float(model(**example_batch(examples, reader.pad)).loss)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_an_expert_learns_its_answers_and_leaves_embeddings_and_head_as_they_were(tmp_path, kind):
    path = folder(tmp_path / kind, kind)
    base, expert = load_model(path), fine_tune_text(path, TAUGHT, SHORT, "rte", 0)
    assert loss(expert, path) < 0.5 * loss(base, path)
    assert torch.equal(expert.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert torch.equal(expert.get_output_embeddings().weight, base.get_output_embeddings().weight)
    assert difference(expert, base) > 1e-3 and not expert.training


def test_the_same_task_and_seed_give_the_same_bits_whatever_the_global_generator_holds(tmp_path):
    path = folder(tmp_path / "t5", "t5")
    torch.manual_seed(1)
    expert = fine_tune_text(path, TAUGHT, SHORT, "rte", 0)
    before = torch.manual_seed(2).get_state()
    assert same_bits(expert, fine_tune_text(path, TAUGHT, SHORT, "rte", 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert not same_bits(expert, fine_tune_text(path, TAUGHT, SHORT, "mrpc", 0))


def test_a_causal_model_learns_the_completion_and_not_the_prompt(tmp_path):
    path = folder(tmp_path / "llama", "llama")
    reader = reader_for([path], input_of(load_model(path)), None)
    tokens = tokenized_example(Sample("row 0", "2+2=", "4\n"), reader)
    assert tokens.labels == [IGNORED] * 4 + tokens.ids[4:]
    assert reader.tokenizer.decode(tokens.ids[4:], skip_special_tokens=True) == "4\n"
    with pytest.raises(BadData, match="no target"):
        tokenized_example(Sample("row 0", "2+2="), reader)


def test_what_does_not_generate_or_has_nothing_to_learn_is_refused(tmp_path):
    with pytest.raises(BadFile, match="BertModel"):
        fine_tune_text(folder(tmp_path / "bert", "bert"), TAUGHT, SHORT, "rte", 0)
    path = folder(tmp_path / "t5", "t5")
    with pytest.raises(BadData, match="no sample with a target"):
        fine_tune_text(path, [Sample("row 0", "is it?", "")], SHORT, "rte", 0)
    with pytest.raises(Diverged, match="rte"):
        fine_tune_text(path, TAUGHT, FineTuneText(steps=30, lr=1e30, batch=8), "rte", 0)


def test_a_merged_adapter_is_what_pefts_own_forward_computes(tmp_path):
    peft = pytest.importorskip("peft")
    path, out = folder(tmp_path / "t5", "t5"), tmp_path / "adapters"
    lora = Lora(rank=4, alpha=8, modules=("q", "v"))
    settings = FineTuneText(steps=10, lr=1e-2, batch=8, lora=lora)
    dense = fine_tune_text(path, TAUGHT, settings, "rte", 0, adapters=out)
    adapted = peft.PeftModel.from_pretrained(load_model(path), str(out))
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        expected, actual = (model(input_ids=ids, labels=ids).logits for model in (adapted, dense))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(dense.named_parameters(), load_model(path).parameters(), strict=True):
        assert torch.equal(p, q) == (name.split(".")[-2] not in ("q", "v")), name
    assert json.loads((out / CONFIG).read_text())["base_model_name_or_path"] == "t5"
    assert same_bits(dense, fine_tune_text(path, TAUGHT, settings, "rte", 0))
