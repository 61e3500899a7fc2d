"""What comes along beside the weights: a written folder reads words as its source did, and keeps
the modules around the model.
"""

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
from featcal.models.save import beside, copy_beside, save_model

SAID = "the cat sat far away"
LONG = TEXT | {"max_position_embeddings": 64}


def pieces(file: Path, **more) -> None:
    """A SentencePiece model of the words."""
    made = io.BytesIO()
    how = {"vocab_size": 40, "minloglevel": 2, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 20), model_writer=made, **how, **more
    )
    file.write_bytes(made.getvalue())


def lines(*tokens: str) -> str:
    return "\n".join(tokens) + "\n"


def word_pieces(folder: Path) -> None:
    words = sorted(set(" ".join(WORDS).split()))
    (folder / "vocab.txt").write_text(lines("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words))


def byte_pairs(folder: Path) -> None:
    tokens = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
        *"abcdefghijklmnopqrstuvwxyz",
        "Ġ",
        "th",
        "the",
    ]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text(lines("#version: 0.2", "t h", "th e"))


# By the only file (or two) that its tokenizer has: the model, what writes the file.
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
NOT_CALIBRATED = ("spm.model",)  # DeBERTa's attention is none that can be replayed


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Makes base and experts whose tokenizer is only that file, with texts, and enters their
    folder.
    """

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


EXPERTS = ["--expert", "a=a", "--expert", "b=b", "--quiet"]
DATA = [
    "--data",
    "a=a.jsonl",
    "--data",
    "b=b.jsonl",
    "--samples",
    "9",
    "--batch",
    "16",
    "--device",
    "cpu",
]
CALIBRATE = ["calibrate", "--base", "base", "--merged", "merged", *EXPERTS, *DATA, "--out", "new"]


def encoded(folder: Path, words: Path) -> torch.Tensor:
    """Features of the words by the model of one folder and the tokenizer of another."""
    model = load_model(folder)
    with torch.no_grad():
        return model(
            **load_tokenizer(words)(SAID, return_tensors="pt", return_token_type_ids=False)
        ).last_hidden_state


@pytest.mark.parametrize("form", FORMS)
def test_a_merged_and_a_calibrated_folder_read_words_as_the_base_did(form, folders):
    folders(form)
    tokenizer = load_tokenizer("base")
    ids = tokenizer(SAID)["input_ids"]
    assert len(set(ids)) > 4 and tokenizer.unk_token_id not in ids
    assert cli.main(["merge", "average", "--base", "base", *EXPERTS, "--out", "merged"]) == 0
    if form not in NOT_CALIBRATED:
        assert cli.main(CALIBRATE) == 0
    for out in ("merged",) if form in NOT_CALIBRATED else ("merged", "new"):
        assert load_tokenizer(out)(SAID)["input_ids"] == ids
        assert (Path(out) / form).read_bytes() == (Path("base") / form).read_bytes()
        assert torch.equal(encoded(out, out), encoded(out, "base"))


@pytest.mark.parametrize("merged", ["folder", "module"])
def test_a_calibrated_folder_reads_words_however_the_merged_model_was_given(merged, folders):
    folders("vocab.txt")
    featcal.merge("average", "base", ["a", "b"], out="merged")
    given = "merged" if merged == "folder" else load_model("merged")
    batches = {
        name: [dict(load_tokenizer("base")([SAID, "a dog"], padding=True, return_tensors="pt"))]
        for name in "ab"
    }
    featcal.calibrate(
        given, base="base", experts={"a": "a", "b": "b"}, batches=batches, settings=PAPER, out="new"
    )
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
    """The vector of a text as the folder's modules.json says: tokens of model, their mean, a dense
    layer, unit length.
    """
    found = torch.empty(0)
    for part in json.loads((folder / "modules.json").read_text()):
        here, kind = folder / part["path"], part["type"].rsplit(".", 1)[1]
        if kind == "Transformer":
            given = load_tokenizer(here)(SAID, return_tensors="pt")
            with torch.no_grad():
                found = model(**given).last_hidden_state
        elif kind == "Pooling":
            assert json.loads((here / "config.json").read_text())["pooling_mode_mean_tokens"]
            found = (found * given["attention_mask"][..., None]).sum(1) / given[
                "attention_mask"
            ].sum(1, keepdim=True)
        elif kind == "Dense":
            found = found @ load_file(here / "model.safetensors")["linear.weight"].T
        else:
            found = torch.nn.functional.normalize(found, dim=-1)
    return found


def test_a_sentence_transformer_keeps_its_modules_and_encodes_as_the_same_weights_with_the_bases_modules(
    folders,
):
    folders("vocab.txt")
    sentence_folder(Path("base"))
    assert cli.main(["merge", "average", "--base", "base", *EXPERTS, "--out", "merged"]) == 0
    assert cli.main(CALIBRATE) == 0
    for out in (Path("merged"), Path("new")):
        kept = [*SENTENCES, "2_Dense/model.safetensors", "vocab.txt"]
        assert all((out / name).read_bytes() == (Path("base") / name).read_bytes() for name in kept)
        assert torch.equal(sentence(load_model(out), out), sentence(load_model(out), Path("base")))
    before, after = (sentence(load_model(out), out) for out in (Path("base"), Path("merged")))
    in_memory = featcal.merge("average", load_model("base"), [load_model(name) for name in "ab"])
    torch.testing.assert_close(after, sentence(in_memory, Path("base")), rtol=0, atol=1e-6)
    assert after.shape == before.shape == (1, 8) and not torch.allclose(
        before, after, rtol=0, atol=1e-3
    )


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode": ["max", "mean"]},
        {"pooling_mode": "lasttoken"},
    ],
)
def test_pooled_features_are_the_vectors_of_sentence_transformers(pooling, folders):
    """Of a calibrated SentenceTransformer, loaded by that library itself."""
    library = pytest.importorskip("sentence_transformers")
    folders("vocab.txt")
    sentence_folder(Path("base"))
    width = 64 if len(pooling.get("pooling_mode", "")) == 2 else 32
    Path("base/1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 32} | pooling)
    )
    dense = {
        "in_features": width,
        "out_features": 8,
        "bias": False,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    Path("base/2_Dense/config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": torch.eye(8, width) + 0.1}, Path("base/2_Dense/model.safetensors"))
    assert (
        cli.main(["merge", "average", "--base", "base", *EXPERTS, "--out", "merged"])
        == cli.main(CALIBRATE)
        == 0
    )
    texts = [SAID, "a dog", "red the end of it"]
    batch = dict(load_tokenizer("new")(texts, padding=True, return_tensors="pt"))
    ours = Sentences.of_folder("new").vectors(load_model("new"), batch)
    theirs = library.SentenceTransformer("new", device="cpu").encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_pooled_features_are_those_that_the_folder_s_modules_describe(folders):
    folders("vocab.txt")
    sentence_folder(Path("base"))
    Path("base/2_Dense/config.json").write_text(
        '{"activation_function": "torch.nn.modules.linear.Identity"}'
    )
    batch = dict(load_tokenizer("base")(SAID, return_tensors="pt"))
    torch.testing.assert_close(
        Sentences.of_folder("base").vectors(load_model("base"), batch),
        sentence(load_model("base"), Path("base")),
    )
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


def test_all_but_weights_cards_and_records_comes_along(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    for name in (*COPIED, *LEFT):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    os.symlink(source, source / "again")
    copy_beside(source, out)
    assert sorted(
        file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()
    ) == sorted(COPIED)
    assert all((out / name).read_text() == name for name in COPIED)
    assert sorted(path.as_posix() for path in beside(source)) == sorted(COPIED)


def test_a_file_that_is_a_link_comes_as_what_it_links_to(tmp_path):
    """The hub's cache holds nothing but links."""
    for name in ("blobs", "snapshot", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "blobs/1").write_text("words")
    (tmp_path / "snapshot/vocab.txt").symlink_to("../blobs/1")
    copy_beside(tmp_path / "snapshot", tmp_path / "out")
    assert (tmp_path / "out/vocab.txt").read_text() == "words" and not (
        tmp_path / "out/vocab.txt"
    ).is_symlink()


def test_the_card_of_the_source_is_not_the_card_of_the_result(folders):
    folders("vocab.txt")
    Path("base/README.md").write_text("a card of the base")
    save_model(load_model("base"), "saved", like="base")
    assert not Path("saved/README.md").exists()
    assert cli.main(["merge", "average", "--base", "base", *EXPERTS, "--out", "merged"]) == 0
    assert "a card of the base" not in Path("merged/README.md").read_text()


def test_a_clip_converted_there_and_back_keeps_its_tokenizer_and_takes_no_configuration_of_the_other_form(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    checkpoints.clip_folder(Path("clip"))
    Path("clip/LICENSE").write_text("terms")
    Path("clip/README.md").write_text("a card of the source")
    assert (
        cli.main(["convert", "clip", "--out", "there"])
        == cli.main(["convert", "there", "--out", "back"])
        == 0
    )
    names = {
        folder: {file.name for file in Path(folder).iterdir()}
        for folder in ("clip", "there", "back")
    }
    assert names["back"] == names["clip"] - {"README.md"}
    assert (
        names["there"] & {"config.json", "README.md"} == set()
        and {"tokenizer.json", "LICENSE"} <= names["there"]
    )
    assert load_tokenizer("there")(SAID)["input_ids"] == load_tokenizer("clip")(SAID)["input_ids"]


@pytest.mark.parametrize("content", ["{", "[1]", '[{"idx": 0}]', '[{"path": 3}]', "3"])
def test_modules_that_tell_no_parts_are_refused_by_name(content, folders, capsys):
    folders("vocab.txt")
    Path("base/modules.json").write_text(content)
    with pytest.raises(BadFile, match=r"modules\.json"):
        featcal.merge("average", "base", ["a", "b"], out="merged")
    assert not Path("merged").exists()
