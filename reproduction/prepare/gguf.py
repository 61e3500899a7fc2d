"""Read the Llama of a GGUF file as a folder of transformers, de-quantised; nothing of it is run.

Of a GGUF file, little endian: the magic, its version, the counts of tensors and of keys; the keys
with typed values; name, sizes (the fastest first), type and offset of every tensor; and the data,
aligned. A quantised row is stored in blocks of 32 weights with a scale.
"""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcal.files import write_json

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9
BLOCK = 32
SPECIAL = 3  # type of a token that is never part of a text
Float32s = NDArray[np.float32]
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def write_llama(data: bytes, folder: Path) -> None:
    """Write the model with its tokenizer and chat template."""
    from safetensors.numpy import save_file

    keys, stored = read(data)
    state = llama_tensors(keys, stored)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", llama_config(keys, tied="output.weight" not in stored))
    write_tokenizer(keys, folder)


def read(data: bytes) -> tuple[dict[str, Any], dict[str, Float32s]]:
    """Return the keys, and the tensors by GGUF's names, the fastest size last."""
    at = 24
    count, key_count = struct.unpack_from("<QQ", data, 8)

    def value(kind: int) -> Any:
        nonlocal at
        if kind in SCALARS:
            (scalar,) = struct.unpack_from(f"<{SCALARS[kind]}", data, at)
            at += struct.calcsize(f"<{SCALARS[kind]}")
            return scalar
        if kind == STRING:
            length = value(10)
            at += length
            return data[at - length : at].decode()
        assert kind == ARRAY, f"{kind} is no type of a key"
        inner, length = value(4), value(10)
        return [value(inner) for _ in range(length)]

    keys = {value(STRING): value(value(4)) for _ in range(key_count)}
    table = []
    for _ in range(count):
        name, sizes = value(STRING), [value(10) for _ in range(value(4))]
        table.append((name, sizes[::-1], value(4), value(10)))
    alignment = keys.get("general.alignment", 32)
    start = -(-at // alignment) * alignment
    return keys, {
        name: DEQUANTISED[kind](data, start + offset, sizes) for name, sizes, kind, offset in table
    }


def _plain(data: bytes, at: int, shape: list[int]) -> Float32s:
    return np.frombuffer(data, "<f4", int(np.prod(shape)), at).reshape(shape)


def _blocks(data: bytes, at: int, shape: list[int], fields: list[Any]) -> Any:
    return np.frombuffer(data, np.dtype(fields), int(np.prod(shape)) // BLOCK, at)


def _q4_1(data: bytes, at: int, shape: list[int]) -> Float32s:
    """Return scale · q + shift with q of 4 bits, the low halves of 16 bytes before their high ones."""
    fields = [("scale", "<f2"), ("shift", "<f2"), ("both", "u1", BLOCK // 2)]
    blocks = _blocks(data, at, shape, fields)
    q = np.concatenate([blocks["both"] & 15, blocks["both"] >> 4], axis=1).astype(np.float32)
    scale, shift = (blocks[name].astype(np.float32)[:, None] for name in ("scale", "shift"))
    return (scale * q + shift).reshape(shape)


def _q8_0(data: bytes, at: int, shape: list[int]) -> Float32s:
    """Return scale · q with q of 8 bits."""
    blocks = _blocks(data, at, shape, [("scale", "<f2"), ("q", "i1", BLOCK)])
    return (blocks["scale"].astype(np.float32)[:, None] * blocks["q"]).reshape(shape)


DEQUANTISED: Mapping[int, Callable[[bytes, int, list[int]], Float32s]] = {
    0: _plain, 3: _q4_1, 8: _q8_0,
}  # fmt: skip


def llama_tensors(keys: Mapping[str, Any], stored: Mapping[str, Float32s]) -> dict[str, Float32s]:
    """Return the tensors under transformers' names.

    GGUF turns pairs of neighbouring features of queries and keys, transformers those half a head
    apart: their rows are put back.
    """
    state = {}
    heads = {"attn_q": keys["llama.attention.head_count"]}
    heads["attn_k"] = keys["llama.attention.head_count_kv"]
    for name, tensor in stored.items():
        if name in OUTER:
            state[OUTER[name]] = tensor
            continue
        _, block, part, _ = name.split(".")
        if part in heads:
            paired = tensor.reshape(heads[part], -1, 2, tensor.shape[1])
            tensor = paired.swapaxes(1, 2).reshape(tensor.shape)
        state[f"model.layers.{block}.{INNER[part]}.weight"] = np.ascontiguousarray(tensor)
    return dict(sorted(state.items()))


def llama_config(keys: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """Return config.json of LlamaForCausalLM."""
    info = {name.removeprefix("llama."): value for name, value in keys.items()}
    ids = {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "vocab_size": len(keys["tokenizer.ggml.tokens"]), "hidden_size": info["embedding_length"],
        "intermediate_size": info["feed_forward_length"], "num_hidden_layers": info["block_count"],
        "num_attention_heads": info["attention.head_count"],
        "num_key_value_heads": info["attention.head_count_kv"],
        "max_position_embeddings": info["context_length"], "hidden_act": "silu",
        "rms_norm_eps": float(np.round(info["attention.layer_norm_rms_epsilon"], 9)),
        "rope_theta": info["rope.freq_base"], "tie_word_embeddings": tied,
        "bos_token_id": ids["bos"], "eos_token_id": ids["eos"],
        "pad_token_id": keys["tokenizer.ggml.padding_token_id"],
    }  # fmt: skip


def write_tokenizer(keys: Mapping[str, Any], folder: Path) -> None:
    """Write the byte-level BPE that llama.cpp calls `smollm`: digits apart, then GPT-2's words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}
    tokens, merges = ggml["tokens"], [tuple(pair.split(" ")) for pair in ggml["merges"]]
    model = models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [tokens[n] for n, kind in enumerate(ggml["token_type"]) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    names = {f"{role}_token": tokens[ggml[f"{key}_token_id"]] for role, key in roles.items()}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.model_max_length = keys["llama.context_length"]
    fast.chat_template = keys["tokenizer.chat_template"]
    fast.save_pretrained(folder)
