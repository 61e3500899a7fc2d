"""Experts that are not whole models of the base's shape: LoRA folders, other vocabularies; and the
command's settings.
"""

import json

import checkpoints
import families
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import featcal
from featcal.cli import main as cli
from featcal.cli.merge import as_value
from featcal.errors import BadFile, MissingPath, MissingTensor, TensorsDiffer, TruncatedFile
from featcal.merging.merge import merge
from featcal.models.lora import without_adapters
from featcal.models.save import save_model

CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": ["q_proj", "fc1"],
    "use_rslora": False,
}
TARGETS = {"encoder.layers.0.self_attn.q_proj": (32, 32), "encoder.layers.1.mlp.fc1": (64, 32)}


def adapter(folder, targets=None, prefix="base_model.model.", rank=2, seed=5, **config):
    """A LoRA folder as peft writes it. Returns the folder and its two matrices by target."""
    g, pairs = tiny.seeded(seed), {}
    for path, (o, d) in (targets or TARGETS).items():
        pairs[path] = torch.randn(rank, d, generator=g), torch.randn(o, rank, generator=g)
    folder.mkdir()
    state = {
        f"{prefix}{path}.lora_{end}.weight": m
        for path, both in pairs.items()
        for end, m in zip("AB", both, strict=True)
    }
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder, pairs


def dense(base, pairs, scale, turned=False):
    with torch.no_grad():
        for path, (down, up) in pairs.items():
            change = scale * (up.double() @ down.double())
            weight = base.get_parameter(f"{path}.weight")
            weight.copy_(weight.double() + (change.T if turned else change))
    return base


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.vision_model."])
@pytest.mark.parametrize(("config", "scale"), [({}, 3.0), ({"use_rslora": True}, 6 / 2**0.5)])
def test_a_lora_folder_is_the_base_plus_its_scaled_product(tmp_path, prefix, config, scale):
    folder, pairs = adapter(tmp_path / "lora", prefix=prefix, **config)
    base = checkpoints.vision_folder(tmp_path / "base")
    expert = dense(checkpoints.vision(), pairs, scale)
    assert same(merge("average", base, {"mnist": folder}), expert)
    other = checkpoints.vision(1)
    assert same(
        merge("ties", base, {"a": folder, "b": other}),
        merge("ties", checkpoints.vision(), {"a": expert, "b": other}),
    )


def test_a_lora_folder_of_a_turned_linear(tmp_path):
    base = tiny.make(families.FAMILIES["gpt2"].build, dtype=torch.float32)
    path = "transformer.h.0.mlp.c_fc"
    folder, pairs = adapter(tmp_path / "lora", {path: (128, 32)}, fan_in_fan_out=True)
    expert = dense(
        tiny.make(families.FAMILIES["gpt2"].build, dtype=torch.float32), pairs, 3.0, turned=True
    )
    assert same(merge("task_arithmetic", base, {"a": folder}, scale=1.0), expert)


def test_regmean_of_one_lora_folder_is_that_expert(tmp_path):
    folder, pairs = adapter(tmp_path / "lora")
    merged = merge(
        "regmean",
        checkpoints.vision(),
        {"a": folder},
        batches={"a": tiny.images(1, dtype=torch.float32, size=32)},
    )
    assert tiny.difference(merged, dense(checkpoints.vision(), pairs, 3.0)) < 1e-6


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"alpha_pattern": {"fc1": 3}}, "alpha_pattern"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused_by_what_makes_it_so(tmp_path, config, said):
    folder, _ = adapter(tmp_path / "lora", **config)
    with pytest.raises(BadFile, match=f"adapter_config.json.*{said}"):
        merge("average", checkpoints.vision(), [folder])


def test_trained_biases_and_saved_modules_of_a_lora_folder_stand_in_the_place_of_the_bases(
    tmp_path,
):
    folder, pairs = adapter(
        tmp_path / "lora", bias="all", modules_to_save=["post_layernorm", "classifier"]
    )
    file = folder / "adapter_model.safetensors"
    bias, norm = "encoder.layers.0.self_attn.q_proj.bias", "post_layernorm.weight"
    more = {
        f"base_model.model.{name}": torch.full((32,), value)
        for name, value in ((bias, 0.5), (norm, 2.0))
    }
    save_file(
        load_file(file) | more | {"base_model.model.classifier.weight": torch.ones(3, 32)}, file
    )
    expert = dense(checkpoints.vision(), pairs, 3.0)
    with torch.no_grad():
        expert.get_parameter(bias).fill_(0.5)
        expert.get_parameter(norm).fill_(2.0)
    assert same(merge("average", checkpoints.vision(), [folder]), expert)


def test_adapters_that_do_not_fit_name_file_and_tensor(tmp_path):
    base = checkpoints.vision()
    with pytest.raises(MissingTensor, match="q_prj.weight.*q_proj"):
        merge(
            "average",
            base,
            [adapter(tmp_path / "one", {"encoder.layers.0.self_attn.q_prj": (32, 32)})[0]],
        )
    with pytest.raises(TensorsDiffer, match=r"fc1\.weight.*\(64, 32\).*\(48, 32\)"):
        merge(
            "average", base, [adapter(tmp_path / "two", {"encoder.layers.1.mlp.fc1": (48, 32)})[0]]
        )
    folder, _ = adapter(tmp_path / "three")
    file = folder / "adapter_model.safetensors"
    state = load_file(file)
    save_file({k: v for k, v in state.items() if "fc1.lora_B" not in k}, file)
    with pytest.raises(BadFile, match="fc1.lora_A.weight is not one of such a pair"):
        merge("average", base, [folder])
    save_file(state | {"base_model.model.head.weight": torch.ones(2)}, file)
    with pytest.raises(BadFile, match="head.weight is not one"):
        merge("average", base, [folder])
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(TruncatedFile, match="adapter_model"):
        merge("average", base, [folder])
    file.unlink()
    with pytest.raises(MissingPath, match="adapter's weights"):
        merge("average", base, [folder])


def llama(words, seed):
    config = families.tf.LlamaConfig(**families.GROUPED | {"vocab_size": words})
    return tiny.make(lambda: families.tf.LlamaForCausalLM(config), seed, torch.float32)


def test_rows_of_words_that_all_have_are_merged_and_the_others_are_the_bases(tmp_path):
    base, experts = llama(97, 0), {"code": llama(100, 1), "maths": llama(90, 2)}
    merged = merge("average", base, experts)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        own, code, maths = (m.get_parameter(name) for m in (base, *experts.values()))
        assert torch.allclose(
            merged.get_parameter(name)[:90], (code[:90] + maths[:90]) / 2, rtol=0, atol=1e-7
        )
        assert torch.allclose(
            merged.get_parameter(name)[90:], (code[90:97] + own[90:]) / 2, rtol=0, atol=1e-7
        )


def test_rows_of_words_are_those_of_the_same_token(tmp_path):
    """The expert's tokenizer numbers the words otherwise."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    order = [[*range(97)], [96, *range(96), 97]]
    for folder, numbers in zip(("base", "code"), order, strict=True):
        save_model(llama(len(numbers), 0), tmp_path / folder)
        words = Tokenizer(
            models.WordLevel({f"word{w}": i for i, w in enumerate(numbers)}, unk_token="word0")
        )
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / folder)
    table = load_file(tmp_path / "code/model.safetensors")["model.embed_tokens.weight"]
    merged = merge(
        "average", tmp_path / "base", {"code": tmp_path / "code"}
    ).model.embed_tokens.weight
    assert torch.equal(merged, torch.cat([table[1:97], table[:1]]))


def test_the_bases_tables_are_kept_where_asked_for(tmp_path):
    base, experts = llama(97, 0), {"code": llama(100, 1), "maths": llama(97, 2)}
    merged = merge("average", base, experts, embeddings="base")
    mean = {
        n: (p + experts["maths"].get_parameter(n)) / 2
        for n, p in experts["code"].named_parameters()
        if "layers" in n
    }
    assert all(
        torch.allclose(merged.get_parameter(n), p, rtol=0, atol=1e-7) for n, p in mean.items()
    )
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    assert all(torch.equal(merged.get_parameter(n), base.get_parameter(n)) for n in tables)
    folders = {task: save_model(expert, tmp_path / task) for task, expert in experts.items()}
    out = merge(
        "average",
        save_model(base, tmp_path / "base"),
        folders,
        embeddings="base",
        out=tmp_path / "out",
    )
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(tensor, written[name]) for name, tensor in merged.state_dict().items())


def test_data_dependent_methods_run_with_the_bases_tables():
    base, experts = llama(97, 0), {"code": llama(100, 1), "maths": llama(97, 2)}
    batches = {task: families.text(i) for i, task in enumerate(experts)}
    merged = merge("regmean", base, experts, batches=batches, embeddings="base")
    assert torch.equal(merged.model.embed_tokens.weight, base.model.embed_tokens.weight)
    assert not torch.equal(
        merged.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight
    )


@pytest.fixture
def models(tmp_path, monkeypatch):
    checkpoints.clip_folder(tmp_path / "base")
    for seed, task in enumerate(("mnist", "dtd"), start=1):
        checkpoints.vision_folder(tmp_path / task, seed)
        for i in range(3):
            (tmp_path / "images" / task / "train" / "a").mkdir(parents=True, exist_ok=True)
            checkpoints.picture(seed=seed * 10 + i).save(
                tmp_path / "images" / task / "train" / "a" / f"{i}.png"
            )
    monkeypatch.chdir(tmp_path)
    return tmp_path


MERGE = ["--base", "base", "--expert", "mnist=mnist", "--expert", "dtd=dtd", "--out", "new"]
DATA = ["--data", "mnist=images/mnist", "--data", "dtd=images/dtd", "--samples", "3"]


def test_the_command_takes_the_methods_settings(models):
    assert (
        cli.main(
            [
                "merge",
                "ties",
                *MERGE,
                "--set",
                "density=0.5",
                "--set",
                "combine=mean",
                "--scale",
                "1",
            ]
        )
        == 0
    )
    experts = {
        task: checkpoints.vision(seed) for seed, task in enumerate(("mnist", "dtd"), start=1)
    }
    want = merge(
        "ties", checkpoints.vision(), experts, density=0.5, combine="mean", scale=1.0
    ).state_dict()
    assert all(torch.equal(t, want[n]) for n, t in load_file("new/model.safetensors").items())
    assert json.loads((models / "new/merge.json").read_text())["settings"] == {
        "density": 0.5,
        "scale": 1,
        "combine": "mean",
    }


def test_the_command_draws_images_for_methods_that_need_them(models, capsys):
    assert cli.main(["merge", "regmean_plus_plus", *MERGE, *DATA]) == 0
    assert "encoder.layers.1" in capsys.readouterr().err
    heads = {"visual_projection": torch.ones(8, 32), "logit_scale": torch.tensor(1.0)}
    save_file(
        heads | {f"head/{task}": torch.eye(3, 8) for task in ("mnist", "dtd")}, "heads.safetensors"
    )
    adamerging = [
        "merge",
        "adamerging",
        *MERGE,
        *DATA,
        "--head",
        "heads.safetensors",
        "--set",
        "steps=2",
        "--force",
    ]
    assert cli.main(adamerging) == 0
    assert len(json.loads((models / "new/merge.json").read_text())["loss"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ties", *MERGE, "--set", "density"], "NAME=VALUE"),
        (["ties", *MERGE, "--set", "density=0.1", "--set", "density=0.2"], "second time"),
        (["ties", *MERGE, "--set", "desnity=0.1"], "did you mean 'density'"),
        (["ties", *MERGE, "--set", "density=much"], "--set density"),
        (["regmean", *MERGE], "--data"),
        (["average", *MERGE, *DATA], "--data"),
        (["adamerging", *MERGE, *DATA], "--head"),
        (["average", *MERGE, "--embeddings", "none"], "--embeddings: "),
    ],
)
def test_a_mistake_in_the_arguments_is_one_message_and_writes_nothing(
    models, capsys, arguments, said
):
    assert cli.main(["merge", *arguments]) == cli.MISTAKE
    assert said in capsys.readouterr().err and not (models / "new").exists()


def test_values_on_the_command_line_are_those_of_params_yaml():
    assert [as_value(text) for text in ("1e-5", "0.5", "3", "true", "sum", "[a, b]")] == [
        1e-5,
        0.5,
        3,
        True,
        "sum",
        ["a", "b"],
    ]
