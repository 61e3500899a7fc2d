"""Streamed models give the bits of whole ones and unload all they load; models that differ are refused."""

import threading
from functools import partial

import checkpoints
import families
import pytest
import tiny
import torch
import transformers as tf
from families import KINDS
from folders import batch_for, folder_of, loaded_bytes, nothing_left, outputs, present, same, whole
from tiny import TEXT, clip, make

import featcal
from featcal.errors import FeatCalError, MissingTensor, TensorsDiffer, TruncatedFile
from featcal.merging.merge import merge
from featcal.models import streamed as of_streamed
from featcal.models.load import save_model
from featcal.models.streamed import InMemoryModel, StreamedModel, in_turn


@pytest.mark.parametrize(
    ("family", "way", "dtype"),
    [(family, "transformers", torch.float32) for family in KINDS]
    + [(family, "featcal", torch.float64) for family in ("t5", "gpt2", "clip")],
)
def test_a_streamed_forward_gives_the_bits_of_the_whole_model(family, way, dtype, tmp_path):
    folder, batch = folder_of(tmp_path / "m", family, dtype, way), batch_for(family, dtype)
    model, streamed = whole(folder, family, dtype), StreamedModel(folder, dtype=dtype)
    with loaded_bytes() as loaded, streamed.running() as module:
        result = outputs(module, batch)
    assert same(result, outputs(model, batch)) and nothing_left(streamed)
    assert same(dict(streamed.module.named_buffers()), dict(model.named_buffers()))
    assert loaded.now == 0 < loaded.peak < sum(p.nbytes for p in model.parameters())


def test_nothing_stays_loaded_after_an_exception(tmp_path):
    streamed = StreamedModel(folder_of(tmp_path / "m", "llama"))
    last = streamed.module.get_submodule("model.layers.1.mlp.down_proj")
    broken = last.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), streamed.running() as module:
        outputs(module, batch_for("llama"))
    with pytest.raises(KeyError), streamed.block("model.layers.0"):
        raise KeyError
    broken.remove()
    assert nothing_left(streamed)


def test_a_part_of_a_block_runs_by_itself_and_changes_to_a_block_are_lost(tmp_path):
    folder, path = folder_of(tmp_path / "m", "llama"), "model.layers.0"
    streamed, model, x = StreamedModel(folder), whole(folder, "llama"), torch.ones(1, 32)
    with streamed.running() as module:
        out = module.get_submodule(f"{path}.mlp")(x)
        assert not any("layers" in name for name in present(streamed))
    assert torch.equal(out, model.get_submodule(f"{path}.mlp")(x)) and nothing_left(streamed)
    for _ in range(2):
        with torch.no_grad(), streamed.block(path) as block:
            assert same(block, model.get_submodule(path))
            assert present(streamed) == {f"{path}.{name}" for name in block.state_dict()}
            for parameter in block.parameters():
                parameter.zero_()
    assert nothing_left(streamed)


@pytest.mark.parametrize("broken", [True, False])
def test_an_error_or_an_early_end_leaves_neither_threads_nor_blocks(tmp_path, broken):
    folders = {n: checkpoints.vision_folder(tmp_path / n, int(n)) for n in "012"}
    models = {name: StreamedModel(folder) for name, folder in folders.items()}
    if broken:
        file = folders["1"] / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-40_000])
    turns = in_turn(models, "encoder.layers.1")
    assert next(turns)[0] == "0" and reading()
    if broken:  # raised where the block is taken
        with pytest.raises(TruncatedFile, match="cut short"):
            next(turns)
    else:
        turns.close()
    assert all(nothing_left(model) for model in models.values()) and not reading()


def reading():
    return [thread for thread in threading.enumerate() if thread.name.startswith("featcal-read")]


def test_models_that_do_not_fit_each_other_are_refused_by_name(tmp_path):
    sizes = {"narrow": {}, "wide": {"width": 64}, "deep": {"num_hidden_layers": 3}}
    folders = (save_model(clip(dtype=torch.float32, **s), tmp_path / n) for n, s in sizes.items())
    narrow, wide, deep = map(StreamedModel, folders)
    in_memory = InMemoryModel(whole(tmp_path / "narrow", "clip"))
    of_streamed.require_same_tensors({"merged": narrow, "expert 'a'": in_memory})
    more = r"no tensor named 'encoder\.layers\.2\."
    for merged, expert, error, said in (
        (narrow, wide, TensorsDiffer, r"embedding: \[32\] in merged, but \[64\] in expert 'b'"),
        (narrow, deep, MissingTensor, f"merged: {more}"),
        (deep, narrow, MissingTensor, f"expert 'b': {more}"),
    ):
        with pytest.raises(error, match=said):
            of_streamed.require_same_tensors({"merged": merged, "expert 'b'": expert})
    berts = {str(own): tf.BertModel(tf.BertConfig(**TEXT), own) for own in (True, False)}
    pooled = {name: InMemoryModel(bert) for name, bert in berts.items()}
    for models in (pooled, dict(reversed(pooled.items()))):
        of_streamed.require_same_tensors(models, ["encoder.layer"])
        with pytest.raises(MissingTensor, match=r"False: no tensor named 'pooler\."):
            of_streamed.require_same_tensors(models)


def test_families_whose_tensors_have_the_same_names_and_shapes_are_not_mixed():
    """RoBERTa and BERT differ in their class only."""
    sizes = TEXT | {"max_position_embeddings": 16}
    bert = make(lambda: tf.BertModel(tf.BertConfig(**sizes)))
    roberta = make(lambda: tf.RobertaModel(tf.RobertaConfig(**sizes)))
    assert bert.state_dict().keys() == roberta.state_dict().keys()
    said = "BertModel in base, but RobertaModel in expert 'a'"
    handles = {"base": InMemoryModel(bert), "expert 'a'": InMemoryModel(roberta)}
    with pytest.raises(TensorsDiffer, match=said):
        of_streamed.require_same_tensors(handles)
    with pytest.raises(TensorsDiffer, match=said):
        featcal.merge("average", bert, {"a": roberta})


BASE = {
    "llama": lambda **more: tf.LlamaConfig(**families.GROUPED | more),
    "bert": lambda **more: tf.BertConfig(**tiny.TEXT | more),
    "gemma": lambda text={}: tf.Gemma3Config(text_config={"num_hidden_layers": 2} | text),
    "gemma4": tf.Gemma4TextConfig,  # whose layers differ in size
    "modernbert": partial(tf.ModernBertConfig, architectures=["ModernBertForTokenClassification"]),
    "scaled": lambda **more: tf.LlamaConfig(rope_scaling={"type": "dynamic", "factor": 2}, **more),
}


@pytest.mark.parametrize(
    ("family", "change", "key"),
    [
        ("llama", {"rope_theta": 2e7}, r"rope_parameters\.rope_theta: 2.*7|rope_theta: 20000000"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type: 'linear'"),
        ("llama", {"num_attention_heads": 8, "head_dim": 4}, "num_attention_heads: 8 and 4"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu' and 'silu'"),
        ("llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps: 0.001"),
        ("bert", {"is_decoder": True}, "is_decoder: True and False"),
        ("bert", {"layer_norm_eps": 1e-5}, "layer_norm_eps: 1e-05 and 1e-12"),
        ("gemma", {"text": {"sliding_window": 7}}, r"text_config\.sliding_window: 7 and 4096"),
        ("gemma4", {"sliding_window": 7}, "sliding_window: 7 and 512"),
        ("modernbert", {"classifier_pooling": "mean"}, "classifier_pooling: 'mean' and 'cls'"),
        ("scaled", {"max_position_embeddings": 64}, "max_position_embeddings: 64 and 2048"),
    ],
)
def test_keys_that_change_features_are_listed_with_values_and_models(family, change, key):
    own = BASE[family]
    with pytest.raises(FeatCalError, match=f"^two and one: .*{key}"):
        of_streamed.require_same_configs({"one": own(), "two": own(**change)})


def test_harmless_keys_pass():
    change = {"dtype": "bfloat16", "use_cache": False, "id2label": {0: "a"}, "architectures": ["B"]}
    change |= {"vocab_size": 99, "pad_token_id": 3, "bos_token_id": 5, "head_dim": None}
    change |= {"max_position_embeddings": 4096, "attention_dropout": 0.1, "hidden_act": "swish"}
    change |= {"initializer_range": 0.5, "of_another_tool": 3, "_name_or_path": "there"}
    of_streamed.require_same_configs({"one": BASE["llama"](), "two": BASE["llama"](**change)})
    base = tf.ModernBertConfig(classifier_pooling="mean", architectures=["ModernBertForMaskedLM"])
    of_streamed.require_same_configs({"base": base, "expert": BASE["modernbert"]()})
    windows = (tf.Qwen2Config(max_window_layers=n, sliding_window=n) for n in (21, 28))  # unused
    of_streamed.require_same_configs(dict(zip("ab", windows, strict=True)))
    ropes = ({"rope_scaling": {key: "linear", "factor": 2}} for key in ("type", "rope_type"))
    of_streamed.require_same_configs({str(rope): BASE["llama"](**rope) for rope in ropes})


def test_a_tower_is_compared_with_its_part_of_a_whole_model():
    whole = tf.CLIPConfig(vision_config=tiny.VISION)
    tower = tf.CLIPVisionConfig(**tiny.VISION)
    of_streamed.require_same_configs({"one": whole, "two": tower, "three": None})
    other = tf.CLIPVisionConfig(**tiny.VISION, hidden_act="gelu")
    for configs in ({"one": whole, "two": other}, {"one": other, "two": whole}):
        with pytest.raises(FeatCalError, match="hidden_act"):
            of_streamed.require_same_configs(configs)


def test_merge_calibrate_and_compare_refuse_an_expert_that_computes_differently(tmp_path):
    folders = {n: checkpoints.vision_folder(tmp_path / n, i) for i, n in enumerate("abc")}
    config = folders["b"] / "config.json"
    config.write_text(config.read_text().replace('"quick_gelu"', '"gelu"'))
    base, experts = folders["a"], {n: folders[n] for n in "bc"}
    batches = {n: tiny.images(1, dtype=torch.float32, size=32) for n in "bc"}
    more = {"experts": experts, "batches": batches}
    for run in (
        lambda: merge("average", base, experts, out=tmp_path / "out"),
        lambda: merge("average", base, {n: checkpoints.vision(1) for n in "b"} | experts),
        lambda: featcal.calibrate(base, base=base, settings=tiny.PAPER, **more),
        lambda: featcal.compare({"merged": base}, **more),
    ):
        with pytest.raises(FeatCalError, match="expert 'b'.*hidden_act"):
            run()
    assert not (tmp_path / "out").exists()
