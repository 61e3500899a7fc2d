"""GLUE as generated text: prompts to the letter, answers by label, and rows of other
collections.
"""

import pytest

from featcal.errors import BadData, UnknownKey
from reproduction.prepare.text_tasks import prompted

ROWS = {
    "cola": ({"sentence": "A b."}, {1: "acceptable", 0: "unacceptable", -1: ""}),
    "mnli": (
        {"premise": "A.", "hypothesis": "B."},
        {0: "entailment", 1: "neutral", 2: "contradiction", -1: "", 3: ""},
    ),
    "mrpc": ({"sentence1": "A.", "sentence2": "B."}, {0: "no", 1: "yes"}),
    "qnli": ({"question": "A?", "sentence": "B."}, {0: "yes", 1: "no"}),
    "qqp": ({"question1": "A?", "question2": "B?"}, {0: "no", 1: "yes"}),
    "rte": ({"sentence1": "A.", "sentence2": "B."}, {0: "yes", 1: "no"}),
    "sst2": ({"sentence": "a {b"}, {0: "negative", 1: "positive", -1: ""}),
    "stsb": (
        {"sentence1": "A.", "sentence2": "B."},
        {0.0: "0.0", 3.2: "3.2", 2.75: "2.8", 5.0: "5.0", -1.0: ""},
    ),
}
PROMPTS = {
    "cola": 'Indicate if the following sentence is grammatically correct or not: "A b.". '
    "Answere 'acceptable' or 'unacceptable'.",
    "mnli": "Does the premise: 'A.' logically imply, contradict, or is neutral to the hypothesis: 'B.'? "
    "Answere with 'entailment', 'contradiction', or 'neutral'.",
    "mrpc": "Are the following sentences 'A.' and 'B.' conveying the same meaning? Answere with 'yes' or 'no'.",
    "qnli": "Given the context: 'B.', does the question 'A?' have an answer based on the information provided? "
    "Answer with 'yes' or 'no'.",
    "qqp": "Do the questions 'A?' and 'B?' have the same intent? Answere with 'yes' or 'no'.",
    "rte": "Does the text: 'A.' entail that 'B.' is true? Provide 'yes' or 'no'.",
    "sst2": "Given the sentence 'a {b', determine the sentiment. Is it positive or negative?",
    "stsb": "Consider the sentences 'A.' and 'B.'. On a scale from 1 (completely different) to 5 (completely similar), rate the "
    "similarity.",
}


@pytest.mark.parametrize("task", ROWS)
def test_a_row_becomes_the_papers_prompt_and_its_answer(task):
    texts, answers = ROWS[task]
    for label, answer in answers.items():
        assert prompted(task, {**texts, "label": label, "idx": 7}) == (PROMPTS[task], answer)


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("sst2", {"text": "a {b", "label": 1}, (PROMPTS["sst2"], "positive")),
        ("qnli", {"sentence1": "A?", "sentence2": "B.", "label": 0}, (PROMPTS["qnli"], "yes")),
        ("qqp", {"sentence1": "A?", "sentence2": "B?", "label": 0}, (PROMPTS["qqp"], "no")),
        (
            "stsb",
            {"sentence1": "A.", "sentence2": "B.", "score": 3.4, "label": 3},
            (PROMPTS["stsb"], "3.4"),
        ),
    ],
)
def test_the_columns_of_other_collections_make_the_same_prompts(task, row, expected):
    assert prompted(task, row) == expected


def test_a_row_without_its_columns_and_a_task_that_is_none_are_named():
    with pytest.raises(BadData, match="hypothesis"):
        prompted("mnli", {"premise": "A.", "label": 0})
    with pytest.raises(BadData, match="label"):
        prompted("cola", {"sentence": "A."})
    with pytest.raises(UnknownKey, match="stsb"):
        prompted("sts-b", {})
