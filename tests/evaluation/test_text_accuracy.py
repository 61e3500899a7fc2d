"""Accuracy on labelled texts by every way a model has of answering, against transformers' own
scores, text by text.
"""

import json
from pathlib import Path

import language
import pytest
import torch
import transformers as tf
from language import POSITIONS, VOCABULARY, jsonl, tokenizer
from tiny import TEXT, make

from featcal.cli import main as cli
from featcal.models.load import load_model
from featcal.models.save import save_model

NAMES = ("bad", "good", "neither of them")
SAMPLES = [
    ("the cat sat", "good"),
    ("a dog", "bad"),
    ("ships sail far away", "good"),
    ("red", "neither of them"),
    ("no", "bad"),
]
TARGETS = [{"input": text, "target": name} for text, name in SAMPLES]
LABELS = [{"text": text, "label": name} for text, name in SAMPLES]


def told(folder: Path, rows: list, capsys, *more: str) -> float:
    data = jsonl(folder / "rows.jsonl", rows)
    assert (
        cli.main(
            [
                "evaluate",
                "--model",
                str(folder / "m"),
                "--data",
                f"t={data}",
                "--batch",
                "2",
                "--json",
                *more,
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)["tasks"]["t"]
    assert found["texts"] == len(rows)
    return found["accuracy"]


def best(scores: dict[str, float]) -> str:
    return max(scores, key=lambda name: scores[name])


@pytest.mark.parametrize("rows", [TARGETS, LABELS], ids=["targets", "labels"])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_likeliest_label_is_the_answer_of_models_that_write(kind, rows, tmp_path, capsys):
    model, own = load_model(language.folder(tmp_path / "m", kind, 3)), tokenizer()
    space, right = "" if "target" in rows[0] else " ", 0
    for text, name in SAMPLES:
        scores = {}
        for label in NAMES:
            with torch.no_grad():
                if kind == "t5":
                    labels = torch.tensor([own(space + label)["input_ids"]])
                    scores[label] = (
                        -float(model(**own(text, return_tensors="pt"), labels=labels).loss)
                        * labels.shape[1]
                    )
                else:
                    ids = torch.tensor([own(text + space + label)["input_ids"]])
                    masked = ids.clone()
                    masked[:, : len(text)] = -100  # a token is a byte
                    scores[label] = -float(model(input_ids=ids, labels=masked).loss) * (
                        ids.shape[1] - len(text)
                    )
        right += best(scores) == name
    assert told(tmp_path, rows, capsys) == pytest.approx(100 * right / len(SAMPLES))


def test_a_classifier_answers_by_its_own_names(tmp_path, capsys):
    names = {0: "neither of them", 1: "GOOD", 2: "bad"}
    config = tf.BertConfig(
        **TEXT | POSITIONS | {"vocab_size": VOCABULARY},
        id2label=names,
        label2id={v: k for k, v in names.items()},
    )
    save_model(
        make(lambda: tf.BertForSequenceClassification(config), 0, torch.float32), tmp_path / "m"
    )
    tokenizer().save_pretrained(tmp_path / "m")
    model, right = load_model(tmp_path / "m"), 0
    for text, name in SAMPLES:
        with torch.no_grad():
            right += (
                names[int(model(**tokenizer()(text, return_tensors="pt")).logits.argmax())].lower()
                == name
            )
    assert told(tmp_path, LABELS, capsys) == pytest.approx(100 * right / len(SAMPLES))
    numbered = [{"text": text, "label": NAMES.index(name)} for text, name in SAMPLES]
    assert told(tmp_path, numbered, capsys, "--classes", f"t={','.join(NAMES)}") == pytest.approx(
        100 * right / len(SAMPLES)
    )
    data = jsonl(
        tmp_path / "rows.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    )
    assert cli.main(["evaluate", "--model", str(tmp_path / "m"), "--data", f"t={data}"]) == 2
    assert "id2label" in capsys.readouterr().err


def test_an_encoder_answers_with_the_nearest_label_by_the_mean_over_tokens(tmp_path, capsys):
    model, own = load_model(language.folder(tmp_path / "m", "bert", 3)), tokenizer()

    def vector(text):
        with torch.no_grad():
            return torch.nn.functional.normalize(
                model(**own(text, return_tensors="pt")).last_hidden_state[0].mean(0), dim=0
            )

    heads = {name: vector(f"it is {name}") for name in NAMES}
    right = sum(
        best({n: float(vector(text) @ head) for n, head in heads.items()}) == name
        for text, name in SAMPLES
    )
    assert told(tmp_path, LABELS, capsys, "--template", "it is {}") == pytest.approx(
        100 * right / len(SAMPLES)
    )


def test_rows_without_labels_or_with_unknown_ones_are_named(tmp_path, capsys):
    language.folder(tmp_path / "m", "bert", 3)
    for rows, more, said in (
        ([{"text": "a"}], [], "line 1: has no label"),
        (
            [{"text": "a", "label": "x"}, {"text": "b", "label": "z"}],
            ["--classes", "t=x,y"],
            "'z' is none",
        ),
        ([{"text": "a", "label": "x"}], [], "one label"),
    ):
        data = jsonl(tmp_path / "rows.jsonl", rows)
        assert (
            cli.main(["evaluate", "--model", str(tmp_path / "m"), "--data", f"t={data}", *more])
            == 2
        )
        assert said in capsys.readouterr().err
