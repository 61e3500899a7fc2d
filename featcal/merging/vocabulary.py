"""Which tensors are tables of words, told from their names."""

from fnmatch import fnmatchcase

# rows are words here, so models with other words in them differ in shape, and a row's direction
# says nothing of features
VOCABULARY = ("*shared.weight", "*embed_tokens.weight", "*token_embedding.weight", "*wte.weight", "*word_embeddings.weight",
              "*lm_head.weight", "*lm_head.bias")  # fmt: skip


def is_vocabulary(name: str, patterns: tuple[str, ...] = VOCABULARY) -> bool:
    """Whether a tensor has one row per word, told from its name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
