"""Files of a folder besides its weights: a written folder has its source's tokenizer and modules."""

import io
import json
import os
from pathlib import Path

import checkpoints
import pytest
import sentencepiece
import torch
import transformers as tf
from families import T5
from language import WORDS, jsonl
from safetensors.torch import load_file, save_file
from tiny import PAPER, TEXT, make, shifted

import featcal
from featcal.cli import main as cli
from featcal.errors import BadFile
from featcal.evaluation.texts import Sentences
from featcal.models.load import load_model, load_tokenizer
from featcal.models.save import copy_other_files, other_files, save_model

SAID = "the cat sat far away"
LONG = TEXT | {"max_position_embeddings": 64}


def pieces(file: Path, **more) -> None:
    """Write a SentencePiece model of the words."""
    made = io.BytesIO()
    options = {"vocab_size": 40, "minloglevel": 2, "hard_vocab_limit": False} | more
    words = iter(WORDS * 20)
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=words, model_writer=made, **options)
    file.write_bytes(made.getvalue())


def word_pieces(folder: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(" ".join(WORDS).split()))]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")


def byte_pairs(folder: Path) -> None:
    tokens = [
        *"<s> <pad> </s> <unk> <mask>".split(),
        *"abcdefghijklmnopqrstuvwxyz",
        "Ġ",
        "th",
        "the",
    ]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")


# By the file of its tokenizer: the model, and the function that writes the file.
FORMS = {
    "vocab.txt": (lambda: tf.BertModel(tf.BertConfig(**LONG)), word_pieces),
    "merges.txt": (lambda: tf.RobertaModel(tf.RobertaConfig(**LONG)), byte_pairs),
    "sentencepiece.bpe.model": (
        lambda: tf.XLMRobertaModel(tf.XLMRobertaConfig(**LONG)),
        lambda folder: pieces(folder / "sentencepiece.bpe.model"),
    ),
    "spm.model": (
        lambda: tf.DebertaV2Model(tf.DebertaV2Config(**LONG)),
        lambda folder: pieces(folder / "spm.model"),
    ),
    "spiece.model": (
        lambda: tf.T5EncoderModel(tf.T5Config(**T5)),
        lambda folder: pieces(folder / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
    ),
    "tokenizer.model": (
        lambda: tf.LlamaModel(tf.LlamaConfig(**LONG)),
        lambda folder: pieces(folder / "tokenizer.model", model_type="bpe"),
    ),
}
NOT_CALIBRATED = ("spm.model",)  # DeBERTa's attention cannot be replayed


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Make base and experts with one tokenizer file, and texts, in the current folder."""

    def ready(form: str) -> None:
        build, write = FORMS[form]
        base = make(build, 0, torch.float32)
        for seed, name in enumerate(("base", "a", "b")):
            save_model(shifted(base, seed, 0.05) if seed else base, tmp_path / name)
        write(tmp_path / "base")
        for name in "ab":
            jsonl(tmp_path / f"{name}.jsonl", [{"text": word} for word in WORDS])
        monkeypatch.chdir(tmp_path)

    return ready


EXPERTS = ["--expert", "a=a", "--expert", "b=b"]
DATA = "--data a=a.jsonl --data b=b.jsonl --samples 9 --set batch=16 --device cpu".split()
CALIBRATE = ["calibrate", "--base", "base", "--merged", "merged", *EXPERTS, *DATA, "--out", "new"]


MERGE = ["merge", "average", "--base", "base", *EXPERTS, "--out", "merged"]


def encoded(folder: Path, words: Path) -> torch.Tensor:
    """Return the words' features by the model of one folder and the tokenizer of another."""
    tokens = load_tokenizer(words)(SAID, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        return load_model(folder)(**tokens).last_hidden_state


@pytest.mark.parametrize("form", FORMS)
def test_merged_and_calibrated_folders_have_the_tokenizer_of_the_base(form, folders):
    folders(form)
    tokenizer = load_tokenizer("base")
    ids = tokenizer(SAID)["input_ids"]
    assert len(set(ids)) > 4 and tokenizer.unk_token_id not in ids
    assert cli.main(MERGE) == 0
    if form not in NOT_CALIBRATED:
        assert cli.main(CALIBRATE) == 0
    for out in ("merged",) if form in NOT_CALIBRATED else ("merged", "new"):
        assert load_tokenizer(out)(SAID)["input_ids"] == ids
        assert (Path(out) / form).read_bytes() == (Path("base") / form).read_bytes()
        assert torch.equal(encoded(out, out), encoded(out, "base"))


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_calibrated_folder_has_the_tokenizer_whatever_the_merged_model_is(as_folder, folders):
    folders("vocab.txt")
    featcal.merge("average", "base", ["a", "b"], out="merged")
    merged = "merged" if as_folder else load_model("merged")
    batch = dict(load_tokenizer("base")([SAID, "a dog"], padding=True, return_tensors="pt"))
    named = {"experts": {"a": "a", "b": "b"}, "batches": {"a": [batch], "b": [batch]}}
    featcal.calibrate(merged, base="base", **named, settings=PAPER, out="new")
    assert load_tokenizer("new")(SAID)["input_ids"] == load_tokenizer("base")(SAID)["input_ids"]


PARTS = ("", "1_Pooling", "2_Dense", "3_Normalize")
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
SENTENCES = {
    "modules.json": [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                     for i, (path, kind) in enumerate(zip(PARTS, KINDS, strict=True))],
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "the "}, "similarity_fn_name": "cosine"},
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
    "2_Dense/config.json": {"in_features": 32, "out_features": 8, "bias": False},
    "3_Normalize/config.json": {},
}  # fmt: skip


def sentence_folder(folder: Path) -> None:
    for name, content in SENTENCES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    save_file({"linear.weight": torch.eye(8, 32) + 0.1}, folder / "2_Dense/model.safetensors")


def sentence(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """Return a text's vector as modules.json says: tokens, their mean, a dense layer, unit length."""
    x = torch.empty(0)
    for part in json.loads((folder / "modules.json").read_text()):
        path, kind = folder / part["path"], part["type"].rsplit(".", 1)[1]
        if kind == "Transformer":
            tokens = load_tokenizer(path)(SAID, return_tensors="pt")
            with torch.no_grad():
                x = model(**tokens).last_hidden_state
        elif kind == "Pooling":
            assert json.loads((path / "config.json").read_text())["pooling_mode_mean_tokens"]
            mask = tokens["attention_mask"]
            x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        elif kind == "Dense":
            x = x @ load_file(path / "model.safetensors")["linear.weight"].T
        else:
            x = torch.nn.functional.normalize(x, dim=-1)
    return x


def test_a_sentence_transformer_keeps_its_modules_and_encodes_with_them(folders):
    folders("vocab.txt")
    sentence_folder(Path("base"))
    assert cli.main(MERGE) == cli.main(CALIBRATE) == 0
    for out in (Path("merged"), Path("new")):
        kept = [*SENTENCES, "2_Dense/model.safetensors", "vocab.txt"]
        assert all((out / name).read_bytes() == (Path("base") / name).read_bytes() for name in kept)
        assert torch.equal(sentence(load_model(out), out), sentence(load_model(out), Path("base")))
    before, after = (sentence(load_model(out), out) for out in (Path("base"), Path("merged")))
    in_memory = featcal.merge("average", load_model("base"), [load_model(name) for name in "ab"])
    torch.testing.assert_close(after, sentence(in_memory, Path("base")), rtol=0, atol=1e-6)
    assert after.shape == before.shape == (1, 8)
    assert not torch.allclose(before, after, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode": ["max", "mean"]},
        {"pooling_mode": "lasttoken"},
    ],
)
def test_vectors_of_a_calibrated_folder_are_those_of_sentence_transformers(pooling, folders):
    library = pytest.importorskip("sentence_transformers")
    folders("vocab.txt")
    sentence_folder(Path("base"))
    width = 64 if len(pooling.get("pooling_mode", "")) == 2 else 32
    pooling |= {"word_embedding_dimension": 32}
    Path("base/1_Pooling/config.json").write_text(json.dumps(pooling))
    dense = {"in_features": width, "out_features": 8, "bias": False}
    dense |= {"activation_function": "torch.nn.modules.activation.Tanh"}
    Path("base/2_Dense/config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": torch.eye(8, width) + 0.1}, Path("base/2_Dense/model.safetensors"))
    assert cli.main(MERGE) == cli.main(CALIBRATE) == 0
    texts = [SAID, "a dog", "red the end of it"]
    batch = dict(load_tokenizer("new")(texts, padding=True, return_tensors="pt"))
    ours = Sentences.of_folder("new").vectors(load_model("new"), batch)
    theirs = library.SentenceTransformer("new", device="cpu").encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_unknown_pooling_is_an_error(folders):
    folders("vocab.txt")
    sentence_folder(Path("base"))
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    Path("base/2_Dense/config.json").write_text(json.dumps(identity))
    batch = dict(load_tokenizer("base")(SAID, return_tensors="pt"))
    model = load_model("base")
    ours = Sentences.of_folder("base").vectors(model, batch)
    torch.testing.assert_close(ours, sentence(model, Path("base")))
    Path("base/1_Pooling/config.json").write_text('{"pooling_mode_weightedmean_tokens": true}')
    with pytest.raises(BadFile, match="weightedmean"):
        Sentences.of_folder("base")


COPIED = (
    "LICENSE", "words.dat", "prompts/query.txt", "additional_chat_templates/tools.jinja", "assets/readme.png",
    "1_Pooling/README.md",
)  # fmt: skip
LEFT = (
    "README.md", "readme.rst", "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx",
    "training_args.bin", "optimizer.pt", "scheduler.PT", "merge.json", "featcal.json", "mergekit_config.yml",
    "adapter_config.json", ".gitattributes", ".git/config", ".cache/huggingface/x.json", "__pycache__/code.pyc",
    "onnx/model.onnx", "onnx/config.json", "onnx/more/x.txt", "checkpoint-5/model.safetensors", "checkpoint-5/vocab.txt",
)  # fmt: skip


def test_all_files_but_weights_cards_and_records_are_copied(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    for name in (*COPIED, *LEFT):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    os.symlink(source, source / "again")
    copy_other_files(source, out)
    copied = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert copied == set(COPIED) == {path.as_posix() for path in other_files(source)}
    assert all((out / name).read_text() == name for name in COPIED)


def test_links_to_files_are_copied_as_files(tmp_path):
    """The hub's cache holds nothing but links."""
    for name in ("blobs", "snapshot", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "blobs/1").write_text("words")
    (tmp_path / "snapshot/vocab.txt").symlink_to("../blobs/1")
    copy_other_files(tmp_path / "snapshot", tmp_path / "out")
    copied = tmp_path / "out/vocab.txt"
    assert copied.read_text() == "words" and not copied.is_symlink()


def test_the_card_of_the_source_is_not_copied(folders):
    folders("vocab.txt")
    Path("base/README.md").write_text("a card of the base")
    save_model(load_model("base"), "saved", like="base")
    assert not Path("saved/README.md").exists()
    assert cli.main(MERGE) == 0
    assert "a card of the base" not in Path("merged/README.md").read_text()


def test_a_converted_clip_keeps_its_tokenizer_but_not_the_config_of_the_other_form(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    checkpoints.clip_folder(Path("clip"))
    Path("clip/LICENSE").write_text("terms")
    Path("clip/README.md").write_text("a card of the source")
    assert cli.main(["convert", "clip", "--out", "there"]) == 0
    assert cli.main(["convert", "there", "--out", "back"]) == 0
    clip, there, back = ({f.name for f in Path(n).iterdir()} for n in ("clip", "there", "back"))
    assert back == clip - {"README.md"} and not there & {"config.json", "README.md"}
    assert {"tokenizer.json", "LICENSE"} <= there
    assert load_tokenizer("there")(SAID)["input_ids"] == load_tokenizer("clip")(SAID)["input_ids"]


@pytest.mark.parametrize("content", ["{", "[1]", '[{"idx": 0}]', '[{"path": 3}]', "3"])
def test_an_unreadable_modules_json_is_an_error(content, folders):
    folders("vocab.txt")
    Path("base/modules.json").write_text(content)
    with pytest.raises(BadFile, match=r"modules\.json"):
        featcal.merge("average", "base", ["a", "b"], out="merged")
    assert not Path("merged").exists()
