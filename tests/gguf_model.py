"""A Llama of two blocks as a GGUF file, made on the spot, with every tensor that was put into it."""

import struct
from pathlib import Path

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from reproduction.prepare import gguf

WORDS = ("yes", "no", "positive", "negative")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WIDTH, INNER, HEADS, GROUPS, BLOCKS, THETA, EPSILON = 64, 96, 4, 2, 2, 10000.0, 1e-5
NARROW = (WIDTH // HEADS * GROUPS, WIDTH)
BLOCK = {
    "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": NARROW, "attn_v": NARROW,
    "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(seed: int = 3) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return a file, and its tensors as the format defines them, in GGUF's order of features."""
    draw, data, tensors = np.random.default_rng(seed), b"", {}
    tokens, merges = [*SPECIAL, *sorted(ByteLevel.alphabet())], []
    for word in WORDS:  # every beginning of a word is a token
        tokens += [word[: end + 1] for end in range(1, len(word))]
        merges += [f"{word[:end]} {word[end]}" for end in range(1, len(word))]
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(BLOCKS) for name, shape in BLOCK.items()}
    keys = {
        "general.alignment": 64, "llama.block_count": BLOCKS, "llama.context_length": 512,
        "llama.embedding_length": WIDTH, "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": GROUPS, "llama.rope.freq_base": THETA,
        "llama.attention.layer_norm_rms_epsilon": EPSILON, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(keys))
    header += b"".join(text(name) + value(content) for name, content in keys.items())
    for name, shape in shapes.items():
        kind = 0 if len(shape) == 1 else 8 if name == "token_embd" else 3
        raw, tensors[name] = stored(draw, shape, kind)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += text(f"{name}.weight") + sizes + struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 64)
    return header + b"\0" * (-len(header) % 64) + data, tensors


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def value(content) -> bytes:
    """Return a key's value after its type: an integer, a number, a text, or a list of one of them."""
    if isinstance(content, list):
        inner = [value(one) for one in content]
        return struct.pack("<I4sQ", 9, inner[0][:4], len(inner)) + b"".join(v[4:] for v in inner)
    if isinstance(content, str):
        return struct.pack("<I", 8) + text(content)
    return struct.pack(*(("<If", 6) if isinstance(content, float) else ("<II", 4)), content)


def stored(draw, shape, kind) -> tuple[bytes, np.ndarray]:
    """Return drawn weights as bytes and as float32, block by block where they are quantised."""
    if kind == 0:
        found = draw.uniform(0.5, 1.5, shape).astype(np.float32)
        return found.tobytes(), found
    raw, found = b"", []
    for _ in range(np.prod(shape) // 32):
        scale, shift = np.float16(draw.uniform(0.002, 0.02)), np.float16(0)
        q = [int(one) for one in draw.integers(-127, 128, 32)]
        packed = struct.pack("<e32b", scale, *q)
        if kind == 3:  # 4 bits; byte j holds j and j + 16
            shift, q = np.float16(draw.uniform(-0.2, 0.0)), [one % 16 for one in q]
            packed = struct.pack("<ee16B", scale, shift, *(q[j] | q[j + 16] << 4 for j in range(16)))  # fmt: skip
        raw += packed
        found += [np.float32(scale) * np.float32(one) + np.float32(shift) for one in q]
    return raw, np.array(found, np.float32).reshape(shape)


def chat_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    gguf.write_llama(write_gguf()[0], folder)
    return folder
