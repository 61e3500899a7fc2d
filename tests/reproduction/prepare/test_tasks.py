"""The paper's tasks: prompts to the letter, answers by label, rows of other collections."""

from hashlib import sha256

import pytest

from featcal.errors import BadData, UnknownKey
from reproduction.prepare.tasks import GLUE, TASKS, load_prompts, prompted

# of names, classes and templates of all tasks of images, joined by line ends, and of GLUE's prompts
IMAGES, PROMPTS = "2af54548679a20796272cc7a20cbe00f", "571b7141f05fc0830c3caeae5149efaf"
ANSWERS = {  # by label
    "cola": {1: "acceptable", 0: "unacceptable", -1: ""},
    "mnli": {0: "entailment", 1: "neutral", 2: "contradiction", -1: "", 3: ""},
    "mrpc": {0: "no", 1: "yes"}, "qnli": {0: "yes", 1: "no"}, "qqp": {0: "no", 1: "yes"}, "rte": {0: "yes", 1: "no"},
    "sst2": {0: "negative", 1: "positive", -1: ""},
    "stsb": {0.0: "0.0", 3.2: "3.2", 2.75: "2.8", 5.0: "5.0", -1.0: ""},
}  # fmt: skip
ROWS = {task: {name: f"{name} {{b" for name in GLUE[task].columns} for task in ANSWERS}


def checked(lines):
    return sha256("\n".join(lines).encode()).hexdigest()[:32]


def test_prompts_of_images_have_the_published_check_sum():
    prompts = {task: load_prompts(task) for task in TASKS}
    groups = ((task, *lines) for task, p in prompts.items() for lines in (p.classes, p.templates))
    assert checked(line for group in groups for line in group) == IMAGES
    with pytest.raises(UnknownKey, match="did you mean 'mnist'"):
        load_prompts("mnits")


def test_a_row_becomes_the_published_prompt_and_its_answer():
    prompts = []
    for task, answers in ANSWERS.items():
        texts = {label: prompted(task, {**ROWS[task], "label": label}) for label in answers}
        assert {label: answer for label, (_, answer) in texts.items()} == answers
        (prompt,) = {prompt for prompt, _ in texts.values()}
        prompts.append(prompt)
    assert checked(prompts) == PROMPTS


def test_the_columns_of_other_collections_make_the_same_prompts():
    for task, columns, labels, answer in (
        ("sst2", ("text",), {"label": 1}, "positive"),
        ("qnli", ("sentence1", "sentence2"), {"label": 0}, "yes"),
        ("qqp", ("sentence1", "sentence2"), {"label": 0}, "no"),
        ("stsb", ("sentence1", "sentence2"), {"score": 3.4, "label": 3}, "3.4"),
    ):
        row = dict(zip(columns, ROWS[task].values(), strict=True))
        expected = prompted(task, {**ROWS[task], "label": 0})[0]
        assert prompted(task, {**row, **labels}) == (expected, answer)


def test_a_row_without_its_columns_and_an_unknown_task_are_named():
    with pytest.raises(BadData, match="hypothesis"):
        prompted("mnli", {"premise": "A.", "label": 0})
    with pytest.raises(BadData, match="label"):
        prompted("cola", {"sentence": "A."})
    with pytest.raises(UnknownKey, match="stsb"):
        prompted("sts-b", {})
