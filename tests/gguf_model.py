"""A Llama of two blocks as a GGUF file, made on the spot, with every tensor that was put into it."""

import struct
from pathlib import Path

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from reproduction.prepare import gguf

WORDS = ("yes", "no", "positive", "negative")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WIDTH, INNER, HEADS, GROUPS, BLOCKS = 64, 96, 4, 2, 2
HALF = WIDTH // HEADS // 2
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> tuple[list[str], list[str]]:
    """Return every byte and the beginnings of WORDS as tokens, and the merges that make them."""
    tokens, merges = [*SPECIAL, *sorted(ByteLevel.alphabet())], []
    for word in WORDS:
        for end in range(1, len(word)):
            if word[: end + 1] not in tokens:
                tokens.append(word[: end + 1])
                merges.append(f"{word[:end]} {word[end]}")
    return tokens, merges


def write_gguf(seed: int = 3) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return a file, and its tensors as the format defines them, in GGUF's order of features."""
    draw, (tokens, merges) = np.random.default_rng(seed), vocabulary()
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for block in range(BLOCKS):
        shapes |= {
            f"blk.{block}.{name}": shape
            for name, shape in {
                "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH),
                "attn_k": (GROUPS * 2 * HALF, WIDTH), "attn_v": (GROUPS * 2 * HALF, WIDTH),
                "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
                "ffn_down": (WIDTH, INNER),
            }.items()
        }  # fmt: skip
    keys = {
        "general.alignment": 64, "llama.block_count": BLOCKS, "llama.context_length": 512,
        "llama.embedding_length": WIDTH, "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": GROUPS,
        "llama.rope.freq_base": 10000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(keys))
    header += b"".join(text(name) + value(content) for name, content in keys.items())
    data, tensors = b"", {}
    for name, shape in shapes.items():
        kind = 0 if len(shape) == 1 else 8 if name == "token_embd" else 3
        raw, tensors[name] = {0: norm, 3: four_bits, 8: eight_bits}[kind](draw, shape)
        header += text(f"{name}.weight") + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 64)
    return header + b"\0" * (-len(header) % 64) + data, tensors


def text(content: str) -> bytes:
    raw = content.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(content) -> bytes:
    """Return a key's value after its type: an integer, a number, a text, or a list of one of them."""
    if isinstance(content, list):
        kind, whole = (8, text) if isinstance(content[0], str) else (5, struct.Struct("<i").pack)
        parts = b"".join(whole(one) for one in content)
        return struct.pack("<IIQ", 9, kind, len(content)) + parts
    if isinstance(content, str):
        return struct.pack("<I", 8) + text(content)
    return struct.pack("<If" if isinstance(content, float) else "<II", 6 if isinstance(content, float) else 4, content)  # fmt: skip


def norm(draw, shape):
    found = draw.uniform(0.5, 1.5, shape).astype(np.float32)
    return found.tobytes(), found


def four_bits(draw, shape):
    """Block by block: scale, shift and 32 numbers of 4 bits, of which byte j holds j and j + 16."""
    raw, found = b"", []
    for _ in range(np.prod(shape) // 32):
        scale, shift = np.float16(draw.uniform(0.01, 0.04)), np.float16(draw.uniform(-0.4, 0.0))
        q = [int(one) for one in draw.integers(0, 16, 32)]
        raw += scale.tobytes() + shift.tobytes()
        raw += bytes(q[j] | q[j + 16] << 4 for j in range(16))
        found += [np.float32(scale) * np.float32(one) + np.float32(shift) for one in q]
    return raw, np.array(found, np.float32).reshape(shape)


def eight_bits(draw, shape):
    """Block by block: scale and 32 numbers of 8 bits."""
    raw, found = b"", []
    for _ in range(np.prod(shape) // 32):
        scale, q = np.float16(draw.uniform(0.001, 0.02)), draw.integers(-127, 128, 32, np.int8)
        raw += scale.tobytes() + q.tobytes()
        found += [np.float32(scale) * np.float32(one) for one in q]
    return raw, np.array(found, np.float32).reshape(shape)


def chat_model(folder: Path) -> Path:
    """Write the small model as a folder of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf.write_llama(write_gguf()[0], folder)
    return folder
