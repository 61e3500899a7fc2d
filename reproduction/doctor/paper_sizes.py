"""Shapes and counts of the paper's models and tests, for estimates made before anything is
downloaded.

Sources: the recipes of the paper's checkpoints and protocols; what the paper leaves open (lengths
of texts) is assumed here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.doctor.repositories import TEST_IMAGES
from reproduction.experiments.runs import GLUE_POOL, Pool

_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}
_LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
_T5: dict[str, Any] = {
    "vocab_size": 32128,
    "d_kv": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
_LLAMA_3B = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
}
_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


@dataclass(frozen=True)
class Size:
    """One model. config: of config.json.   tokens: of one sample that is calibrated on; None where
    the configuration tells.

    parameters, width: numbers that one token passes through, and how many tokens a test sample has,
    answer included.
    bytes: of the whole model as it is kept.
    """

    config: Mapping[str, Any]
    tokens: int | None
    parameters: int
    width: int
    bytes: int

    def write(self, folder: Path) -> Path:
        """A folder with config.json alone."""
        (folder / "config.json").write_text(json.dumps(dict(self.config)))
        return folder


def _size(kind: str, architecture: str, config: Mapping[str, Any], *numbers: Any) -> Size:
    return Size({"model_type": kind, "architectures": [architecture], **config}, *numbers)


_CLIP, _T5_MODEL, _LLAMA_MODEL = "CLIPVisionModel", "T5ForConditionalGeneration", "LlamaForCausalLM"
SIZES = {
    "clip_b32": _size("clip_vision_model", _CLIP, {}, None, 87_456_000, 50, 87_456_000 * 4),
    "clip_l14": _size("clip_vision_model", _CLIP, _LARGE, None, 303_179_776, 257, 303_179_776 * 4),
    "minilm": _size(
        "bert", "BertModel", {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
        48, 10_645_632, 48, 90_868_376,
    ),
    "flan_t5_base": _size(
        "t5", _T5_MODEL, {**_T5, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12}, 512, 247_577_856, 128,
        247_577_856 * 4,
    ),
    "flan_t5_large": _size(
        "t5", _T5_MODEL, {**_T5, "d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16}, 512, 783_150_080, 128,
        783_150_080 * 4,
    ),
    "llama_3b": _size(
        "llama", _LLAMA_MODEL, {**_LLAMA, **_LLAMA_3B, "tie_word_embeddings": True}, 512, 3_212_749_824, 768, 6_440_000_000
    ),
    "llama_8b": _size(
        "llama", _LLAMA_MODEL, {**_LLAMA, **_LLAMA_8B, "tie_word_embeddings": False}, 512, 8_030_261_248, 768, 16_000_000_000
    ),
}  # fmt: skip
GLUE_PROMPTS = {
    "cola": 1043, "mnli": 9815, "mrpc": 408, "qnli": 5463, "qqp": 40430, "rte": 277, "sst2": 872, "stsb": 1500,
}  # fmt: skip
SENTENCES = 500  # scored ones of every task in reproduction/real_text
DOMAIN_PROMPTS = (
    500 + 1319 + 164 + 378 + 541 + 1172
)  # MATH-500, GSM8K, HumanEval+, MBPP+, IFEval, ARC-Challenge


def test_samples(pool: Pool, tasks: tuple[str, ...]) -> int:
    """Images, sentences or prompts that one model answers in a pool."""
    counts = TEST_IMAGES if isinstance(pool, int) else GLUE_PROMPTS
    return (
        DOMAIN_PROMPTS
        if isinstance(pool, str) and pool != GLUE_POOL
        else sum(counts.get(task, SENTENCES) for task in tasks)
    )
