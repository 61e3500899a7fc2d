"""The paper's tasks: twenty of images; eight of GLUE, MergeBench's three domains and six tests of
language models. Their data sets on the hub, splits, class names and prompts.

Prompts of GLUE are those of the published experts to the letter, "Answere" included: another
wording is another input. MergeBench's texts are in the instruction format of Alpaca; the paper does
not say which texts it calibrated on. Of the six tests it names no settings: the counts behind its
scores (multiples of 1/500, 1/164, 1/378, 1/541) fix the data, one greedy answer each, and IFEval by
prompt; prompts, filters and metrics are assumptions, so that each has a name here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from featcal.errors import BadData, UnknownKey


@dataclass(frozen=True)
class Task:
    """One task. columns: the source's names of image and label, where they differ."""

    key: str
    column: str  # heading in the paper's tables
    hub_id: str
    config: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    columns: Mapping[str, str] = field(default_factory=dict)


_FER_COLUMNS = {"jpg": "image", "cls": "label"}  # a webdataset, named by file suffix

TASKS = {
    task.key: task
    for task in (
        Task("sun397", "SUN397", "tanganke/sun397"),
        Task("stanford-cars", "Cars", "tanganke/stanford_cars"),
        Task("resisc45", "RESISC45", "tanganke/resisc45"),
        Task("eurosat", "EuroSAT", "tanganke/eurosat"),
        Task("svhn", "SVHN", "ufldl-stanford/svhn", config="cropped_digits"),
        Task("gtsrb", "GTSRB", "tanganke/gtsrb"),
        Task("mnist", "MNIST", "ylecun/mnist"),
        Task("dtd", "DTD", "tanganke/dtd"),
        Task("oxford_flowers102", "Flowers", "dpdl-benchmark/oxford_flowers102"),
        Task("pcam", "PCAM", "1aurent/PatchCamelyon"),
        Task("fer2013", "FER", "clip-benchmark/wds_fer2013", columns=_FER_COLUMNS),
        Task("oxford-iiit-pet", "Pets", "timm/oxford-iiit-pet"),
        Task("stl10", "STL10", "tanganke/stl10"),
        Task("cifar100", "C100", "tanganke/cifar100"),
        Task("cifar10", "C10", "tanganke/cifar10"),
        Task("food101", "Food", "ethz/food101", test_split="validation"),  # has no test split
        Task("fashion_mnist", "F-MNIST", "zalando-datasets/fashion_mnist"),
        Task("emnist_letters", "EMNIST", "tanganke/emnist_letters"),
        Task("kmnist", "KMNIST", "tanganke/kmnist"),
        Task("rendered-sst2", "Rendered", "nateraw/rendered-sst2"),
    )
}

POOLS: dict[int, tuple[str, ...]] = {size: tuple(TASKS)[:size] for size in (8, 14, 20)}


@dataclass(frozen=True)
class Prompts:
    """Classes in the order of their labels, and templates with {} for the class."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]


def load_prompts(task: str) -> Prompts:
    """Return what the published experts of a task were trained with, to the letter.

    Underscores and misspellings stay: another spelling is another text feature. Raises: UnknownKey.
    """
    known = _all_prompts()
    if task not in known:
        raise UnknownKey("task", task, list(known))
    return Prompts(tuple(known[task]["classes"]), tuple(known[task]["templates"]))


@cache
def _all_prompts() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        files("reproduction.prepare").joinpath("prompts.json").read_text("utf-8")
    )
    return content


HUB_ID = "nyu-mll/glue"  # earlier `glue`; the configuration is the task's key


@dataclass(frozen=True)
class GlueTask:
    """One task of GLUE as generated text.

    prompt: with the names of its columns in braces.   answers: by label; none where the answer is
    the label as a number.   aliases: columns of other collections, by the hub's name.
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
    """Return one task. Raises: UnknownKey."""
    if key not in GLUE:
        raise UnknownKey("task", key, list(GLUE))
    return GLUE[key]


def prompted(key: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Return prompt and answer of a row; the answer of a label outside the map, such as -1, is empty.

    Raises: BadData for a row without the task's columns; UnknownKey.
    """
    task = glue_task(key)
    texts = {name: str(_value(task, row, name)) for name in task.columns}
    return task.prompt.format(**texts), answer_of(task, _value(task, row, "label"))


def answer_of(task: GlueTask, label: float) -> str:
    """Return the answer of a label; for STS-B the score with one decimal."""
    if not task.answers:
        return f"{label:.1f}" if label >= 0 else ""
    return task.answers[int(label)] if 0 <= int(label) < len(task.answers) else ""


def _value(task: GlueTask, row: Mapping[str, Any], name: str) -> Any:
    """Return a column, the alias first: a row of STS-B may hold its score and a binned label."""
    for column in (task.aliases.get(name, name), name):
        if column in row:
            return row[column]
    problem = f"a row holds {', '.join(row) or 'nothing'}, but no {name}"
    raise BadData(task.key, problem, f"name the columns {', '.join((*task.columns, 'label'))}")


DRESS = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Domain:
    """One domain: its small held-out set on the hub, whose only split is train, and its columns."""

    hub_id: str
    prompt: str
    completion: str


DOMAINS = {
    "coding": Domain("MergeBench/coding_val", "instruction", "response"),
    "math": Domain("MergeBench/math_val", "query", "response"),
    "instruction": Domain("MergeBench/instruction_val", "instruction", "output"),
}


def domain_text(key: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Return prompt and completion of a row, which it has or which are made from its columns.

    Raises: UnknownKey; BadData for a row without the columns.
    """
    if {"prompt", "completion"} <= set(row):
        return str(row["prompt"]), str(row["completion"])
    if key not in DOMAINS:
        raise UnknownKey("domain", key, list(DOMAINS))
    domain = DOMAINS[key]
    for column in (domain.prompt, domain.completion):
        if column not in row:
            problem = f"a row holds {', '.join(row) or 'nothing'}, but no {column}"
            raise BadData(key, problem, "name the columns prompt and completion")
    return DRESS.format(prompt=row[domain.prompt]), str(row[domain.completion])


@dataclass(frozen=True)
class PublicTest:
    """A task of lm-evaluation-harness, by its names; `file` is below its tasks.

    data, config, split: its data set on the hub.   needs: modules that it imports and the harness
    does not install.   runs: whether it runs generated programs.
    """

    data: str
    split: str
    task: str
    metric: str
    filter: str
    file: str
    config: str | None = None
    needs: tuple[str, ...] = ()
    runs: bool = False


_MATH = "HuggingFaceH4/MATH-500", "test"
_MINERVA = "minerva_math/minerva_math500.yaml", "default", ("sympy", "math_verify", "antlr4")
_GSM8K = "openai/gsm8k", "test", "gsm8k_cot", "exact_match"
_IFEVAL = "ifeval/ifeval.yaml", None, ("langdetect", "immutabledict", "nltk")
_ARC = "allenai/ai2_arc", "test"
PUBLIC: Mapping[str, PublicTest] = {
    "math500": PublicTest(*_MATH, "minerva_math500", "exact_match", "none", *_MINERVA),
    "gsm8k": PublicTest(*_GSM8K, "flexible-extract", "gsm8k/gsm8k-cot.yaml", "main"),
    "humaneval_plus": PublicTest(
        "evalplus/humanevalplus", "test", "humaneval_plus", "pass@1", "create_test",
        "humaneval/humaneval_plus.yaml", runs=True,
    ),
    "mbpp_plus": PublicTest(
        "evalplus/mbppplus", "test", "mbpp_plus", "pass_at_1", "none", "mbpp/mbpp_plus.yaml",
        runs=True,
    ),
    "ifeval": PublicTest(
        "google/IFEval", "train", "ifeval", "prompt_level_strict_acc", "none", *_IFEVAL
    ),
    "arc_challenge": PublicTest(
        *_ARC, "arc_challenge_chat", "exact_match", "remove_whitespace",
        "arc/arc_challenge_chat.yaml", "ARC-Challenge",
    ),
    # the same data, asked or counted in other ways
    "math500_verified": PublicTest(*_MATH, "minerva_math500", "math_verify", "none", *_MINERVA),
    "math500_plain": PublicTest(
        *_MATH, "hendrycks_math500", "exact_match", "none",
        "hendrycks_math/hendrycks_math500.yaml", "default",
    ),
    "gsm8k_strict": PublicTest(*_GSM8K, "strict-match", "gsm8k/gsm8k-cot.yaml", "main"),
    "mbpp_plus_instruct": PublicTest(
        "evalplus/mbppplus", "test", "mbpp_plus_instruct", "pass_at_1", "extract_code",
        "mbpp/mbpp_plus_instruct.yaml", runs=True,
    ),
    "ifeval_loose": PublicTest(
        "google/IFEval", "train", "ifeval", "prompt_level_loose_acc", "none", *_IFEVAL
    ),
    "arc_challenge_llama": PublicTest(
        *_ARC, "arc_challenge_llama", "exact_match", "strict_match",
        "llama3/instruct/arc_challenge/arc_challenge_llama.yaml", "ARC-Challenge",
    ),
}  # fmt: skip
