"""The paper's tasks: prompts to the letter, answers by label, rows of other collections."""

from hashlib import sha256

import pytest

from featcal.errors import BadData, UnknownKey
from reproduction.prepare.tasks import TASKS, load_prompts, prompted

SUM = "2af54548679a20796272cc7a20cbe00f"  # of names, classes and templates of all tasks, joined by line ends
PAIR = {"sentence1": "A.", "sentence2": "B."}
# a row of GLUE, its prompt in the published experts' wording, and the answer by label
GLUE = {
    "cola": (
        {"sentence": "A b."},
        'Indicate if the following sentence is grammatically correct or not: "A b.". Answere \'acceptable\' or \'unacceptable\'.',
        {1: "acceptable", 0: "unacceptable", -1: ""},
    ),
    "mnli": (
        {"premise": "A.", "hypothesis": "B."},
        "Does the premise: 'A.' logically imply, contradict, or is neutral to the hypothesis: 'B.'? "
        "Answere with 'entailment', 'contradiction', or 'neutral'.",
        {0: "entailment", 1: "neutral", 2: "contradiction", -1: "", 3: ""},
    ),
    "mrpc": (
        PAIR, "Are the following sentences 'A.' and 'B.' conveying the same meaning? Answere with 'yes' or 'no'.",
        {0: "no", 1: "yes"},
    ),
    "qnli": (
        {"question": "A?", "sentence": "B."},
        "Given the context: 'B.', does the question 'A?' have an answer based on the information provided? "
        "Answer with 'yes' or 'no'.",
        {0: "yes", 1: "no"},
    ),
    "qqp": (
        {"question1": "A?", "question2": "B?"},
        "Do the questions 'A?' and 'B?' have the same intent? Answere with 'yes' or 'no'.", {0: "no", 1: "yes"},
    ),
    "rte": (PAIR, "Does the text: 'A.' entail that 'B.' is true? Provide 'yes' or 'no'.", {0: "yes", 1: "no"}),
    "sst2": (
        {"sentence": "a {b"}, "Given the sentence 'a {b', determine the sentiment. Is it positive or negative?",
        {0: "negative", 1: "positive", -1: ""},
    ),
    "stsb": (
        PAIR,
        "Consider the sentences 'A.' and 'B.'. On a scale from 1 (completely different) to 5 (completely similar), rate the "
        "similarity.",
        {0.0: "0.0", 3.2: "3.2", 2.75: "2.8", 5.0: "5.0", -1.0: ""},
    ),
}  # fmt: skip


def test_prompts_of_images_have_the_published_check_sum():
    prompts = {task: load_prompts(task) for task in TASKS}
    parts = ((task, *own) for task, p in prompts.items() for own in (p.classes, p.templates))
    lines = [line for part in parts for line in part]
    assert sha256("\n".join(lines).encode()).hexdigest()[:32] == SUM
    with pytest.raises(UnknownKey, match="did you mean 'mnist'"):
        load_prompts("mnits")


@pytest.mark.parametrize("task", GLUE)
def test_a_row_becomes_the_papers_prompt_and_its_answer(task):
    texts, prompt, answers = GLUE[task]
    for label, answer in answers.items():
        assert prompted(task, {**texts, "label": label, "idx": 7}) == (prompt, answer)


def test_the_columns_of_other_collections_make_the_same_prompts():
    for task, row, answer in (
        ("sst2", {"text": "a {b", "label": 1}, "positive"),
        ("qnli", {"sentence1": "A?", "sentence2": "B.", "label": 0}, "yes"),
        ("qqp", {"sentence1": "A?", "sentence2": "B?", "label": 0}, "no"),
        ("stsb", {**PAIR, "score": 3.4, "label": 3}, "3.4"),
    ):
        assert prompted(task, row) == (GLUE[task][1], answer)


def test_a_row_without_its_columns_and_an_unknown_task_are_named():
    with pytest.raises(BadData, match="hypothesis"):
        prompted("mnli", {"premise": "A.", "label": 0})
    with pytest.raises(BadData, match="label"):
        prompted("cola", {"sentence": "A."})
    with pytest.raises(UnknownKey, match="stsb"):
        prompted("sts-b", {})
