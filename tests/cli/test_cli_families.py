"""`featcal calibrate` beyond CLIP: the weights are those of the call in Python."""

import json

import checkpoints
import language
import numpy as np
import pyarrow.parquet
import pytest
import tiny
import torch
import transformers as tf
from families import WIDE
from language import WORDS, jsonl, tokenizer
from PIL import Image
from safetensors.torch import load_file
from test_cli import refused
from tiny import VISION, make

import featcal
from featcal.cli import main as cli
from featcal.data.batches import PADDED, cut, draw_indices
from featcal.data.texts import TokenizedText
from featcal.models.load import save_model

COMMON = ["--ridge", "0.1", "--seed", "3", "--set", "batch=16", "--device", "cpu"]
SETTINGS = featcal.Calibration(ridge=0.1, anchor_blend=2.0, interpolation=0.3)
EXPERTS = ["--expert", "a=a", "--expert", "b=b"]
COMMAND = [*"calibrate --base base --merged merged --out new".split(), *EXPERTS, *COMMON]
TEXTS = ["--data", "a=a.jsonl", "--data", "b=b.jsonl"]
TEXT = [*COMMAND, "--samples", "9"]
ROWS = {
    "llama": [{"prompt": f"say {word}: ", "completion": word} for word in WORDS],
    "bert": [{"text": word} for word in WORDS],
    "t5": [{"input": f"say {word}", "target": word} for word in WORDS],
}


def oracle(kind, rows):
    """Return batches padded by the tokenizer alone, ordered and cut as by the command."""
    own = tokenizer()

    def padded(texts):
        return dict(own(texts, padding=True, return_tensors="pt"))

    texts = [
        row.get("text") or row.get("input") or row["prompt"] + row["completion"] for row in rows
    ]
    pairs = [(text, row.get("target", "")) for text, row in zip(texts, rows, strict=True)]
    pairs.sort(key=lambda pair: [-len(text) for text in pair])  # every letter is a token
    tokens = [[own(text)["input_ids"] for text in pair] for pair in pairs]
    read = [TokenizedText(ids, target if kind == "t5" else None) for ids, target in tokens]
    made = []
    for part in cut(read, 16, PADDED):
        chosen, pairs = pairs[: len(part)], pairs[len(part) :]
        batch = padded([text for text, _ in chosen])
        batch.pop("token_type_ids", None)
        if kind == "t5":
            targets = padded([target for _, target in chosen])
            batch["labels"] = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
        made.append(batch)
    return made


def written(folder):
    return load_file(folder / "model.safetensors")


def equals_the_call(folder, batches):
    """Check the weights in `new` against those of the call in Python."""
    given = {"experts": {"a": "a", "b": "b"}, "batches": batches, "settings": SETTINGS}
    called = featcal.calibrate("merged", base="base", **given).model
    assert written(folder / "new")
    for name, value in written(folder / "new").items():
        assert torch.equal(value, called.state_dict()[name]), name
    return called


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Makes the folders of one kind of model with data for it and enters them."""

    def ready(kind, **how):
        for seed, name in enumerate(("base", "a", "b", "merged")):
            language.folder(tmp_path / name, kind, seed, **how)
        for name in "ab":
            jsonl(tmp_path / f"{name}.jsonl", ROWS[kind])
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return ready


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_text_models_are_calibrated_as_by_the_call_in_python(texts, kind):
    folder = texts(kind)
    assert cli.main([*TEXT, *TEXTS]) == 0
    drawn = {name: [ROWS[kind][i] for i in draw_indices(name, 9, 9, 3)] for name in "ab"}
    called = equals_the_call(folder, {name: oracle(kind, rows) for name, rows in drawn.items()})
    assert (folder / "new/tokenizer.json").is_file()
    getattr(tf, type(called).__name__).from_pretrained(folder / "new")


DINO, SIGLIP = tf.Dinov2Config(**VISION, mlp_ratio=2), tf.SiglipVisionConfig(**WIDE)
VISIONS = {
    "vit": ("ViTImageProcessorPil", lambda: tf.ViTModel(tf.ViTConfig(**WIDE))),
    "dinov2": ("BitImageProcessorPil", lambda: tf.Dinov2Model(DINO)),
    "siglip": ("SiglipImageProcessorPil", lambda: tf.SiglipVisionModel(SIGLIP)),
}
SIDE = {"size": {"height": 16, "width": 16}}


@pytest.fixture
def flat(tmp_path, monkeypatch):
    """Makes the folders of one kind of vision model, with pictures that have no labels."""

    def ready(kind):
        processor, build = VISIONS[kind]
        crop = {"crop_size": SIDE["size"]} if kind == "dinov2" else {}
        made = getattr(tf, processor)(**SIDE, **crop)
        for seed, name in enumerate(("base", "a", "b", "merged")):
            save_model(make(build, seed, torch.float32), tmp_path / name)
            made.save_pretrained(tmp_path / name)
        for name in "ab":
            (tmp_path / "pictures" / name).mkdir(parents=True)
            for i in range(6):
                image = checkpoints.picture(size=(20, 24), seed=i)
                image.save(tmp_path / "pictures" / name / f"{i}.png")
        monkeypatch.chdir(tmp_path)
        return tmp_path, made

    return ready


PICTURES = [*COMMAND, *"--preset paper --samples 6".split()]
PICTURES += ["--data", "a=pictures/a", "--data", "b=pictures/b"]


@pytest.mark.parametrize("kind", sorted(VISIONS))
def test_vision_models_are_calibrated_on_a_flat_folder_of_pictures(flat, kind):
    folder, processor = flat(kind)
    assert cli.main(["calibrate", *PICTURES[1:]]) == 0
    batches = {}
    for name in "ab":
        paths = [f"pictures/{name}/{i}.png" for i in draw_indices(name, 6, 6, 3)]
        pixels = processor([Image.open(path) for path in paths], return_tensors="pt")
        batches[name] = [{"pixel_values": pixels["pixel_values"].float()}]
    equals_the_call(folder, batches)


def test_a_model_that_needs_code_from_its_folder_is_refused_unasked(texts, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    folder = texts("llama")
    config = json.loads((folder / "a/config.json").read_text())
    (folder / "a/own.py").write_text("raise SystemExit('run')")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    calibration = [*TEXT, *TEXTS]
    for changed in ({"model_type": "own", "auto_map": own}, {"auto_map": own}):
        (folder / "a/config.json").write_text(json.dumps(config | changed))
        for command in (["inspect", "a"], calibration, [*calibration, "--dry-run"]):
            assert "no code from a checkpoint is run" in refused(command, folder, capsys)
    same = {"AutoConfig": "own.LlamaConfig", "AutoModelForCausalLM": "own.LlamaForCausalLM"}
    (folder / "a/config.json").write_text(json.dumps(config | {"auto_map": same}))
    assert cli.main(calibration) == 0
    note = "a/config.json: auto_map names own.LlamaForCausalLM, which is not run"
    assert note in capsys.readouterr().err


def test_a_row_that_names_a_picture_outside_of_the_folder_is_refused(flat, capsys):
    folder, _ = flat("vit")
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / "secret.png")
    secret = str(folder / "secret.png")
    for i, path in enumerate(("../secret.png", secret, "https://example.org/x.png")):
        (folder / f"rows{i}").mkdir()
        kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
        rows = pyarrow.array([{"path": path, "bytes": None}] * 6, kind)
        table = pyarrow.table({"image": rows})
        pyarrow.parquet.write_table(table, folder / f"rows{i}" / "train.parquet")
        few = PICTURES[: PICTURES.index("--data")]
        command = [*few, "--data", f"a=rows{i}", "--data", f"b=rows{i}"]
        assert path[:40] in refused(command, folder, capsys)


def test_blocks_are_named_with_stack_and_norms_and_biases_left_out_with_switches(texts, capsys):
    """Of a model of several lists of blocks, which no class that is known tells apart."""
    folder = texts("bert")
    for seed, name in enumerate(("base", "a", "b", "merged")):
        sizes = {"vocab_size": language.VOCABULARY, "max_position_embeddings": 64}
        config = tf.DebertaConfig(**tiny.TEXT | sizes)
        model = make(lambda config=config: tf.DebertaModel(config), seed, torch.float32)
        save_model(model, folder / name)
        tokenizer().save_pretrained(folder / name)
    asked = [*TEXT, *TEXTS]
    assert "norm" in refused(asked, folder, capsys)
    message = refused([*asked, "--set", "stack=encoder.layers"], folder, capsys)
    assert "--set stack=PATH: encoder.layer" in message
    chosen = "--set norm=false --set bias=false --set stack=encoder.layer".split()
    assert cli.main([*asked, *chosen]) == 0
    before, after = written(folder / "merged"), written(folder / "new")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("LayerNorm" in name for name in moved)
    assert all(n.startswith("encoder.layer.") and n.endswith("weight") for n in moved)
