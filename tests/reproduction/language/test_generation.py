"""Generated answers and their GLUE scores, and adapters before the head while generating."""

from contextlib import contextmanager

import pytest
import torch
from language import MODELS, begun_tokenizer, tokenizer
from tiny import make

from featcal.errors import BadData
from reproduction.language.generation import generate_texts, score_glue, spearman

PROMPTS = [
    "a dog",
    "the cat sat on the red ship",
    "no",
    "one more line",
    "",
    "ships sail",
    "x" * 30,
]


def prompted(seed=0, kind="t5"):
    """Return a model in float64 and its tokenizer; Llama's prompts have no end token."""
    return make(MODELS[kind], seed), tokenizer() if kind == "t5" else begun_tokenizer()


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_answers_in_batches_are_those_one_by_one_in_their_order(kind):
    model, texts = prompted(0, kind)
    alone = [generate_texts(model, texts, [prompt], 1, 6)[0] for prompt in PROMPTS]
    assert generate_texts(model, texts, PROMPTS, 3, 6) == alone
    assert generate_texts(model, texts, PROMPTS, 100, 6) == alone and len(set(alone)) > 1


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_an_answer_is_the_most_likely_token_at_every_step(kind):
    model, texts = prompted(0, kind)
    answers = generate_texts(model, texts, [PROMPTS[1]], 1, 5)
    ids = texts([PROMPTS[1]], return_tensors="pt")["input_ids"]
    new = torch.full((1, 1), 0) if kind == "t5" else ids
    first = new.shape[1]
    with torch.no_grad():
        for _ in range(5):
            inputs = {"input_ids": new}
            if kind == "t5":
                inputs = {"input_ids": ids, "decoder_input_ids": new}
            token = model(**inputs, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            new = torch.cat([new, token], 1)
            if token.item() == texts.eos_token_id:
                break
    assert answers == texts.batch_decode(new[:, first:], skip_special_tokens=True)


def test_what_the_model_says_while_it_is_changed_is_what_it_scores():
    model, texts = prompted()
    answers, count, events = generate_texts(model, texts, PROMPTS, 32, 9), len(PROMPTS), []
    samples = list(zip(PROMPTS, answers, strict=True))

    @contextmanager
    def change(model, task):
        events.append(f"{task} on")
        yield
        events.append(f"{task} off")

    score = score_glue(model, texts, "rte", samples, change=change)
    assert score == (100.0, count, [True] * count) and events == ["rte on", "rte off"]
    wrong = [samples[0], *((prompt, "?") for prompt in PROMPTS[1:])]
    right = [True, *[False] * (count - 1)]
    assert score_glue(model, texts, "rte", wrong) == (100 / count, count, right)
    assert score_glue(model, texts, "stsb", samples)[2] is None
    assert spearman([1.0, 2.0, 9.0], [1.0, 4.0, 5.0]) == pytest.approx(1.0)
    assert spearman([2.0, 2.0], [1.0, 3.0]) == 0.0  # constant answers have no ranks
    with pytest.raises(BadData, match="rte: no sample"):
        score_glue(model, texts, "rte", [])
