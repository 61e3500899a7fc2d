"""Configurations that make models of the same tensors compute differently."""

import checkpoints
import families
import pytest
import tiny
import torch
from families import tf

import featcal
from featcal.errors import FeatCalError
from featcal.merging.merge import merge
from featcal.models.streamed import require_same_configs

BASE = {
    "llama": lambda **more: tf.LlamaConfig(**families.GROUPED | more),
    "bert": lambda **more: tf.BertConfig(**tiny.TEXT | more),
    "gemma": lambda **more: tf.Gemma3Config(
        text_config={"num_hidden_layers": 2} | more.pop("text", {}), **more
    ),
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
    ],
)
def test_keys_that_change_features_are_listed_with_values_and_models(family, change, key):
    own = BASE[family]
    with pytest.raises(FeatCalError, match=f"^two and one: .*{key}"):
        require_same_configs({"one": own(), "two": own(**change)})


def test_harmless_keys_pass():
    change = {"dtype": "bfloat16", "use_cache": False, "id2label": {0: "a"}, "architectures": ["B"]}
    change |= {"vocab_size": 99, "pad_token_id": 3, "bos_token_id": 5, "head_dim": None}
    change |= {"max_position_embeddings": 4096, "attention_dropout": 0.1, "hidden_act": "swish"}
    change |= {"initializer_range": 0.5, "of_another_tool": 3, "_name_or_path": "there"}
    require_same_configs({"one": BASE["llama"](), "two": BASE["llama"](**change)})
    windows = (tf.Qwen2Config(max_window_layers=n, sliding_window=n) for n in (21, 28))  # unused
    require_same_configs(dict(zip("ab", windows, strict=True)))
    ropes = ({"rope_scaling": {key: "linear", "factor": 2}} for key in ("type", "rope_type"))
    require_same_configs({str(rope): BASE["llama"](**rope) for rope in ropes})


def test_a_tower_is_compared_with_its_part_of_a_whole_model():
    whole = tf.CLIPConfig(vision_config=tiny.VISION)
    require_same_configs({"one": whole, "two": tf.CLIPVisionConfig(**tiny.VISION), "three": None})
    other = tf.CLIPVisionConfig(**tiny.VISION, hidden_act="gelu")
    for configs in ({"one": whole, "two": other}, {"one": other, "two": whole}):
        with pytest.raises(FeatCalError, match="hidden_act"):
            require_same_configs(configs)


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
