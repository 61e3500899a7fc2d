"""`featcal calibrate` beyond CLIP: the weights are those of the call in Python."""

import json
from functools import partial

import checkpoints
import language
import pytest
import tiny
import torch
import transformers as tf
from families import WIDE
from language import WORDS, jsonl, tokenizer
from PIL import Image
from test_cli import here, refused
from test_worked_paths import tensors
from tiny import VISION, make

import featcal
from featcal.cli import main as cli
from featcal.data.batches import PADDED, cut, draw_indices
from featcal.data.texts import TokenizedText
from featcal.models.load import save_model

SETTINGS = featcal.Calibration(ridge=0.1, anchor_blend=2.0, interpolation=0.3)
COMMAND = "calibrate --base base --merged merged --out new --expert a=a --expert b=b".split()
COMMAND += "--ridge 0.1 --seed 3 --set batch=16 --device cpu".split()
TEXT = [*COMMAND, *"--samples 9 --data a=a.jsonl --data b=b.jsonl".split()]
ROWS = {
    "llama": [{"prompt": f"say {word}: ", "completion": word} for word in WORDS],
    "bert": [{"text": word} for word in WORDS],
    "t5": [{"input": f"say {word}", "target": word} for word in WORDS],
}


def oracle(kind, rows):
    """Return batches padded by the tokenizer alone, ordered and cut as by the command."""
    own = tokenizer()
    padded = partial(own, padding=True, return_tensors="pt")
    texts = [r.get("text") or r.get("input") or r["prompt"] + r["completion"] for r in rows]
    pairs = [(text, row.get("target", "")) for text, row in zip(texts, rows, strict=True)]
    pairs.sort(key=lambda pair: [-len(text) for text in pair])  # every letter is a token
    tokens = [[own(text)["input_ids"] for text in pair] for pair in pairs]
    read = [TokenizedText(ids, target if kind == "t5" else None) for ids, target in tokens]
    made = []
    for part in cut(read, 16, PADDED):
        chosen, pairs = pairs[: len(part)], pairs[len(part) :]
        batch = dict(padded([text for text, _ in chosen]))
        batch.pop("token_type_ids", None)
        if kind == "t5":
            targets = padded([target for _, target in chosen])
            batch["labels"] = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
        made.append(batch)
    return made


def equals_the_call(folder, batches):
    given = {"experts": {"a": "a", "b": "b"}, "batches": batches, "settings": SETTINGS}
    called = featcal.calibrate("merged", base="base", **given).model
    assert tensors(folder / "new")
    for name, value in tensors(folder / "new").items():
        assert torch.equal(value, called.state_dict()[name]), name
    return called


def texts(folder, kind):
    for seed, name in enumerate(("base", "a", "b", "merged")):
        language.folder(folder / name, kind, seed)
    for name in "ab":
        jsonl(folder / f"{name}.jsonl", ROWS[kind])
    return folder


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_text_models_are_calibrated_as_by_the_call_in_python(here, kind):
    folder = texts(here, kind)
    assert cli.main(TEXT) == 0
    drawn = {name: [ROWS[kind][i] for i in draw_indices(name, 9, 9, 3)] for name in "ab"}
    called = equals_the_call(folder, {name: oracle(kind, rows) for name, rows in drawn.items()})
    assert (folder / "new/tokenizer.json").is_file()
    getattr(tf, type(called).__name__).from_pretrained(folder / "new")


DINO, SIGLIP = tf.Dinov2Config(**VISION, mlp_ratio=2), tf.SiglipVisionConfig(**WIDE)
NAMING, PROCESSOR = tf.SiglipConfig(vision_config=WIDE), "SiglipImageProcessorPil"
VISIONS = {
    "vit": ("ViTImageProcessorPil", lambda: tf.ViTModel(tf.ViTConfig(**WIDE))),
    "dinov2": ("BitImageProcessorPil", lambda: tf.Dinov2Model(DINO)),
    "siglip": (PROCESSOR, lambda: tf.SiglipVisionModel(SIGLIP)),
    "siglip_classes": (PROCESSOR, lambda: tf.SiglipForImageClassification(NAMING)),
}
SIDE = {"size": {"height": 16, "width": 16}}


def flat(folder, kind):
    processor, build = VISIONS[kind]
    made = getattr(tf, processor)(**SIDE, **{"crop_size": SIDE["size"]} if kind == "dinov2" else {})
    for seed, name in enumerate(("base", "a", "b", "merged")):
        save_model(make(build, seed, torch.float32), folder / name)
        made.save_pretrained(folder / name)
    for name in "ab":
        (folder / "pictures" / name).mkdir(parents=True)
        for i in range(6):
            checkpoints.picture(size=(20, 24), seed=i).save(f"pictures/{name}/{i}.png")
    return folder, made


PICTURES = [*COMMAND, *"--preset paper --samples 6 --data a=pictures/a --data b=pictures/b".split()]


@pytest.mark.parametrize("kind", sorted(VISIONS))
def test_vision_models_are_calibrated_on_a_flat_folder_of_pictures(here, kind):
    folder, processor = flat(here, kind)
    assert cli.main(["calibrate", *PICTURES[1:]]) == 0
    batches = {}
    for name in "ab":
        paths = [f"pictures/{name}/{i}.png" for i in draw_indices(name, 6, 6, 3)]
        pixels = processor([Image.open(path) for path in paths], return_tensors="pt")
        batches[name] = [{"pixel_values": pixels["pixel_values"].float()}]
    equals_the_call(folder, batches)


def test_a_model_that_needs_code_from_its_folder_is_refused_unasked(here, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    folder = texts(here, "llama")
    config = json.loads((folder / "a/config.json").read_text())
    (folder / "a/own.py").write_text("raise SystemExit('run')")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    for changed in ({"model_type": "own", "auto_map": own}, {"auto_map": own}):
        (folder / "a/config.json").write_text(json.dumps(config | changed))
        for command in (["inspect", "a"], TEXT, [*TEXT, "--dry-run"]):
            assert "no code from a checkpoint is run" in refused(command, folder, capsys)
    same = {"AutoConfig": "own.LlamaConfig", "AutoModelForCausalLM": "own.LlamaForCausalLM"}
    (folder / "a/config.json").write_text(json.dumps(config | {"auto_map": same}))
    note = "a/config.json: auto_map names own.LlamaForCausalLM, which is not run"
    compare = "compare --model m=a --base base --expert b=b --data b=b.jsonl".split()
    for command in (TEXT, compare):
        assert cli.main(command) == 0 and capsys.readouterr().err.count(note) == 1


def test_a_classifier_of_pictures_which_pools_nothing_is_refused_for_class_means(here, capsys):
    folder, _ = flat(here, "siglip_classes")
    (folder / "train").symlink_to("pictures")
    command = "evaluate --model merged --class-means base --data t=. --set split=train".split()
    assert "give a model that pools its features" in refused(command, folder, capsys)
    assert "is for texts, but SiglipFor" in refused([*command, "--tokens", "3"], folder, capsys)


def test_blocks_are_named_with_stack_and_norms_and_biases_left_out_with_switches(here, capsys):
    """Of a model of several lists of blocks, which no class that is known tells apart."""
    folder = texts(here, "bert")
    sizes = {"vocab_size": language.VOCABULARY, "max_position_embeddings": 64}
    config = tf.DebertaConfig(**tiny.TEXT | sizes)
    for seed, name in enumerate(("base", "a", "b", "merged")):
        save_model(make(lambda: tf.DebertaModel(config), seed, torch.float32), folder / name)
        tokenizer().save_pretrained(folder / name)
    assert "norm" in refused(TEXT, folder, capsys)
    message = refused([*TEXT, "--set", "stack=encoder.layers"], folder, capsys)
    assert "--set stack=PATH: encoder.layer" in message
    chosen = "--set norm=false --set bias=false --set stack=encoder.layer".split()
    assert cli.main([*TEXT, *chosen]) == 0
    before, after = tensors(folder / "merged"), tensors(folder / "new")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("LayerNorm" in name for name in moved)
    assert all(n.startswith("encoder.layer.") and n.endswith("weight") for n in moved)
