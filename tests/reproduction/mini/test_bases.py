"""The bases of the mini suite: pre-training that can be interrupted, tokenizers, shipped folders."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import CLIPModel, CLIPProcessor

from featcal.models.load import load_model, load_tokenizer
from reproduction.mini import clip
from reproduction.mini.images import TASKS, draw_split
from reproduction.mini.language import domains, llama, t5
from reproduction.mini.language.domains import KINDS, TESTS, draw_samples, mixture, reading
from reproduction.mini.training import MODELS, run_to_end
from reproduction.prepare.texts import TokenizedExample, example_batch

CLIP = clip.ClipRecipe(16, 2, 2, projection=8, steps=6, batch=16, pictures=8, every=2)
T5 = t5.T5Recipe(16, 1, 2, 8, 24, steps=6, rows=2, every=2)
LLAMA = llama.LlamaRecipe(16, 2, 2, 1, 32, tied=True, steps=6, batch=8, facts=2, read=30, every=2)
RUNS = {
    "clip_b32": (clip.ClipPretraining, CLIP),
    "flan_t5_base": (t5.T5Pretraining, T5),
    "llama_3b": (llama.LlamaPretraining, LLAMA),
}


@pytest.mark.parametrize("role", RUNS)
def test_an_interrupted_pretraining_ends_in_the_same_bytes(tmp_path, monkeypatch, role):
    (run, recipe), state = RUNS[role], tmp_path / "state" / role / "state.safetensors"

    def pretrain(name, recipe):
        run_to_end(run, recipe, role, tmp_path / name, tmp_path / "state")

    pretrain("straight", recipe)
    step = run.step

    def interrupted(self):
        if self.done == 5:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(run, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain("resumed", recipe)
    assert not (tmp_path / "resumed").exists()
    content, steps = state.read_bytes(), []
    monkeypatch.setattr(run, "step", lambda self: steps.append(self.done) or step(self))
    pretrain("resumed", recipe)
    assert steps[0] == 4, "goes on from its state"
    state.write_bytes(content)
    steps.clear()
    pretrain("other", replace(recipe, seed=1))
    assert steps[0] == 0, "a state of another recipe is not resumed"
    for file in (tmp_path / "straight").iterdir():
        assert file.read_bytes() == (tmp_path / "resumed" / file.name).read_bytes(), file.name
    weights = [tmp_path / name / "model.safetensors" for name in ("straight", "other")]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    assert not list((tmp_path / "state").rglob("*.safetensors"))


@pytest.mark.parametrize("role", clip.ClipPretraining.recipes)
def test_a_shipped_clip_tells_pictures_apart(role):
    model, processor = (kind.from_pretrained(MODELS / role) for kind in (CLIPModel, CLIPProcessor))
    assert list(processor.image_processor.image_mean) == [0.42] * 3
    images, labels = draw_split("sun397", "validation", 64, 0, 0.0)
    task = TASKS["sun397"]
    captions = [task.templates[1].format(name) for name in task.classes]
    texts = processor.tokenizer(captions, return_tensors="pt", padding=True)
    with torch.no_grad():
        scores = model(pixel_values=clip.normalised(images), **texts).logits_per_image
    assert (scores.argmax(1) == torch.from_numpy(labels)).float().mean() > 0.5


ODD = (
    "", " ", "naïve — 日本語 🙂\n\ttabs", "\x00\x7f", "A b.", "' and '", "</s", "'the' \"x\"", "ﬁ é é", "1234567 4.5",
)  # fmt: skip


def test_nothing_is_unknown_to_the_tokenizer_of_t5_and_every_text_comes_back():
    tokenizer = load_tokenizer(MODELS / "flan_t5_base")
    for text in ODD:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids and ids[-1] == tokenizer.eos_token_id == 1
        assert tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False) == text
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == list(t5.SPECIAL)
    encode = partial(tokenizer, add_special_tokens=False)
    assert all(len(encode(part)["input_ids"]) == 1 for part in t5.prompt_parts())


@pytest.mark.parametrize("role", t5.T5Pretraining.recipes)
def test_a_shipped_t5_finds_right_answers_far_likelier_than_others(role):
    base, tokenizer = load_model(MODELS / role), load_tokenizer(MODELS / role)
    samples = draw_samples("mnli", "validation", 64, 0)
    inputs = tokenizer([sample.text for sample in samples], padding=True, return_tensors="pt")
    targets = tokenizer([sample.target for sample in samples], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert float(base(**inputs, labels=targets).loss) < 1.0


def test_nothing_is_unknown_to_the_tokenizer_of_llama_and_a_prompt_begins_the_whole():
    tok = llama.train_tokenizer(reading(0, 300))
    assert len(tok) <= llama.VOCABULARY and tok.padding_side == "left"
    for text in ("naïve ∂x = 7\t", "日本 🙂", "def f(s):\n return s[::-1]\n"):
        assert tok.decode(tok(text)["input_ids"], skip_special_tokens=True) == text
    for key in KINDS:
        for prompt, completion in mixture(np.random.default_rng(1), {key: 1.0}, 0.5, 50):
            (row,) = llama.encoded(tok, [(prompt, completion)])
            begin = row.labels.count(llama.IGNORED)
            assert row.ids[:begin] == tok(prompt)["input_ids"] and len(row.ids) <= llama.LONGEST


def test_two_parts_of_a_batch_give_the_gradient_of_their_weighted_losses():
    rows = [([1, 5, 6, 7], 2), ([1, 8, 9], 1), ([1, 5, 9, 7, 6, 8], 3)]
    texts = [TokenizedExample(ids, [llama.IGNORED] * n + ids[n:]) for ids, n in rows]
    model = llama.new_model(LLAMA)
    loss = llama.backward(model, texts, 0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    weighted = zip(texts, (2, 2, 3), strict=True)
    total = sum(model(**example_batch([text], 0)).loss * n**0.5 for text, n in weighted)
    total = total / (2 * 2**0.5 + 3**0.5)
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-6), name


@pytest.mark.parametrize("role", llama.LlamaPretraining.recipes)
def test_a_shipped_llama_answers_in_one_line(role):
    model, tokenizer = load_model(MODELS / role), load_tokenizer(MODELS / role)
    assert model.config.tie_word_embeddings is llama.LlamaPretraining.recipes[role].tied
    prompts = [item.prompt for item in domains.test_items("math500", "validation", 8, 0)]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=TESTS["math500"].new_tokens)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert all(answer.endswith("\n") and answer.count("\n") == 1 for answer in texts)
