"""Names that transformers accepts for a model's tensors, and errors for what does not fit."""

import json

import checkpoints
import pytest
import torch
import transformers as tf
from checkpoints import renamed
from families import FAMILIES, GPT2, GROUPED, text
from folders import batch_for, folder_of, outputs, same, whole
from safetensors.torch import load_file, save_file
from tiny import TEXT, VISION, make

import featcal
from featcal.errors import FeatCalError, MissingTensor, WrongKeys
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.load import load_model, save_model
from featcal.models.stored import skeleton
from featcal.models.streamed import StreamedModel

ONES, OTHER = torch.ones(32), torch.linspace(-1, 1, 97 * 32).reshape(97, 32)
HEAD, SHARED = "lm_head.weight", "shared.weight"
NEAREST = r"m: no tensor named 'layers\.1\.mlp\.fc2\.weight'; nearest names: (\S+, ){2}\S+"


def links(folder):
    """Move the files of a folder as a cache of the hub has them."""
    blobs = folder.rename(folder.parent / "blobs")
    folder.mkdir()
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(f"../blobs/{file.name}")


def twice(folder):
    """Cut the file into shards that both hold one tensor, of which the index names the first."""
    file = folder / "model.safetensors"
    first, *_, last = sorted(state := load_file(file))
    index = {name: f"{int(name == first)}.safetensors" for name in state}
    save_file(state, folder / index[last])
    save_file({first: state[first], last: state[last] + 1}, folder / index[first])
    content = json.dumps({"metadata": {}, "weight_map": index})
    file.rename(folder / f"{file.name}.index.json").write_text(content)


def tied_as(kept):
    return lambda folder: renamed(folder, lambda n: f"{kept}.weight" if n == SHARED else n)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("clip_text", lambda folder: renamed(folder, lambda name: f"text_model.{name}")),
        ("bert", lambda folder: renamed(folder, lambda name: f"bert.{name}")),
        ("mistral", lambda folder: renamed(folder, lambda name: f"model.{name}")),
        ("dinov2", lambda folder: swiglu(folder)),  # a matrix stored whole is cut
        ("clip", links),
        ("bert", twice),
        ("t5", tied_as("lm_head")),
        ("t5", tied_as("encoder.embed_tokens")),
        ("t5", lambda folder: checkpoints.with_tensors(folder, {HEAD: OTHER})),  # untied
    ],
    ids="text_tower prefix causal fused hub_cache twice head encoder two_tables".split(),
)
def test_folders_of_any_names_compute_what_from_pretrained_computes(family, change, tmp_path):
    folder, batch = folder_of(tmp_path / "m", family), batch_for(family)
    change(folder)
    streamed = StreamedModel(folder)
    with streamed.running() as module:
        assert same(outputs(module, batch), outputs(whole(folder, family), batch))
    if head := LazyCheckpoint(folder).get(HEAD):
        with streamed.block("lm_head") as part:
            assert torch.equal(part.weight, head.read())


def test_an_encoder_without_a_pooler_is_read_as_one(tmp_path):
    bert = make(lambda: tf.BertModel(tf.BertConfig(**TEXT), add_pooling_layer=False))
    bert.float().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    with StreamedModel(tmp_path).running() as module:
        one, two, theirs = (m(**batch_for("bert"))[0] for m in (module, loaded, bert))
    assert one.equal(theirs) and two.equal(theirs) and module.pooler is loaded.pooler is None


def swiglu(folder):
    """Write a DINOv2 whose files hold gate and up projection as one matrix."""
    config = tf.Dinov2Config(**VISION, use_swiglu_ffn=True)
    make(lambda: tf.Dinov2Model(config), dtype=torch.float32).save_pretrained(folder)
    assert any("weights_in" in name for name in load_file(folder / "model.safetensors"))


def test_buffers_that_a_file_holds_are_read_from_it(tmp_path):
    config = tf.BartConfig(**SEQ2SEQ)
    model = make(lambda: tf.BartForConditionalGeneration(config), dtype=torch.float32)
    model.final_logits_bias += torch.arange(97)
    save_model(model, tmp_path)
    assert torch.equal(StreamedModel(tmp_path).module.final_logits_bias, model.final_logits_bias)


BROKEN = {"encoder.layer.0.mlp.weights_in.bias": torch.tensor(1.0)}


@pytest.mark.parametrize(
    ("family", "change", "error", "said"),
    [
        ("vit", {"layers.1.mlp.fc2.weight": None}, MissingTensor, NEAREST),
        ("t5", {"shared.weight": None}, MissingTensor, r"no tensor named 'shared\.weight'"),
        # there already, without the prefix
        ("bert", {"bert.pooler.dense.bias": ONES}, WrongKeys, r"1 not part of it: \S*dense\.bias"),
        (
            "dinov2",
            lambda m: checkpoints.with_tensors(swiglu(m) or m, BROKEN),
            FeatCalError,
            r"weights_in\.bias|gate_proj\.bias",
        ),
    ],
    ids=["missing", "tied", "twice", "parts"],
)
def test_tensors_that_do_not_fit_are_named(family, change, error, said, tmp_path):
    folder = folder_of(tmp_path / "m", family)
    change(folder) if callable(change) else checkpoints.with_tensors(folder, change)
    with pytest.raises(error, match=said):
        StreamedModel(folder)


@pytest.mark.parametrize("kind", ["deberta", "marian", "big_bird", "swin"])
def test_parameters_that_are_never_run_or_never_stored_are_loaded(tmp_path, kind):
    """DeBERTa reads a weight itself, BigBird replaces its attention, Swin's pooler has nothing."""
    make(KINDS[kind], dtype=torch.float32).save_pretrained(tmp_path)
    batch = batch_for({"marian": "t5", "swin": "vit"}.get(kind, "bert"))
    drawn = torch.get_rng_state()
    streamed = StreamedModel(tmp_path, ["encoder.layer"])
    assert torch.equal(torch.get_rng_state(), drawn)
    for _ in range(2):
        with streamed.running() as module:
            ours = outputs(module, batch)
    assert same(ours, outputs(load_model(tmp_path), batch))


SEQ2SEQ = {"vocab_size": 97, "max_position_embeddings": 64, "d_model": 32, "pad_token_id": 0}
for part in ("encoder", "decoder"):
    SEQ2SEQ |= {f"{part}_layers": 1, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
MOE = tf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
WINDOWS = {"image_size": 16, "patch_size": 8, "embed_dim": 16, "depths": [1], "num_heads": [2]}
NAMED = ("bert", "gpt2", "llama", "t5", "t5_gated", "vit")  # t5_gated has a head of its own
KINDS = {name: FAMILIES[name].build for name in NAMED} | {
    "deberta": lambda: tf.DebertaV2Model(tf.DebertaV2Config(**TEXT | RELATIVE)),
    "masked": lambda: tf.BertForMaskedLM(tf.BertConfig(**TEXT)),
    "whole": FAMILIES["bert"].build,
    "tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "flan": FAMILIES["t5_gated"].build,
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**SEQ2SEQ, decoder_start_token_id=0)),
    "swiglu": lambda: tf.Dinov2Model(tf.Dinov2Config(**VISION, use_swiglu_ffn=True)),
    "nomic": lambda: tf.NomicBertModel(tf.NomicBertConfig(**TEXT)),
    "mixtral": lambda: tf.MixtralForCausalLM(MOE),
    "gpt_neo": lambda: tf.GPTNeoForCausalLM(tf.GPTNeoConfig(vocab_size=97, hidden_size=32, **NEO)),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**GPT2, rotary_dim=4)),
    "mra": lambda: tf.MraModel(tf.MraConfig(**TEXT)),  # stores the positions 2, 3, …
    "pvt": lambda: tf.PvtModel(tf.PvtConfig(hidden_sizes=[8] * 4, num_attention_heads=[1] * 4)),
    "big_bird": lambda: tf.BigBirdModel(tf.BigBirdConfig(**TEXT)),
    "swin": lambda: tf.SwinModel(tf.SwinConfig(**WINDOWS, window_size=2)),
}
TABLE = "model.embed_tokens.weight"


def embeddings_of_stacks(state):
    return {f"{part}.embed_tokens.weight": state[SHARED].clone() for part in ("encoder", "decoder")}


def masks(part):
    own = {"bias": torch.ones(1, 1, 8, 8).tril().bool(), "masked_bias": torch.tensor(-1e9)}
    return {f"transformer.h.0.{part}.{name}": tensor for name, tensor in own.items()}


MORE = {"bert.embeddings.position_ids": torch.arange(512)[None], "bert.pooler.dense.bias": ONES}
MORE |= {"cls.seq_relationship.bias": ONES[:2], "cls.predictions.decoder.weight": OTHER}
CAUSAL = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(2)}
# what a file on the hub holds, made of what transformers writes today
FORMS = {
    "bert": lambda s: {
        n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): t
        for n, t in s.items()
    },
    "whole": lambda s: {f"bert.{n}": t for n, t in s.items()} | {"cls.predictions.bias": ONES},
    "masked": lambda s: s | MORE,  # with a head that is not tied
    "gpt2": lambda s: {n.removeprefix("transformer."): t for n, t in s.items()} | CAUSAL,
    "gpt_neo": lambda s: s | masks("attn.attention"),
    "gptj": lambda s: s | masks("attn"),
    "llama": lambda s: s | {"model.layers.0.self_attn.rotary_emb.inv_freq": ONES[:4]},
    "tied": lambda s: s | {"lm_head.weight": s[TABLE].clone()},
    "t5": lambda s: s | embeddings_of_stacks(s) | {"lm_head.weight": s[SHARED].clone()},
    "flan": lambda s: s | embeddings_of_stacks(s),
    "marian": lambda s: s,  # without its positions
}


@pytest.mark.parametrize("whose", ["a", "base"])
@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_any_form_are_merged_as_transformers_loads_them(tmp_path, kind, whose):
    paths = {name: tmp_path / name for name in ("base", "a", "b")}
    models = [make(KINDS[kind], seed, torch.float32) for seed in range(3)]
    for path, model in zip(paths.values(), models, strict=True):
        model.save_pretrained(path)
    if kind in FORMS:
        file = paths[whose] / "model.safetensors"
        changed = {name: tensor.clone() for name, tensor in FORMS[kind](load_file(file)).items()}
        save_file(changed, file, metadata={"format": "pt"})
    else:  # fused or packed: one folder as the model has it, the others as transformers writes it
        save_model(models[[*paths].index(whose)], paths[whose])
    base, *experts = paths.values()
    module = featcal.merge("average", base, experts)
    out = featcal.merge("average", base, experts, out=tmp_path / "out")
    written, info = type(module).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    one, two = (type(module).from_pretrained(path).state_dict() for path in experts)
    for name, tensor in written.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name]), name
        mean = (one[name].double() + two[name]) / 2
        assert torch.allclose(tensor.double(), mean, rtol=0, atol=1e-6), name


def test_old_configurations_and_models_in_memory_keep_what_they_say_on_generation(tmp_path):
    folder = folder_of(tmp_path / "m", "t5")
    config = json.loads((folder / "config.json").read_text())
    for more in ({}, {"num_beams": 4, "model_type": None}):
        (folder / "config.json").write_text(json.dumps(config | more))
        for base in (folder, whole(folder, "t5")):
            out = featcal.merge("average", base, [folder], out=tmp_path / "out")
            assert whole(out, "t5").generation_config.num_beams == more.get("num_beams")
            assert (out / "generation_config.json").exists() is bool(more)


def test_one_stored_tensor_of_three_parameters_is_written_whole_when_one_is_solved(tmp_path):
    paths = {name: tmp_path / name for name in ("base", "merged", "a")}
    for seed, path in enumerate(paths.values()):
        make(KINDS["nomic"], seed, torch.float32).save_pretrained(path)
    given = {"base": paths["base"], "experts": {"a": paths["a"]}, "batches": {"a": text(1)}}
    some = featcal.Calibration(modules=("q_proj",), norm=False)
    featcal.calibrate(paths["merged"], **given, settings=some, out=tmp_path / "out")
    new, info = tf.NomicBertModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    old = tf.NomicBertModel.from_pretrained(paths["merged"])
    changed = {n for n, p in new.named_parameters() if not torch.equal(p, old.get_parameter(n))}
    assert changed == {n for n, _ in new.named_parameters() if n.endswith("q_proj.weight")}


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/attention"])
@pytest.mark.parametrize("family", ["llama", "clip"])
def test_an_attention_that_is_not_installed_is_replaced_once_by_eager(tmp_path, family, name):
    folder = folder_of(tmp_path / "m", family)
    config = json.loads((folder / "config.json").read_text())
    towers = dict.fromkeys(["", *(key for key in config if key.endswith("_config"))], name)
    named = config | {"attn_implementation": name if family == "llama" else towers}
    (folder / "config.json").write_text(json.dumps(named))
    with pytest.warns(UserWarning, match=name) as warned:
        eager = featcal.merge("average", folder, [folder])
        streamed = skeleton(folder, whole=True)
    assert len({str(each.message) for each in warned}) == 1
    configs = [getattr(m.config, n, m.config) for m in (eager, streamed) for n in towers]
    assert {config._attn_implementation for config in configs} == {"eager"}
