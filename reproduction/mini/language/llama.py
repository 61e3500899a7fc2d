"""Pre-train the two Llama bases on texts of all domains, and on facts that no expert reads.

Every step's texts are drawn by a generator keyed by (seed, step).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, processors
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from featcal.data.batches import IGNORED
from reproduction.mini import training
from reproduction.mini.language.domains import mixture, reading
from reproduction.prepare.texts import TokenizedExample, example_batch

BLOCKS = "model.layers"
SHARES = {
    "math500": 1.3, "gsm8k": 1.2, "humaneval_plus": 1.1, "mbpp_plus": 0.6, "ifeval": 1.3, "arc_challenge": 1.5, "statement": 0.5,
}  # fmt: skip
# Facts alone come first: to find an option again and read the letter behind it takes 300 steps to
# learn, but in the whole mixture more than a thousand.
FACTS = {"arc_challenge": 1.0, "statement": 0.4}
HALVES = 2  # a batch goes through the model in two parts, short and long texts, with less padding
EMBEDDING_SPREAD = 0.05
PAD, BOS, EOS = SPECIALS = ("<pad>", "<s>", "</s>")
VOCABULARY = 704
LONGEST = 128  # tokens; the longest text of the suite has about 80
PIECES = Regex(" ?[a-z]+| ?[A-Z]|[^a-z]")


@dataclass(frozen=True)
class LlamaRecipe:
    """All settings that a base's bytes depend on.

    groups: key and value heads.   hasty: see `mixture`.   facts: first steps, on facts alone.
    read: texts per kind for the tokenizer.   every: steps between two state files.
    """

    hidden: int
    layers: int
    heads: int
    groups: int
    mlp: int
    tied: bool
    steps: int = 1300
    seed: int = 0
    batch: int = 64
    hasty: float = 0.85
    facts: int = 300
    shares: dict[str, float] = field(default_factory=lambda: dict(SHARES))
    read: int = 1000
    every: int = 100


class LlamaPretraining(training.Pretraining):
    """A base in training. Loss: cross-entropy of what follows a prompt, longer ones counting more."""

    recipes = {
        "llama_3b": LlamaRecipe(hidden=128, layers=4, heads=4, groups=2, mlp=256, tied=True),
        "llama_8b": LlamaRecipe(hidden=128, layers=5, heads=4, groups=2, mlp=224, tied=False),
    }

    def __init__(self, recipe: LlamaRecipe):
        self.tokenizer = train_tokenizer(reading(recipe.seed, recipe.read))
        super().__init__(recipe, new_model(recipe), BLOCKS)

    def step(self) -> float:
        recipe = self.recipe
        rng = np.random.default_rng([recipe.seed, crc32(b"pretrain"), self.done])
        shares = FACTS if self.done < recipe.facts else recipe.shares
        texts = encoded(self.tokenizer, mixture(rng, shares, recipe.hasty, recipe.batch))
        return backward(self.model, texts, self.tokenizer.pad_token_id)

    def write(self, role: str, out: Path) -> None:
        tokenizer, parameters = self.tokenizer, self.model.num_parameters()
        card = training.CARDS["llama"].format(role=role, parameters=parameters, **vars(self.recipe))
        ends = [tokenizer.eos_token_id, *tokenizer("\n", add_special_tokens=False)["input_ids"]]
        generation = GenerationConfig(
            do_sample=False, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=ends,
        )  # fmt: skip
        training.write_base(self.model, out, card, generation, tokenizer)


def encoded(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str]]
) -> list[TokenizedExample]:
    """Return prompts with completions, whose tokens alone are learnt."""
    token_ids = tokenizer([prompt + completion for prompt, completion in rows])["input_ids"]
    begins = [len(ids) for ids in tokenizer([prompt for prompt, _ in rows])["input_ids"]]
    return [
        TokenizedExample(ids, [IGNORED] * begin + ids[begin:])
        for ids, begin in zip(token_ids, begins, strict=True)
    ]


def backward(model: LlamaForCausalLM, texts: Sequence[TokenizedExample], pad: int) -> float:
    """Compute gradients of the cross-entropy per completion token, and return the loss.

    A text of n such tokens counts √n: with n a letter would be lost next to a program, with equal
    weights the steps of a calculation are learnt late.
    """
    ordered = sorted(texts, key=lambda text: len(text.ids))
    total = sum((len(text.ids) - text.labels.count(IGNORED)) ** 0.5 for text in ordered)
    half, loss = -(-len(ordered) // HALVES), 0.0
    for first in range(0, len(ordered), half):
        batch = example_batch(ordered[first : first + half], pad)
        labels = batch.pop("labels")[:, 1:]
        hidden = model.model(**batch).last_hidden_state
        learnt = labels != IGNORED
        share = (learnt / learnt.sum(1, keepdim=True) ** 0.5)[learnt] / total
        logits = model.lm_head(hidden[:, :-1][learnt])
        part = (share * F.cross_entropy(logits, labels[learnt], reduction="none")).sum()
        part.backward()
        loss += part.item()
    return loss


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return byte-level BPE over whole words of small letters; other signs stay single.

    Single digits and capitals keep arithmetic and string programs exact. A blank belongs to the
    word or capital after it. A text begins with <s>; padding is on the left.
    """
    backend = training.byte_level_bpe(texts, PIECES, VOCABULARY, SPECIALS)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIALS.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS,
        model_max_length=LONGEST, padding_side="left", clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def new_model(recipe: LlamaRecipe) -> LlamaForCausalLM:
    """Return a Llama with drawn first weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=recipe.hidden, intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.groups, max_position_embeddings=LONGEST,
        tie_word_embeddings=recipe.tied, pad_token_id=SPECIALS.index(PAD),
        bos_token_id=SPECIALS.index(BOS), eos_token_id=SPECIALS.index(EOS), rms_norm_eps=1e-5,
    )  # fmt: skip

    def first_value(name: str, parameter: Tensor, generator: np.random.Generator) -> Tensor:
        if "norm" in name:
            return torch.ones_like(parameter)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            spread = EMBEDDING_SPREAD
        else:
            spread = parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                spread *= (2 * recipe.layers) ** -0.5
        noise = generator.standard_normal(tuple(parameter.shape))
        return torch.from_numpy(spread * noise).float()

    return training.with_first_weights(LlamaForCausalLM, config, recipe.seed, first_value)
