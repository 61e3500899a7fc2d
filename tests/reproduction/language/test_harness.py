"""Causal models through lm-evaluation-harness, with a plain loop as oracle."""

import logging
import random
import socket
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from language import MODELS
from language import begun_tokenizer as texts
from tiny import make

from featcal.errors import BadData
from reproduction.language import harness
from reproduction.language.answers import CHECKS
from reproduction.language.generation import generate_texts
from reproduction.language.harness import local_test, score_tests

installed = pytest.mark.skipif(not harness.installed(), reason="needs the extra `language`")
PROMPTS = [
    "a dog", "the cat sat on the red ship", "no ", "one more line\n", "4+3=", "ships", "x" * 20, " the end of it",
]  # fmt: skip
NEW = 6


def model(seed=0):
    return make(MODELS["llama"], seed)


def reply(model):
    """One by one, without padding, up to the first line break."""
    answers = (generate_texts(model, texts(), [prompt], 1, NEW)[0] for prompt in PROMPTS)
    return [answer.split("\n")[0] for answer in answers]


def rows(targets):
    return [{"prompt": p, "target": target} for p, target in zip(PROMPTS, targets, strict=True)]


@pytest.fixture
def exact(monkeypatch):
    """Checks every answer of the harness to the character, and keeps what it said."""
    answers = []

    def same(row, answer):
        answers.append(answer)
        return answer == row["target"]

    monkeypatch.setitem(CHECKS, "letter", same)
    return answers


@installed
@pytest.mark.parametrize(("seed", "batch"), [(0, 1), (1, 3)])
def test_answers_in_batches_padded_on_the_left_are_those_one_by_one(exact, seed, batch):
    reader = model(seed)
    alone = reply(reader)
    test = local_test("arc_challenge", rows(alone), "letter", NEW)
    scores = score_tests(reader, texts(), {"arc_challenge": test}, batch)
    assert scores == {"arc_challenge": (100.0, len(PROMPTS), [True] * len(PROMPTS))}
    assert exact == alone and len(set(alone)) > 3


@installed
def test_nothing_is_printed_drawn_or_fetched_and_logging_is_as_before(exact, monkeypatch, capfd):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before, level = states(), logging.getLogger("lm_eval").level
    score_tests(model(), texts(), {"a": local_test("a", rows(PROMPTS), "letter", NEW)}, 3)
    assert states() == before and logging.getLogger("lm_eval").level == level
    assert capfd.readouterr() == ("", "")


@installed
def test_the_harness_own_entry_scores_the_same(exact, monkeypatch):
    """Leave out its slow look at the machine and its index of all tasks."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    for name in ("add_env_info", "add_tokenizer_info", "get_git_commit_hash"):
        monkeypatch.setattr(evaluator, name, lambda *_: None)
    answering = model()
    test = local_test("a", rows([*reply(answering)[:5], "?", "?", "?"]), "letter", NEW)
    actual = score_tests(answering, texts(), {"a": test}, 3)["a"][0]
    how = {f"{name}_random_seed": None for name in ("numpy", "torch")} | {"random_seed": None}
    with harness.silent():
        reader = harness._language_model(answering, texts(), 3)
        how["task_manager"] = TaskManager(include_defaults=False)
        expected = evaluator.simple_evaluate(reader, tasks=[test.task], **how)
    assert actual == 100 * expected["results"]["a"][test.metric] == 62.5


@installed
def test_a_model_is_changed_while_it_answers_a_test(exact):
    changed, weights, other = model(), model().state_dict(), model(1)
    tests = {key: local_test(key, rows(reply(other)), "letter", NEW) for key in ("with", "without")}

    @contextmanager
    def change(changed, key):
        changed.load_state_dict(other.state_dict() if key == "with" else weights)
        yield

    scores = score_tests(changed, texts(), tests, 3, change)
    assert scores["with"][0] == 100 > scores["without"][0]


@installed
def test_a_prompt_that_does_not_fit_is_refused_instead_of_cut():
    long = [{"prompt": "x" * 70, "target": "A"}]
    with pytest.raises(BadData, match="a prompt of 71 tokens, but the model reads 58"):
        score_tests(model(), texts(), {"a": local_test("a", long, "letter", NEW)}, 3)
