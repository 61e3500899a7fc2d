"""A GGUF file is read as it was written, and gives the logits of a plain forward in its own layout."""

import numpy as np
import torch
from gguf_model import EPSILON, GROUPS, HEADS, SPECIAL, THETA, WORDS, chat_model, write_gguf

from featcal.models.load import load_model, load_tokenizer

PROMPT = "<|im_start|>user\nIs 2024 a yes?<|im_end|>\n"


def plain_logits(tensors, ids):
    """Return the logits of a Llama as GGUF lays it out: neighbouring features are turned together."""

    def normed(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight

    def turned(x):
        size = x.shape[-1]
        angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, size, 2) / size)
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = tensors["token_embd"][ids]
    past = np.tril(np.ones((len(ids), len(ids)), bool))
    for block in range(1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("blk"))):
        layer = {n.split(".")[2]: t for n, t in tensors.items() if n.startswith(f"blk.{block}.")}
        y = normed(x, layer["attn_norm"])
        q, k = (turned((y @ layer[f"attn_{n}"].T).reshape(len(ids), c, -1)) for n, c in (("q", HEADS), ("k", GROUPS)))  # fmt: skip
        v, mixed = (y @ layer["attn_v"].T).reshape(len(ids), GROUPS, -1), []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = q[:, head] @ k[:, group].T / np.sqrt(q.shape[-1])
            weights = np.where(past, np.exp(scores - scores.max(-1, keepdims=True)), 0)
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(mixed, -1) @ layer["attn_output"].T
        y = normed(x, layer["ffn_norm"])
        gate = y @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    return normed(x, tensors["output_norm"]) @ tensors["token_embd"].T


def test_logits_are_those_of_a_plain_forward(tmp_path):
    model, tokenizer = load_model(chat_model(tmp_path)), load_tokenizer(tmp_path)
    ids = tokenizer(PROMPT)["input_ids"]
    expected = plain_logits(write_gguf()[1], ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(logits - expected).max() < 1e-3 and np.ptp(expected, axis=-1).min() > 1


def test_the_tokenizer_keeps_digits_apart_and_a_text_as_it_is(tmp_path):
    tokenizer = load_tokenizer(chat_model(tmp_path))
    tokens = tokenizer.tokenize(PROMPT)
    assert "yes" in tokens and SPECIAL[1] in tokens
    assert all(len(token) == 1 for token in tokens if any(c.isdigit() for c in token))
    assert tokenizer.decode(tokenizer(PROMPT)["input_ids"]) == PROMPT
    assert all(len(tokenizer(word)["input_ids"]) == 1 for word in WORDS)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == SPECIAL[1:] + SPECIAL[2:]  # fmt: skip
    chat = [{"role": "user", "content": "Is 2024 a yes?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == PROMPT
