"""Answers to instructions: against generation, a plain softmax, and texts that are cut and chosen."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gguf_model import WORDS, chat_model

from featcal.errors import BadData
from featcal.models.load import load_model, load_tokenizer
from pipeline import ROOT
from reproduction.language.generation import answer, generate_texts, log_likelihood, right_answers
from reproduction.prepare import chat
from reproduction.prepare.suite import Chat
from reproduction.prepare.texts import load_texts
from reproduction.results import PLAIN

TEXTS = ROOT / "reproduction" / "real_text"
FEW = Chat(tasks=("rt_polarity",), unseen=("subjectivity",), train=8, validation=4, test=24)
END = "<|im_end|>"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Base and texts of a small model with the words of the tasks."""
    folder = tmp_path_factory.mktemp("chat")
    chat.write_base_and_chats(chat_model(folder / "model"), FEW, TEXTS, folder)
    return folder


def test_rows_are_chats_of_the_first_texts_with_a_word(store):
    tokenizer = load_tokenizer(store / "base")
    table = pq.read_table(TEXTS / "rt_polarity" / "train.parquet").to_pylist()
    rows = list(load_texts(store / "texts", "rt_polarity", "train"))
    assert len(rows) == 8
    for row, origin in zip(rows, table, strict=False):
        instruction = chat.INSTRUCTIONS["rt_polarity"].prompt
        system, user = (part.split("\n", 1)[1] for part in row.text.split(END)[:2])
        assert system == f"system\n{instruction}".split("\n", 1)[1]
        content = user.split("\n", 1)[1]
        assert origin["text"].startswith(content) and len(tokenizer(content)["input_ids"]) <= 32
        assert row.target == ("negative", "positive")[origin["label"]] + END
    assert len(load_texts(store / "texts", "subjectivity", "test")) == 24
    assert {row.text for row in load_texts(store / "texts", PLAIN, "test")} == {""}


def test_a_word_of_several_tokens_is_refused(store):
    with pytest.raises(BadData, match="'background' is not one token"):
        chat.chat_rows("csabstruct", "test", TEXTS, load_tokenizer(store / "base"), 32)


def test_answers_are_those_of_generation_and_of_a_plain_softmax(store):
    model, tokenizer = load_model(store / "base"), load_tokenizer(store / "base")
    rows = [(s.text, s.target) for s in load_texts(store / "texts", "rt_polarity", "test")]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():  # so that greedy answers are "positive" and the end
        for head, token in (("", "positive"), ("positive", END)):
            ids = [tokenizer(prompt + head, return_tensors="pt")["input_ids"] for prompt, _ in rows]
            last = torch.stack([model.model(row).last_hidden_state[0, -1] for row in ids])
            model.lm_head.weight[tokenizer(token)["input_ids"][0]] = 10 * last.mean(0)
    likely, exact = right_answers(model, tokenizer, rows, WORDS[2:])
    for index, (prompt, target) in enumerate(rows):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            generated = model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]
            scores = model(ids).logits[0, -1].log_softmax(-1)
        log_p = {word: float(scores[tokenizer(word)["input_ids"][0]]) for word in WORDS[2:]}
        assert likely[index] == (max(log_p, key=log_p.get) == target.removesuffix(END))
        assert exact[index] == (tokenizer.decode(generated) == target)
    assert 0 < sum(likely) < len(rows) and 0 < sum(exact) < len(rows)


def test_the_log_likelihood_of_texts_is_the_sum_over_their_tokens(store):
    model, tokenizer = load_model(store / "base"), load_tokenizer(store / "base")
    texts, values = ["a plain text", "no", "another one, longer"], []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        for end in range(1, len(ids)):
            with torch.no_grad():
                scores = model(torch.tensor([ids[:end]])).logits[0, -1].double()
            values.append(float(scores[ids[end]] - scores.logsumexp(0)))
    assert log_likelihood(model, tokenizer, texts) == pytest.approx(np.mean(values), rel=1e-5)


def test_an_answer_to_a_question_is_what_follows_its_chat(store):
    model, tokenizer = load_model(store / "base"), load_tokenizer(store / "base")
    prompt = f"<|im_start|>user\nno?{END}\n<|im_start|>assistant\n"
    expected = generate_texts(model, tokenizer, [prompt], 1, 6)[0]
    assert answer(model, tokenizer, "no?", 6) == expected != ""
