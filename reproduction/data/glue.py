"""The eight tasks of GLUE as generated text: where each lies on the hub, and how a row becomes a
prompt and its answer.

Prompts are those of the published experts to the letter, "Answere" included: another wording is
another input. Texts may lie in the columns of the hub or in those that other collections use
(`text`, or `sentence1` and `sentence2` for all pairs, `score`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featcal.errors import BadData, UnknownKey

HUB_ID = "nyu-mll/glue"  # earlier `glue`; the configuration is the task's key


@dataclass(frozen=True)
class GlueTask:
    """One task.

    prompt:  with the names of its columns in braces.   answers: by label; none where the answer is
             the label as a number.
    aliases: columns that other collections have in place of the hub's, by the hub's name.
    """

    key: str
    column: str  # heading in the paper's tables
    prompt: str
    answers: tuple[str, ...]
    columns: tuple[str, ...]
    aliases: Mapping[str, str]
    test_split: str = "validation"  # the labels of the hub's test splits are not public


_YES_NO, _NO_YES = ("yes", "no"), ("no", "yes")
_ONE, _TWO = ("sentence",), ("sentence1", "sentence2")

GLUE = {
    task.key: task
    for task in (
        GlueTask(
            "cola", "CoLA",
            'Indicate if the following sentence is grammatically correct or not: "{sentence}". '
            "Answere 'acceptable' or 'unacceptable'.",
            ("unacceptable", "acceptable"), _ONE, {"sentence": "text"},
        ),
        GlueTask(
            "mnli", "MNLI",
            "Does the premise: '{premise}' logically imply, contradict, or is neutral to the hypothesis: '{hypothesis}'? "
            "Answere with 'entailment', 'contradiction', or 'neutral'.",
            ("entailment", "neutral", "contradiction"), ("premise", "hypothesis"),
            {"premise": "sentence1", "hypothesis": "sentence2"}, test_split="validation_matched",
        ),
        GlueTask(
            "mrpc", "MRPC",
            "Are the following sentences '{sentence1}' and '{sentence2}' conveying the same meaning? Answere with 'yes' or 'no'.",
            _NO_YES, _TWO, {},
        ),
        GlueTask(
            "qnli", "QNLI",
            "Given the context: '{sentence}', does the question '{question}' have an answer based on the information provided? "
            "Answer with 'yes' or 'no'.",
            _YES_NO, ("question", "sentence"), {"question": "sentence1", "sentence": "sentence2"},
        ),
        GlueTask(
            "qqp", "QQP",
            "Do the questions '{question1}' and '{question2}' have the same intent? Answere with 'yes' or 'no'.",
            _NO_YES, ("question1", "question2"), {"question1": "sentence1", "question2": "sentence2"},
        ),
        GlueTask(
            "rte", "RTE",
            "Does the text: '{sentence1}' entail that '{sentence2}' is true? Provide 'yes' or 'no'.",
            _YES_NO, _TWO, {},
        ),
        GlueTask(
            "sst2", "SST-2",
            "Given the sentence '{sentence}', determine the sentiment. Is it positive or negative?",
            ("negative", "positive"), _ONE, {"sentence": "text"},
        ),
        GlueTask(
            "stsb", "STS-B",
            "Consider the sentences '{sentence1}' and '{sentence2}'. On a scale from 1 (completely different) to 5 "
            "(completely similar), rate the similarity.",
            (), _TWO, {"label": "score"},
        ),
    )
}  # fmt: skip


def glue_task(key: str) -> GlueTask:
    """One task. Raises: UnknownKey with the nearest key."""
    if key not in GLUE:
        raise UnknownKey("task", key, list(GLUE))
    return GLUE[key]


def prompted(key: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """What the model reads and what it should answer; a label outside the map, such as -1, has an
    empty answer.

    Raises: BadData for a row without the task's columns; UnknownKey.
    """
    task = glue_task(key)
    texts = {name: str(_value(task, row, name)) for name in task.columns}
    return task.prompt.format(**texts), answer_of(task, _value(task, row, "label"))


def answer_of(task: GlueTask, label: float) -> str:
    """The answer of one label; of STS-B the score with one decimal."""
    if not task.answers:
        return f"{label:.1f}" if label >= 0 else ""
    return task.answers[int(label)] if 0 <= int(label) < len(task.answers) else ""


def _value(task: GlueTask, row: Mapping[str, Any], name: str) -> Any:
    """The column, by the alias where the row has that one: STS-B's binned label may stand beside
    its score.
    """
    for column in (task.aliases.get(name, name), name):
        if column in row:
            return row[column]
    problem = f"a row holds {', '.join(row) or 'nothing'}, but no {name}"
    raise BadData(task.key, problem, f"name the columns {', '.join((*task.columns, 'label'))}")
