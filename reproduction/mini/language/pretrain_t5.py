"""Pre-training of a small T5 on all eight drawn tasks at once, with the answers that the bases are
told.

An interrupted run goes on from its state file and ends in the same bytes, because every step has
rows of its own, which are seen once. Looks at the web split only, never at a split of the tasks
themselves.
"""

from dataclasses import dataclass
from pathlib import Path

from featcal.data.batches import collate
from featcal.data.texts import Reader, input_of
from reproduction.mini.language.glue_rows import WEB, WORLDS, draw_samples
from reproduction.mini.language.t5_folder import write_t5
from reproduction.mini.language.t5_models import T5_SIZES, T5Size, new_t5
from reproduction.mini.language.t5_tokenizer import make_tokenizer
from reproduction.mini.muon import Optimiser
from reproduction.mini.training_state import STATE, run_to_end

BLOCKS = ("encoder.block", "decoder.block")
STEPS = {"flan_t5_base": 2000, "flan_t5_large": 1600}


@dataclass(frozen=True)
class T5Recipe:
    """All that a base's bytes depend on besides the code; a step sees `rows` rows of the web split
    of every task.
    """

    size: T5Size
    steps: int
    seed: int = 0
    rows: int = 6
    every: int = 250  # steps between two state files


def pretrain_t5(
    role: str, out: Path, state_folder: Path = STATE, recipe: T5Recipe | None = None
) -> None:
    """Pre-trains the base of a role and writes its folder, resuming from <state_folder>/<role>/ if
    it can.

    Loss: teacher-forced cross-entropy of the answers.
    """
    recipe = recipe or T5Recipe(T5_SIZES[role], STEPS[role])
    run_to_end(
        _Run,
        recipe,
        role,
        state_folder,
        lambda run: write_t5(run.model, make_tokenizer(recipe.seed), role, Path(out)),
    )


class _Run:
    """A base in training: model, optimiser, tokenizer and how many steps are done."""

    def __init__(self, recipe: T5Recipe):
        self.recipe, self.done = recipe, 0
        tokenizer = make_tokenizer(recipe.seed)
        self.model = new_t5(recipe.size, len(tokenizer), recipe.seed).train()
        self.optimiser = Optimiser(self.model, BLOCKS)
        self.reader = Reader(
            tokenizer, input_of(self.model), tokenizer.model_max_length, Path(STATE)
        )

    def step(self) -> float:
        """Gradients of one batch, and its loss."""
        recipe = self.recipe
        first = self.done * recipe.rows
        samples = [
            sample
            for key in WORLDS
            for sample in draw_samples(key, WEB, recipe.rows, recipe.seed, first)
        ]
        tokens = [self.reader.tokens(sample) for sample in samples]
        loss = self.model(**collate(tokens, self.reader.pad, self.reader.takes)).loss
        loss.backward()
        return float(loss.detach())
