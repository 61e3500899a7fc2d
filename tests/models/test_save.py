"""Written folders appear whole or not at all, and have the other files of their source."""

import errno
import json
import os
import signal
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock, patch

import checkpoints
import peft
import pytest
import torch
import transformers as tf
from language import WORDS, jsonl
from safetensors.torch import load_file, save_file
from tiny import PAPER, TEXT, make, same_bits, shifted

import featcal
from featcal.cli import main as cli
from featcal.errors import BadFile, DiskFull, TruncatedFile
from featcal.files import atomic_folder, atomic_path, write_json
from featcal.models import load
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.load import load_model, load_tokenizer, save_model
from featcal.models.lora import dense_folder, dense_model
from featcal.models.sentences import Sentences, Texts, dense_layer, merge_modules

TENSORS = {
    "b.weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "a.bias": torch.linspace(-1, 1, 7).to(torch.bfloat16),
    "count": torch.tensor(3),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
}


def written(folder, state=TENSORS, limit=load.LIMIT):
    with patch.object(load, "LIMIT", limit), load.shard_writer(folder) as shards:
        for name, tensor in state.items():
            shards.write(name, tensor)
    return folder


@pytest.mark.parametrize("renames", [1, 2])
def test_an_interrupt_right_after_a_rename_leaves_one_whole_folder(tmp_path, monkeypatch, renames):
    move, moved = featcal.files._move, []

    def interrupted(*paths):
        move(*paths)
        moved.append(paths)
        if len(moved) == renames:
            raise KeyboardInterrupt

    (tmp_path / "model").mkdir()
    with monkeypatch.context() as in_use, atomic_folder(tmp_path / "model"):
        in_use.setattr(os, "rmdir", Mock(side_effect=OSError(errno.ENOTEMPTY, "in use")))
    monkeypatch.setattr(featcal.files, "_move", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "model"):
        pass
    assert (tmp_path / "model").is_dir()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "x")])
def test_a_failed_write_leaves_the_old_file_and_a_finished_one_replaces_it(tmp_path, error):
    target, folder = tmp_path / "scores.csv", tmp_path / "model"
    target.write_text("old")
    with pytest.raises(type(error)), atomic_path(target) as hidden:
        hidden.write_text("half")
        raise error
    for name in ("first", "second"):
        with atomic_folder(folder) as hidden:
            (hidden / name).write_text(name)
    assert sorted(os.listdir(tmp_path)) == ["model", "scores.csv"]
    assert target.read_text() == "old" and os.listdir(folder) == ["second"]


def killed_while_writing(folder):
    with atomic_folder(folder) as path, load.shard_writer(path) as inside:
        (inside.folder / "half").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_is_removed_by_the_next_write_and_nothing_else(tmp_path):
    name = "model.v2"
    (tmp_path / name).mkdir()  # an older one
    process = get_context("fork").Process(target=killed_while_writing, args=(tmp_path / name,))
    process.start()
    process.join()
    left = {path.name for path in tmp_path.iterdir()} - {name}
    assert len(left) == 2 and all(path.startswith(".") for path in left)
    others = {f".{name}.unfinished", ".model2.7-0.part", "model.7-0.part", ".model.old.v2"}
    for other in others:
        (tmp_path / other).mkdir()
    with atomic_folder(tmp_path / name) as mine, atomic_folder(tmp_path / name):
        assert mine.is_dir()  # the second leaves the first alone
    assert {path.name for path in tmp_path.iterdir()} == {name, *others}


@pytest.mark.parametrize("replaced", [True, False])
def test_an_older_folder_is_removed_only_once_it_is_replaced(tmp_path, replaced):
    """A process that dies between the two renames leaves only the older folder."""
    for name in (".model.7-0.old", *["model"] * replaced):
        (tmp_path / name).mkdir()
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "model"):
        raise KeyboardInterrupt
    assert (tmp_path / ".model.7-0.old").exists() is not replaced


def test_a_full_disk_is_reported_with_the_final_path_and_leaves_nothing(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(DiskFull, match="77 bytes") as error,
        atomic_folder(tmp_path / "out") as out,
        atomic_path(out / "model" / "config.json", 77),
    ):
        raise full
    assert error.value.path == tmp_path / "out" / "model" / "config.json"
    monkeypatch.setattr("featcal.models.load.shutil.copyfileobj", Mock(side_effect=full))
    with pytest.raises(DiskFull, match="model"):
        written(tmp_path / "model")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EXDEV])
@pytest.mark.parametrize("there", [False, True])
def test_a_file_system_without_rename_is_one_message(tmp_path, monkeypatch, code, there):
    names = ["out"] * there
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(code, "no rename")))
    with pytest.raises(BadFile, match="out: .*cannot rename"), atomic_folder(tmp_path / "out"):
        pass
    with pytest.raises(BadFile, match="record.json: .*cannot rename"):
        write_json(tmp_path / "record.json", {})
    assert [path.name for path in tmp_path.iterdir()] == names


def test_only_folders_of_models_are_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("mine")
    for taken in (tmp_path / "notes/a.txt", tmp_path / "notes"):
        with pytest.raises(BadFile, match="name a new folder"):
            written(taken)
    assert (tmp_path / "notes/a.txt").read_text() == "mine"
    assert written(written(tmp_path / "model")).is_dir()
    for name in ("others", ".git"):  # a collection of weights, and a repository
        (tmp_path / "model" / name).mkdir()
        with pytest.raises(BadFile, match="it is not replaced"):
            written(tmp_path / "model")
        (tmp_path / "model/config.json").touch()


def test_a_configuration_without_its_optional_part_is_written(tmp_path):
    model = make(lambda: tf.EsmModel(tf.EsmConfig(**TEXT, mask_token_id=1)), dtype=torch.float32)
    assert same_bits(load_model(save_model(model, tmp_path / "esm")), model)


@pytest.mark.parametrize("limit", [10**9, 70, 1])
def test_written_tensors_are_read_back_in_any_order_of_writing_and_not_mapped(tmp_path, limit):
    folder = written(tmp_path / "model", limit=limit)
    checkpoint = LazyCheckpoint(folder)
    assert list(checkpoint) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        lazy, read = checkpoint[name], checkpoint[name].read()
        assert torch.equal(read, tensor) and read.untyped_storage().nbytes() == tensor.nbytes
        assert (lazy.shape, lazy.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert lazy.nbytes == tensor.nbytes and lazy.file.name.startswith("model")
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()  # mapped pages count as memory of this process
    back = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
    assert (folder / "model.safetensors").exists() == (limit == 10**9)
    other = written(tmp_path / "other", dict(reversed(TENSORS.items())), limit=limit)
    one, two = ({f.name: f.read_bytes() for f in each.iterdir()} for each in (folder, other))
    assert one == two


SAID = "the cat sat far away"
EXPERTS = ["--expert", "a=a", "--expert", "b=b"]
DATA = "--data a=a.jsonl --data b=b.jsonl --samples 9 --set batch=16 --device cpu".split()
CALIBRATE = ["calibrate", "--base", "base", "--merged", "merged", *EXPERTS, *DATA, "--out", "new"]
MERGE = ["merge", "average", "--base", "base", *EXPERTS, "--out", "merged"]


@pytest.fixture
def folders(tmp_path, monkeypatch) -> None:
    """Make base and experts, the base with a tokenizer file, and texts, in the current folder."""
    monkeypatch.chdir(tmp_path)
    config = tf.BertConfig(**TEXT | {"max_position_embeddings": 64})
    base = make(lambda: tf.BertModel(config), 0, torch.float32)
    for seed, name in enumerate(("base", "a", "b")):
        save_model(shifted(base, seed, 0.05) if seed else base, name)
        jsonl(Path(f"{name}.jsonl"), [{"text": word} for word in WORDS])
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(" ".join(WORDS).split()))]
    Path("base/vocab.txt").write_text("\n".join(tokens) + "\n")


def test_merged_and_calibrated_folders_have_the_tokenizer_of_the_base(folders):
    Path("base/README.md").write_text("a card of the base")
    tokenizer = load_tokenizer("base")
    ids = tokenizer(SAID)["input_ids"]
    assert len(set(ids)) > 4 and tokenizer.unk_token_id not in ids
    assert cli.main(MERGE) == cli.main(CALIBRATE) == 0
    batch = dict(tokenizer([SAID, "a dog"], padding=True, return_tensors="pt"))
    named = {"experts": {"a": "a"}, "batches": {"a": [batch]}, "settings": PAPER, "base": "base"}
    featcal.calibrate(load_model("merged"), **named, out="of_a_module")
    for out in ("merged", "new", "of_a_module"):
        assert load_tokenizer(out)(SAID)["input_ids"] == ids
        assert "a card of the base" not in (Path(out) / "README.md").read_text()
    assert Path("new/config.json").read_bytes() == Path("merged/config.json").read_bytes()


PARTS = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
SENTENCES = {
    "modules.json": [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(PARTS.items())
    ],
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "the "}},
    "3_Normalize/config.json": {},
}


def sentence_folder(folder: Path, pooling: dict) -> None:
    width = 64 if 2 in (len(pooling), len(pooling.get("pooling_mode", ""))) else 32
    pooling = pooling | {"word_embedding_dimension": 32}
    dense = {"in_features": width, "out_features": 8, "bias": False}
    dense |= {"activation_function": "torch.nn.modules.activation.Tanh"}
    configs = {"1_Pooling/config.json": pooling, "2_Dense/config.json": dense}
    for name, content in (SENTENCES | configs).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    save_file({"linear.weight": torch.eye(8, width) + 0.1}, folder / "2_Dense/model.safetensors")


@pytest.mark.parametrize(
    "value", "Linear init Threshold token_embeddings residual linear.weight".split()
)
def test_a_dense_layer_with_what_it_cannot_compute_here_is_refused(tmp_path, value):
    sentence_folder(tmp_path, {"pooling_mode": "mean"})
    config = {"residual": {"use_residual": True}, "token_embeddings": {"module_input_name": value}}
    config = config.get(value, {"activation_function": f"torch.nn.{value}"})
    if value == "linear.weight":
        config = {}
        save_file({"weight": torch.eye(2)}, tmp_path / "2_Dense/model.safetensors")
    (tmp_path / "2_Dense/config.json").write_text(json.dumps(config))
    with pytest.raises(BadFile, match=value):
        dense_layer(tmp_path / "2_Dense")


POOLINGS = [
    {"pooling_mode_cls_token": True},
    {"pooling_mode_mean_tokens": True},
    {"pooling_mode": ["mean", "max"]},
    {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},  # in the library's order
    {"pooling_mode_weightedmean_tokens": True},
    {"pooling_mode_mean_sqrt_len_tokens": True},
    {"pooling_mode": "lasttoken"},
]


def test_a_sentence_transformer_keeps_its_modules_and_encodes_with_them(folders):
    library = pytest.importorskip("sentence_transformers")
    sentence_folder(Path("base"), POOLINGS[0])
    assert cli.main(MERGE) == cli.main(CALIBRATE) == 0
    kept = [*SENTENCES, "2_Dense/model.safetensors", "1_Pooling/config.json", "vocab.txt"]
    for out in (Path("merged"), Path("new")):
        assert all((out / name).read_bytes() == (Path("base") / name).read_bytes() for name in kept)
        card = (out / "README.md").read_text()
        assert 'SentenceTransformer("path' in card and "library_name: sentence-trans" in card
    Path("base/config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    assert cli.main([*MERGE, "--force"]) == 0, "of another kind, which no such class loads"
    assert "SentenceTransformer(" not in Path("merged/README.md").read_text()
    assert Texts("The ", lower=True).prepared("A") == "the a"
    texts = [SAID, "a dog", "red the end of it"]
    batch = dict(load_tokenizer("new")(texts, padding=True, return_tensors="pt"))
    with torch.no_grad():
        hidden = load_model("new")(**batch).last_hidden_state
    for pooling in POOLINGS:
        sentence_folder(Path("new"), pooling)
        ours = Sentences.of_folder("new").vectors(hidden, batch["attention_mask"])
        encoder = library.SentenceTransformer("new", device="cpu")
        theirs = encoder.encode(texts, convert_to_tensor=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_weights_of_further_modules_are_averaged_or_refused(tmp_path, caplog):
    dense = "2_Dense/model.safetensors"
    folders = {name: tmp_path / name for name in ("base", "a", "b", "merged")}
    for i, (name, folder) in enumerate(folders.items()):
        folder.mkdir()
        sentence_folder(folder, {"pooling_mode": "cls" if name == "b" else "mean"})
        save_file({"linear.weight": torch.full((8, 32), float(i))}, folder / dense)
    base, merged, experts = folders["base"], folders["merged"], {n: folders[n] for n in "ab"}
    (merged / dense).unlink()
    sentences = merge_modules(base, experts, merged)
    assert (load_file(merged / dense)["linear.weight"] == 1.5).all()
    assert (merged / dense).stat().st_mode == (merged / "modules.json").stat().st_mode
    assert "Pooling" in sentences[0] and "differs in b" in sentences[0] and "Dense" in sentences[1]
    save_file({"linear.weight": torch.ones(9, 32)}, folders["b"] / dense)
    with pytest.raises(BadFile, match=r"'b' has no tensor linear\.weight of shape \[8, 32\]"):
        merge_modules(base, experts)
    (folders["a"] / dense).write_bytes(b"cut short")
    with pytest.raises(TruncatedFile, match=f"a/{dense}"):
        merge_modules(base, experts)
    (base / "modules.json").unlink()
    with pytest.raises(BadFile, match="expert 'a' has the module Dense"):
        merge_modules(base, experts)
    sentence_folder(base, {"pooling_mode_strange_tokens": True})
    with pytest.raises(BadFile, match="strange"):
        Sentences.of_folder(base)
    assert Sentences.or_mean(base) == Sentences.or_mean(base) == Sentences()
    assert caplog.text.count("compared by the mean over tokens") == 1


def test_what_becomes_of_experts_modules_is_said_where_no_folder_can_hold_them(folders):
    for name in ("base", "a", "b"):
        sentence_folder(Path(name), {"pooling_mode": "cls" if name == "b" else "mean"})
    Path("b/sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    with pytest.warns(UserWarning, match=r"only in a folder .*'b' has another .* differs in b"):
        featcal.merge("average", "base", {"a": "a", "b": "b"})
    Path("base/modules.json").unlink()
    for name in "ab":
        Path(name, "modules.json").write_text(json.dumps(SENTENCES["modules.json"][:2]))
    assert cli.main(MERGE) == 0
    assert "The base is no SentenceTransformer" in Path("merged/README.md").read_text()


def test_modules_that_are_saved_with_an_adapter_are_the_expert_s(folders):
    how = peft.LoraConfig(r=2, target_modules=["query"])
    peft.get_peft_model(load_model("base"), how).save_pretrained("lora")
    for name, mode in (("base", "mean"), ("lora", "cls")):
        sentence_folder(Path(name), {"pooling_mode": mode})
    folder = dense_folder(Path("base"), Path("lora"), Path("new"))
    assert Sentences.of_folder(folder).modes == ("cls",)


def test_of_an_adapter_of_a_whole_clip_the_vision_tower_is_read(tmp_path, caplog):
    how = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(checkpoints.clip(), how)
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"later": 1, "never": None}))
    tower = dense_model(checkpoints.vision(), tmp_path)
    assert same_bits(tower, adapted.merge_and_unload().vision_model)
    assert caplog.messages == [f"{file}: the installed peft ignores later"]


@pytest.mark.parametrize("lacking", ["2_Dense", "3_Normalize"])
def test_an_expert_that_lacks_a_module_with_weights_is_refused(folders, lacking, capsys):
    for name in ("base", "a"):
        sentence_folder(Path(name), {"pooling_mode": "mean"})
    listed = [part for part in SENTENCES["modules.json"] if part["path"] != lacking]
    Path("a/modules.json").write_text(json.dumps(listed))
    code, said = cli.main(MERGE), capsys.readouterr().err
    assert f"xpert 'a' lacks the base's module {PARTS[lacking]} ({lacking})" in said
    if lacking == "2_Dense":
        assert code == cli.MISTAKE and not Path("merged").exists()
    else:
        assert code == 0 and "lacks the base's module" in Path("merged/README.md").read_text()
        assert json.loads(Path("merged/modules.json").read_text()) == SENTENCES["modules.json"]


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
    (tmp_path / "blob").write_text("words")  # the hub's cache holds nothing but links
    (source / "vocab.txt").symlink_to("../blob")
    load.copy_other_files(source, out)
    copied = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert copied == {*COPIED, "vocab.txt"}
    assert all((out / name).read_text() == name for name in COPIED)
    assert (out / "vocab.txt").read_text() == "words" and not (out / "vocab.txt").is_symlink()


OLD = '[{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]'
OUTSIDE = '[{"path": "1/../../2", "type": "Dense"}]'


@pytest.mark.parametrize("content", ["{", '[{"idx": 0}]', '[{"path": 3}]', "3", OLD, OUTSIDE])
def test_an_unreadable_modules_json_is_an_error(tmp_path, content):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(BadFile, match=r"modules\.json"):
        load.copy_other_files(tmp_path, tmp_path / "out")
