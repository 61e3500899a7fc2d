"""What the suite `paper` reads: texts in the hub's columns, nltk's data, and all repositories."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
from encoders import dinov2, encoder
from rehearsal_images import PART, describe, drawn, image_data, image_models, write_table
from rehearsal_texts import LLAMAS, T5_SIZES, text_models

from reproduction.prepare.tasks import DOMAINS, GLUE, HUB_ID, TASKS

# rows of a train split, of one that is scored, and of a public test
TRAINED, SCORED, ASKED = (24, 8, 3)
WORDS = "a the old red ship cat dog sees two ships and sails away from here while no one knows why it is so".split()
SPLITS = ("train", "validation", "test")
OF_MNLI = ("train", *(f"{split}_{of}" for split in SPLITS[1:] for of in ("matched", "mismatched")))
METRIC = '''"""Counts programs that Python can read; runs none. Plays evaluate's metric of the same name in the rehearsal."""

import contextlib

import datasets
import evaluate


class CodeEval(evaluate.Metric):
    def _info(self):
        asked = {"predictions": datasets.Sequence(datasets.Value("string")), "references": datasets.Value("string")}
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=datasets.Features(asked))

    def _compute(self, predictions, references, k=(1,)):
        asked, readable = [program for programs in predictions for program in programs], 0
        for program in asked:
            with contextlib.suppress(SyntaxError, ValueError):
                readable += bool(compile(program, "<program>", "exec"))
        return {f"pass@{n}": readable / len(asked) for n in k}, {}
'''


def text_data(folder: Path) -> dict[str, Path]:
    """Every data set of texts, by its id on the hub."""
    found = {f"datasets/{HUB_ID}": _glue(folder / "glue")}
    for domain, known in DOMAINS.items():
        pairs = ((words(domain, i), words(domain, i, "answer")) for i in range(TRAINED))
        rows = [{known.prompt: asked, known.completion: answer} for asked, answer in pairs]
        found[f"datasets/{known.hub_id}"] = _written(folder / domain, {f"data/train{PART}": rows})
    for name, (files, row) in TESTS.items():
        rows = [row(i) for i in range(ASKED)]
        found[f"datasets/{name}"] = _written(folder / name, dict.fromkeys(files, rows))
    describe(folder / "openai/gsm8k", dict.fromkeys(("main", "socratic"), ["train", "test"]))
    describe(folder / "allenai/ai2_arc", dict.fromkeys(("ARC-Challenge", "ARC-Easy"), list(SPLITS)))
    return found


def metric(folder: Path) -> dict[str, Path]:
    """The space that evaluate loads code_eval from."""
    folder.mkdir(parents=True)
    (folder / "code_eval.py").write_text(METRIC)
    return {"spaces/evaluate-metric/code_eval": folder}


def words(*keys: str | int) -> str:
    return " ".join(str(word) for word in drawn(*keys).choice(WORDS, 6))


def _glue(folder: Path) -> Path:
    """A configuration for every task; labels of the test splits are not told."""
    configs = {key: list(OF_MNLI if key == "mnli" else SPLITS) for key in GLUE}
    for key, task in GLUE.items():
        for split in configs[key]:
            count, of = TRAINED if split == "train" else SCORED, len(task.answers)
            named = {n: [words(key, split, n, i) for i in range(count)] for n in task.columns}
            features: dict[str, Any] = dict.fromkeys(named, datasets.Value("string"))
            chosen = drawn(key, split).integers(0, max(of, 6), count).tolist()
            if task.answers:
                features["label"] = datasets.ClassLabel(names=list(task.answers))
                labels = [-1 if split.startswith("test") else n % of for n in chosen]
            else:
                features["label"] = datasets.Value("float32")
                labels = [float(n) * 5 / 6 for n in chosen]
            features["idx"] = datasets.Value("int32")
            columns = {**named, "label": labels, "idx": list(range(count))}
            table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
            write_table(folder / key / f"{split}{PART}", table)
    describe(folder, configs)
    return folder


def _written(folder: Path, files: Mapping[str, list[dict[str, Any]]]) -> Path:
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            write_table(path, datasets.Dataset.from_list(rows))
    return folder


def _math(i: int) -> dict[str, Any]:
    answer = ("\\frac{1}{2}", "(3, \\sqrt{2})", "42")[i % 3]
    told = {"problem": words("math", i), "solution": f"So it is $\\boxed{{{answer}}}$."}
    told |= {"answer": answer, "subject": "Algebra"}
    return told | {"level": 1, "unique_id": f"test/algebra/{i}.json"}


def _program(i: int) -> dict[str, Any]:
    header = f'def f{i}(x):\n    """Return {i} times x."""\n'
    told = {"task_id": f"HumanEval/{i}", "prompt": header, "entry_point": f"f{i}"}
    told |= {"canonical_solution": f"    return {i} * x\n"}
    return told | {"test": f"def check(candidate):\n    assert candidate(2) == {2 * i}\n"}


def _task(i: int) -> dict[str, Any]:
    tests = [f"assert f({n}) == {i * n}" for n in (1, 2, 3)]
    told = {"task_id": i, "code": f"def f(x):\n    return {i} * x\n", "source_file": "rows"}
    told |= {"prompt": f"Write a function f that returns {i} times x."}
    return told | {"test_imports": [], "test_list": tests, "test": "\n".join(tests)}


def _instruction(i: int) -> dict[str, Any]:
    """Return one of three sets of instructions, with different arguments."""
    few = {"capital_relation": "less than", "capital_frequency": 2}
    asked: tuple[dict[str, dict[str, Any]], ...] = (
        {"punctuation:no_comma": {}, "change_case:english_lowercase": {}},
        {"length_constraints:number_sentences": {"relation": "at least", "num_sentences": 2}},
        {"change_case:capital_word_frequency": few},
    )
    chosen = asked[i % len(asked)]
    told = {"key": 1000 + i, "prompt": f"{words('ifeval', i)} Do as you are told."}
    return told | {"instruction_id_list": list(chosen), "kwargs": list(chosen.values())}


def _science(i: int) -> dict[str, Any]:
    choices = {"text": [words("arc", i, letter) for letter in "ABCD"], "label": list("ABCD")}
    told = {"id": f"Mercury_{i}", "question": words("arc", i)}
    return told | {"choices": choices, "answerKey": "ABCD"[i % 4]}


def _parts(configs: tuple[str, ...], splits: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{config}/{split}{PART}" for config in configs for split in splits)


Rows = Callable[[int], dict[str, Any]]
TESTS: dict[str, tuple[tuple[str, ...], Rows]] = {
    "HuggingFaceH4/MATH-500": (("test.jsonl",), _math),
    "openai/gsm8k": (
        _parts(("main", "socratic"), ("train", "test")),
        lambda i: {"question": f"What is {i} + {i}?", "answer": f"It is {i} + {i}.\n#### {2 * i}"},
    ),
    "evalplus/humanevalplus": ((f"data/test{PART}",), _program),
    "evalplus/mbppplus": ((f"data/test{PART}",), _task),
    "google/IFEval": (("ifeval_input_data.jsonl",), _instruction),
    "allenai/ai2_arc": (_parts(("ARC-Challenge", "ARC-Easy"), SPLITS), _science),
}

# file -> its lines: pairs of words and counts are separated by tabs
ENGLISH = {
    "abbrev_types.txt": ("dr", "e.g", "i.e", "mr", "mrs"),
    "collocations.tab": ("st\tlouis",),
    "sent_starters.txt": ("the", "they", "this"),
    # cases and places a word was seen in, a sum of powers of two
    "ortho_context.tab": ("a\t46", "ship\t32", "the\t46"),
}


def punkt_tab(folder: Path) -> dict[str, str]:
    """Write it below `folder`; return the variables by which nltk finds it."""
    place = folder / "tokenizers/punkt_tab/english"
    place.mkdir(parents=True)
    for name, lines in ENGLISH.items():
        (place / name).write_text("".join(f"{line}\n" for line in lines))
    return {"NLTK_DATA": str(folder)}


Repositories = dict[str, Path | dict[str, Path]]
SIZES = ("base-patch32", "large-patch14")


def paper_hub(
    folder: Path,
    tasks: tuple[str, ...] = tuple(TASKS),
    sizes: tuple[str, ...] = SIZES,
    t5: tuple[str, ...] = tuple(T5_SIZES),
    llamas: tuple[str, ...] = tuple(LLAMAS),
) -> Repositories:
    """Folders by repository, as HubServer takes them; all of the suite unless fewer are named."""
    found = image_models(folder / "vision", sizes, tasks) | image_data(folder / "pictures", tasks)
    found |= text_models(folder / "language", t5, llamas) | text_data(folder / "texts")
    found["facebook/dinov2-small"] = dinov2(folder / "dinov2")
    found["sentence-transformers/all-MiniLM-L6-v2"] = encoder(folder / "minilm")
    return found | metric(folder / "metric")


def gated(repositories: Repositories) -> list[str]:
    """Those that need an account."""
    return [name for name in repositories if name.startswith("meta-llama/")]
