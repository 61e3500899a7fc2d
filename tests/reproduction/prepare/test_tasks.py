"""The paper's tasks: prompts to the letter, answers by label, rows of other collections."""

from hashlib import sha256

import pytest

from featcal.errors import BadData, UnknownKey
from reproduction.prepare.tasks import TASKS, load_prompts, prompted

SUMS = {  # of class names and of templates in label order, joined by line ends
    "sun397": "dd1277b1cfcf09ba c97a3d1ad5819800", "stanford-cars": "93d089469409bbd0 255ecc632c41182c",
    "resisc45": "3c2177013901f0ef 8f390b8578e5c3bf", "eurosat": "ee2e41b9973e7206 9bc85d9f1798d03b",
    "svhn": "29dd21f55e4611d4 c0341e0a1fdfd8fb", "gtsrb": "953036bc5aedbe6b a6794061485dcfa2",
    "mnist": "29dd21f55e4611d4 c0341e0a1fdfd8fb", "dtd": "681d23b9cd3c2ede 1f6888d2130f62a4",
    "oxford_flowers102": "f5a3bda044faf55b bfcd4bbb214d5015", "pcam": "27352df7ede1fd87 7c7758b084ef77fa",
    "fer2013": "0fece1ddf1a3ebf7 ae805dccc6d01c6a", "oxford-iiit-pet": "8e35ab44db27d55a 16a0790f0e45e97e",
    "stl10": "08b234ce7b11dbd3 c97a3d1ad5819800", "cifar100": "3e2584150e2896e2 9bbf912e1144ca4c",
    "cifar10": "bb3914949cecedee 9bbf912e1144ca4c", "food101": "9c0eeb5a368baacb 77a79bac7d9cf25b",
    "fashion_mnist": "249370ed4284a97d c97a3d1ad5819800", "emnist_letters": "cfa4f846a6dbeb24 df7d55ac799e2a3b",
    "kmnist": "420ad158d8f0775d 12c1113974e99b08", "rendered-sst2": "2e61aa7558046c2c 9034019e8a14384c",
}  # fmt: skip
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


def digest(lines):
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_prompts_of_images_have_the_published_check_sums():
    prompts = {task: load_prompts(task) for task in TASKS}
    sums = {task: f"{digest(p.classes)} {digest(p.templates)}" for task, p in prompts.items()}
    assert sums == SUMS
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
