"""Experts as LoRA folders and with other vocabularies; and the command's settings."""

import copy
import json
import sys
from pathlib import Path

import checkpoints
import families
import peft
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_align import llama
from test_cli import DATA, EXPERTS, models, ready, refused

from featcal.cli import main as cli
from featcal.errors import BadEnvironment, BadFile, FeatCalError, NotFinite, TruncatedFile
from featcal.merging.merge import merge
from featcal.merging.sources import source
from featcal.models.load import save_model
from featcal.models.lora import CONFIG, WEIGHTS, dense_model, without_adapters

pytestmark = [  # peft's words on adapters of tables
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:aLoRA is currently:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
]
OLD = {"vit": ((".layers", ".encoder.layer"), ("q_proj", "attention.query"))}  # in transformers 4
OLD |= {"gemma3": (("model.language_model", "language_model.model"), ("model.v", "v"))}
LORA = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "fc1"]}


def adapted(model, folder=None, config=None, names=(), **how):
    """A PeftModel of a copy of the model, whose adapters are random, also saved to the folder."""
    torch.manual_seed(5)
    config = config or peft.LoraConfig(**LORA | {"init_lora_weights": False} | how)
    made = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape)
    if folder:
        made.save_pretrained(folder)
    for now, old in names:
        (folder / CONFIG).write_text((folder / CONFIG).read_text().replace(now, old))
        state = load_file(folder / WEIGHTS).items()
        save_file({name.replace(now, old): t for name, t in state}, folder / WEIGHTS)
    return made


def refused_merge(base, expert, said, error=BadFile):
    with pytest.raises(error, match=said):
        merge("average", base, [expert])


def near(one, other, tolerance=1e-6):
    return torch.allclose(one, other, rtol=1e-6, atol=tolerance)  # logits are above 100


ADAPTERS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"q_proj": 3, "layers.1.mlp.fc1": 1}, "alpha_pattern": {"fc1": 9}},
    "saved": {"bias": "all", "modules_to_save": ["post_layernorm"]},
    "patches": {"target_modules": ["patch_embedding", "v_proj"]},
    **{start: {"init_lora_weights": start} for start in ("pissa", "olora", "mica", "orthogonal")},
    "vera": peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"]),
    "loha": peft.LoHaConfig(r=2, target_modules=["fc1"]),
    "layer norms": peft.LNTuningConfig(target_modules=["layer_norm1"]),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "module") for name in ADAPTERS), ("plain", "folder"), ("saved", "folder")],
)
def test_an_adapter_is_merged_as_peft_loads_and_merges_it(tmp_path, name, kind):
    base, how = checkpoints.vision(), ADAPTERS[name]
    own = {"config": how} if isinstance(how, peft.PeftConfig) else how
    adapted(base, **own).save_pretrained(tmp_path / "lora")
    expert = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora").eval()
    whole = copy.deepcopy(expert).merge_and_unload()
    assert tiny.difference(whole, base) > 1e-3
    given = base if kind == "module" else checkpoints.vision_folder(tmp_path / "base")
    for form in (tmp_path / "lora", expert):
        assert tiny.difference(merge("average", given, [form]), whole) < 1e-6
    assert tiny.difference(dense_model(given, tmp_path / "lora"), whole) < 1e-6


@pytest.mark.parametrize("method", ["ties", "tsv_merge"])
def test_an_adapter_and_a_model_are_merged_as_two_models(tmp_path, method):
    base, other = checkpoints.vision(), checkpoints.vision(1)
    expert = adapted(base, tmp_path / "lora")
    merged = merge(method, base, {"a": tmp_path / "lora", "b": other})
    wide = {"a": expert.double().merge_and_unload(), "b": other.double()}
    want = merge(method, copy.deepcopy(base).double(), wide)
    assert tiny.difference(merged.double(), want) < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "vit"])
def test_a_lora_of_a_text_model_is_what_peft_computes(tmp_path, family):
    base = tiny.make(families.FAMILIES[family].build, dtype=torch.float32)
    names = {"gpt2": ["c_attn", "c_fc"], "bert": ["query", "dense"], "t5": ["q", "wi"]}
    how = {"target_modules": names.get(family, ["q_proj"]), "fan_in_fan_out": family == "gpt2"}
    expert = adapted(base, tmp_path / "lora", names=OLD.get(family, ()), **how)
    folder = save_model(base, tmp_path / "base")
    merged = merge("task_arithmetic", folder, {"a": tmp_path / "lora"}, scale=1.0)
    assert tiny.difference(merged, expert.merge_and_unload()) < 1e-6


def test_task_vectors_of_a_lora_on_a_bfloat16_base_keep_the_rank_of_the_adapter(tmp_path):
    base = checkpoints.vision().bfloat16()
    expert = adapted(base, tmp_path / "lora")
    folder, name = save_model(base, tmp_path / "base"), "encoder.layers.0.self_attn.q_proj.weight"
    before = base.state_dict()[name].double()
    for form in (tmp_path / "lora", expert):
        for given in (base, folder):
            tensor = source(form, "a", None, source(given, "base"), given).tensors[name]
            S = torch.linalg.svdvals(tensor.finite().double() - before)
            assert S[1] > 1e-3 and S[2] < 1e-12 * S[0] and tensor.dtype == torch.bfloat16
    out = merge("tsv_merge", folder, [tmp_path / "lora"], out=tmp_path / "out")
    assert load_file(out / "model.safetensors")[name].dtype == torch.bfloat16


def test_a_prefix_of_older_transformers_and_a_head_that_the_base_lacks_are_read(tmp_path, caplog):
    base = checkpoints.vision()
    expert = adapted(base, tmp_path / "lora")
    file, config = (tmp_path / "lora" / name for name in (WEIGHTS, CONFIG))
    prefix = "base_model.model."
    old = {k.replace(prefix, f"{prefix}vision_model."): t for k, t in load_file(file).items()}
    save_file(old | {"base_model.model.classifier.weight": torch.ones(3, 32)}, file)
    told = json.loads(config.read_text()) | {"modules_to_save": ["classifier"]}
    config.write_text(json.dumps(told))
    base.config.save_pretrained(tmp_path / "lora")  # as some tools do
    merged = merge("average", base, [tmp_path / "lora"])
    assert tiny.difference(merged, expert.merge_and_unload()) < 1e-6
    assert caplog.messages[0].endswith("head is not merged (base_model.model.classifier.weight)")


BY_NAME = [  # layers chosen by whole names, of the tower or of the whole model
    {"target_modules": "all-linear", "use_dora": True},
    {"target_modules": r"(model\.)?layers\.\d\.self_attn\.q_proj", "alpha_pattern": {"0.+": 9}},
    {"rank_pattern": {r"^(model\.)?layers.0.+": 3}, "exclude_modules": r"(model\.)?layers\.1.*"},
]


@pytest.mark.parametrize("how", BY_NAME)
def test_an_adapter_fits_a_model_with_and_without_its_head(tmp_path, how):
    whole, plain = llama(97, 0), {"target_modules": ["q_proj"], "bias": "all"}
    for trained, base in ((whole, whole.model), (whole.model, whole)):
        expert = adapted(trained, tmp_path, **plain | how).merge_and_unload()
        models = merge("average", base, [tmp_path]), expert
        assert tiny.difference(*(getattr(model, "model", model) for model in models)) < 1e-6


def tied_llama(seed=0):
    config = families.tf.LlamaConfig(**families.GROUPED | {"tie_word_embeddings": True})
    return tiny.make(lambda: families.tf.LlamaForCausalLM(config), seed, torch.float32)


def logits(model):
    with torch.no_grad():
        return model(input_ids=families.tokens(3)[0].clamp_max(93)).logits


@pytest.mark.parametrize(
    "how",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["lm_head", "q_proj"]},
        {"trainable_token_indices": [5, 6]},
    ],
)
def test_an_adapter_may_part_tied_tables(tmp_path, how):
    base, other = tied_llama(), tied_llama(1)
    adapted(base, **{"target_modules": ["q_proj"]} | how).save_pretrained(tmp_path / "lora")
    own = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora").eval()
    folder = save_model(base, tmp_path / "base")
    if "modules_to_save" in how:  # a base that stores its table as the head
        checkpoints.renamed(folder, lambda name: name.replace("model.embed_tokens", "lm_head"))
    assert near(logits(merge("average", base, [tmp_path / "lora"])), logits(own), 1e-4)
    out = merge("average", folder, [own], out=tmp_path / "out")
    assert near(logits(families.tf.LlamaForCausalLM.from_pretrained(out)), logits(own), 1e-4)
    merged = merge("average", folder, {"a": tmp_path / "lora", "b": other})
    dense = without_adapters(own)
    for name, p in merged.named_parameters(remove_duplicate=False):
        assert near(p, (dense.get_parameter(name) + other.get_parameter(name)) / 2), name


def test_tables_that_a_class_cannot_have_apart_are_refused_by_name(tmp_path):
    base = tiny.make(families.FAMILIES["t5"].build, dtype=torch.float32)
    adapted(base, target_modules=["q"], modules_to_save=["lm_head"]).save_pretrained(tmp_path)
    refused_merge(base, tmp_path, "lm_head.weight.*ties")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*drawn at random"),
        ({"init_lora_weights": "lora_ga"}, "lora_ga.*gradients"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    ],
)
def test_adapters_that_are_no_change_of_weights_are_refused_by_name(tmp_path, how, said):
    adapted(llama(97, 0), target_modules=["q_proj"], **how).save_pretrained(tmp_path)
    refused_merge(llama(97, 0), tmp_path, said)


@pytest.mark.parametrize("names", [(), OLD["gemma3"]])
def test_an_adapter_of_a_vision_language_model_is_added_to_its_folder(tmp_path, names):
    tf = families.tf
    text = families.GROUPED | {"num_hidden_layers": 1, "model_type": "gemma3_text"}
    vision = tiny.VISION | {"intermediate_size": 48, "model_type": "siglip_vision_model"}
    tokens = {"image_token_index": 94, "boi_token_index": 95, "eoi_token_index": 96}
    parts = {"text_config": text, "vision_config": vision}
    config = tf.Gemma3Config(**parts, mm_tokens_per_image=4, **tokens)
    base = tiny.make(lambda: tf.Gemma3ForConditionalGeneration(config), 0, torch.float32)
    base.save_pretrained(tmp_path / "base")
    expert = adapted(base, tmp_path / "lora", names=names, target_modules=["q_proj"])
    out = merge("average", tmp_path / "base", [tmp_path / "lora"], out=tmp_path / "out")
    merged = tf.Gemma3ForConditionalGeneration.from_pretrained(out)
    assert near(logits(merged), logits(expert), 1e-4)


@pytest.mark.filterwarnings("ignore:Input and output embeddings")
@pytest.mark.parametrize("base", [llama(97, 0), tied_llama()])
def test_an_adapter_trained_with_other_tokens_has_the_base_s_rows(tmp_path, base):
    (larger := copy.deepcopy(base)).resize_token_embeddings(99)
    how = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    expert = adapted(larger, tmp_path, **how).merge_and_unload()
    for name, merged in merge("average", base, [tmp_path]).state_dict().items():
        assert near(merged, expert.state_dict()[name][:97]), name


def test_models_in_memory_are_merged_as_what_they_wrap():
    base, other = checkpoints.vision(), checkpoints.vision(1)
    assert tiny.same_bits(merge("average", adapted(base), [other]), other)
    base.add_adapter(peft.LoraConfig(**LORA))
    (off := adapted(other)).base_model.disable_adapter_layers()
    both = [peft.get_peft_model(other, peft.LoraConfig(**LORA)) for _ in range(2)]
    cases = [([model], "holds an adapter") for model in (base, adapted(other).base_model)]
    cases += [([off], "switched off"), (both, "a base of its own")]
    for experts, said in (*cases, ([checkpoints.vision().to("meta")], "on meta")):
        with pytest.raises(FeatCalError, match=said):
            merge("average", checkpoints.vision(), experts)
    base, *experts = (llama(97, seed) for seed in range(3))
    for model in (base, *experts):  # as load_state_dict(assign=True) leaves tied tables
        model.lm_head.weight.data = model.model.embed_tokens.weight.data
    merged = merge("average", base, experts)
    assert torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)
    untied = merge("average", llama(97, 0), [tied_llama()])
    assert torch.equal(untied.lm_head.weight, tied_llama().lm_head.weight)


def test_adapters_that_do_not_fit_are_refused_with_file_and_tensor(tmp_path):
    base = checkpoints.vision()
    adapted(base, folder := tmp_path / "lora", init_lora_weights="gaussian")
    refused_merge(base, tmp_path, "model: .*lora has one", FeatCalError)
    file, config = folder / WEIGHTS, folder / CONFIG
    state, told = load_file(file), json.loads(config.read_text())
    up = "encoder.layers.0.mlp.fc1.lora_B"
    wrong = f"base_model.model.{up}.weight"
    for changed, said in (
        ({k: t for k, t in state.items() if k != wrong}, f"not fit the base.*file has no .*{up}"),
        (state | {"base_model.model.head.weight": torch.ones(2)}, "base has no .*head.weight"),
        (state | {wrong: torch.ones(48, 2)}, f"not fit the base.*{up}.*48"),
        ({f"_orig_mod.{k}": t for k, t in state.items()}, "adapter_model.*in a wrapper"),
        ({k: torch.zeros(0) for k in state}, "adapter_model.*is empty, as ZeRO-3 leaves it"),
        (state | {wrong: torch.full_like(state[wrong], torch.nan)}, f"{up}.* holds NaN"),
    ):
        save_file(changed, file)
        refused_merge(base, folder, said, NotFinite if "NaN" in said else BadFile)
    save_file(state, file)
    for changed, said in (
        *((told | {"peft_type": kind}, kind) for kind in ("PROMPT_TUNING", "OWN")),
        (told | {"target_modules": ["nothing"]}, "nothing"),
        ({}, "of the kind None"),
    ):
        config.write_text(json.dumps(changed))
        refused_merge(base, folder, said)
    config.write_text(json.dumps(told))
    file.write_bytes(file.read_bytes()[:-10])
    refused_merge(base, folder, "adapter_model", TruncatedFile)
    file.rename(folder / "adapter_model-00001-of-00001.safetensors")
    refused_merge(base, folder, r"no adapter_model.safetensors[\s\S]*shards joined")


def test_without_peft_an_adapter_is_refused_with_the_line_that_installs_it(tmp_path, monkeypatch):
    adapted(checkpoints.vision()).save_pretrained(tmp_path / "lora")
    monkeypatch.setitem(sys.modules, "peft", None)
    said = r"pip install 'featcal\[lora\]'"
    refused_merge(checkpoints.vision(), tmp_path / "lora", said, BadEnvironment)


MERGE = ["--base", "base", *EXPERTS, "--out", "new"]
DATA = [*DATA, "--samples", "3"]


def test_the_command_takes_the_methods_settings(models):
    settings = {"density": 0.5, "combine": "mean", "scale": 1.0}
    told = ["--set", "density=0.5", "--set", "combine=mean", "--scale", "1"]
    assert cli.main(["merge", "ties", *MERGE, *told]) == 0
    experts = {"mnist": checkpoints.vision(1), "dtd": checkpoints.vision(2)}
    want = merge("ties", checkpoints.vision(), experts, **settings).state_dict()
    assert all(torch.equal(t, want[n]) for n, t in load_file("new/model.safetensors").items())
    assert json.loads((models / "new/merge.json").read_text())["settings"] == settings
    for seed, more in ((42, ()), (1, ("--seed", "1")), (7, ("--seed", "1", "--set", "seed=7"))):
        assert cli.main(["merge", "dare", *MERGE, "--force", *more]) == 0
        assert json.loads(Path("new/featcal.json").read_text())["settings"]["seed"] == seed
    assert cli.main(["merge", "iso_c", *MERGE, "--force", "--set", "exclude=*q_proj.*,*fc1.*"]) == 0
    got = json.loads(Path("new/featcal.json").read_text())["settings"]["exclude"]
    assert got == ["*q_proj.*", "*fc1.*"]


def test_the_command_draws_images_for_methods_that_need_them(models, capsys):
    assert cli.main(["merge", "regmean_plus_plus", *MERGE, *DATA[:-2]]) == 0  # all there are
    assert "encoder.layers.1" in capsys.readouterr().err
    heads = {"visual_projection": torch.ones(8, 32), "logit_scale": torch.tensor(1.0)}
    heads |= {f"head/{task}": torch.eye(3, 8) for task in ("mnist", "dtd")}
    save_file(heads, "heads.safetensors")
    settings = ["--head", "heads.safetensors", "--set", "steps=2", "--force"]
    assert cli.main(["merge", "adamerging", *MERGE, *DATA, *settings]) == 0
    assert len(json.loads((models / "new/merge.json").read_text())["loss"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ties", *MERGE, "--set", "density=much"], "density: 'much'"),
        (["regmean", *MERGE], "--data"),
        (["average", "--base", ".", *MERGE[2:]], "has a config.json; base has one"),
        (["average", *MERGE, *DATA], "--data, --samples: average uses no"),
        (["average", *MERGE, "--set", "split=nope"], "--set split=nope: average uses no"),
        (["adamerging", *MERGE, *DATA], "--head"),
        (["average", *MERGE, "--set", "embeddings=none"], "merge.embeddings: "),
        (["average", *MERGE, "--set", "device=cpu"], "merge.average: 'device' is not known"),
    ],
)
def test_a_mistake_is_one_message_and_writes_nothing(models, capsys, arguments, said):
    assert said in refused(["merge", *arguments], models, capsys)
