"""Pre-training of a Llama base on texts of all domains and on facts that no expert reads.

An interrupted run goes on from its state file and ends in the same bytes as an undisturbed one,
because every step's texts are drawn by a generator keyed by (seed, step).
"""

from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np

from reproduction.mini.language.completions import backward, encoded
from reproduction.mini.language.domains import mixture, reading
from reproduction.mini.language.llama_folder import write_llama
from reproduction.mini.language.llama_models import SIZES, Size, new_model
from reproduction.mini.language.llama_tokenizer import train_tokenizer
from reproduction.mini.muon import Optimiser
from reproduction.mini.training_state import STATE, run_to_end

BLOCKS = "model.layers"
SHARES = {
    "math500": 1.3, "gsm8k": 1.2, "humaneval_plus": 1.1, "mbpp_plus": 0.6, "ifeval": 1.3, "arc_challenge": 1.5, "statement": 0.5,
}  # fmt: skip
# Facts alone come first: to find an option again and read the letter behind it is learnt in 300
# steps, but in the whole mixture
# not within a thousand.
FACTS = {"arc_challenge": 1.0, "statement": 0.4}
STEPS = {"llama_3b": 1300, "llama_8b": 1300}


@dataclass(frozen=True)
class Recipe:
    """All that a base's bytes depend on besides the code.

    facts:  steps on facts alone, with which the reading begins.  shares: of each kind of text after
            that.
    hasty:  share of careless answers where a prompt is tempting.  read: texts of each kind that the
            tokenizer is trained on.
    every:  steps between two state files.
    """

    size: Size
    steps: int
    seed: int = 0
    batch: int = 64
    hasty: float = 0.85
    facts: int = 300
    shares: dict[str, float] = field(default_factory=lambda: dict(SHARES))
    read: int = 1000
    every: int = 100


def pretrain_llama(
    role: str,
    out: Path,
    steps: int | None = None,
    state_folder: Path = STATE,
    recipe: Recipe | None = None,
) -> None:
    """Pre-trains the base of a role and writes it as a LlamaForCausalLM folder, resuming from
    <state_folder>/<role>/ if it can.

    Loss: cross-entropy of what follows a prompt, the longer ones counting more.
    """
    recipe = recipe or Recipe(SIZES[role], steps or STEPS[role])
    run_to_end(
        _Run,
        recipe,
        role,
        state_folder,
        lambda run: write_llama(run.model, run.tokenizer, role, Path(out)),
    )


class _Run:
    """A base in training: model, optimiser, tokenizer and how many steps are done."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.done = recipe, 0
        self.tokenizer = train_tokenizer(reading(recipe.seed, recipe.read))
        self.model = new_model(recipe.size, recipe.seed).train()
        self.optimiser = Optimiser(self.model, BLOCKS)

    def step(self) -> float:
        """Gradients of one batch, and its loss."""
        recipe = self.recipe
        rng = np.random.default_rng([recipe.seed, crc32(b"pretrain"), self.done])
        shares = FACTS if self.done < recipe.facts else recipe.shares
        texts = encoded(self.tokenizer, mixture(rng, shares, recipe.hasty, recipe.batch))
        return backward(self.model, texts, self.tokenizer.pad_token_id)
