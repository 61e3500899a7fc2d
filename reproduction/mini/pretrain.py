"""Pre-training of a base: every web picture is matched against all captions of all tasks.

An interrupted run goes on from its state file and ends in the same bytes as an undisturbed one,
because every step's draws are keyed by (seed, step). Looks at web pictures and unshifted held-out
ones, never at a task's own splits.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.mini.augment import augmented, keyed_generator, normalised
from reproduction.mini.base_folder import write_base
from reproduction.mini.captions import TEMPLATES, caption_tokens, first_caption, make_tokenizer
from reproduction.mini.images import WEB, draw_split
from reproduction.mini.muon import Optimiser
from reproduction.mini.tasks import TASKS
from reproduction.mini.towers import SIZES, Size, new_model
from reproduction.mini.training_state import STATE, run_to_end

LARGEST_LOG_SCALE = 4.0
STEP, EPOCH, SHUFFLE = 1, 2, 3  # what a keyed draw is for


@dataclass(frozen=True)
class Recipe:
    """All that a base's bytes depend on besides the code: the tower's size, steps, seed, batch and
    web pictures per task.
    """

    size: Size
    steps: int = 4000
    seed: int = 0
    batch: int = 64
    pictures: int = WEB
    every: int = 250  # steps between two state files


def pretrain(
    role: str,
    out: Path,
    steps: int = 4000,
    state_folder: Path = STATE,
    recipe: Recipe | None = None,
) -> None:
    """Pre-trains the base of a role and writes it as a CLIPModel folder, resuming from
    <state_folder>/<role>/ if it can.

    Loss: cross-entropy of exp(logit_scale) <image, caption> over the captions of all classes of all
    tasks, in one of three templates per step.
    """
    recipe = recipe or Recipe(SIZES[role], steps)

    def write(run: _Run) -> None:
        write_base(
            run.model, make_tokenizer(), role, Path(out)
        )  # the one in use keeps its last padding

    run_to_end(_Run, recipe, role, state_folder, write, _Run.held_out_line)


class _Run:
    """A base in training: model, optimiser, pictures and how many steps are done."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.done = recipe, 0
        self.model = new_model(recipe.size, recipe.seed).train()
        self.optimiser = Optimiser(self.model)
        self.tokenizer = make_tokenizer()
        self.tokens = [caption_tokens(self.tokenizer, template) for template in range(TEMPLATES)]
        self.pictures, self.targets = web_pictures(recipe.pictures, recipe.seed)

    def step(self) -> float:
        """Gradients of one batch, and its loss."""
        recipe = self.recipe
        generator = keyed_generator(recipe.seed, STEP, self.done)
        chosen = self._batch()
        template = int(torch.randint(TEMPLATES, (), generator=generator))
        pixels = augmented(normalised(self.pictures[chosen]), generator)
        images = F.normalize(
            self.model.get_image_features(pixel_values=pixels).pooler_output, dim=-1
        )
        texts = F.normalize(
            self.model.get_text_features(**self.tokens[template]).pooler_output, dim=-1
        )
        scale = self.model.logit_scale.clamp(max=LARGEST_LOG_SCALE).exp()
        loss = F.cross_entropy(scale * images @ texts.T, self.targets[chosen])
        loss.backward()
        return loss.item()

    def _batch(self) -> Tensor:
        """Every picture once per epoch, in an order keyed by the epoch."""
        recipe = self.recipe
        epoch, place = divmod(self.done, len(self.pictures) // recipe.batch)
        order = torch.randperm(
            len(self.pictures), generator=keyed_generator(recipe.seed, EPOCH, epoch)
        )
        return order[place * recipe.batch : (place + 1) * recipe.batch]

    @torch.no_grad()
    def held_out_line(self, count: int = 40) -> str:
        """Zero-shot accuracy on unshifted pictures drawn for validation, the mean of the first
        eight and of all tasks.
        """
        texts = F.normalize(self.model.get_text_features(**self.tokens[0]).pooler_output, dim=-1)
        places, scores = first_caption(), []
        for key, task in TASKS.items():
            pictures, labels = draw_split(key, "validation", count, self.recipe.seed, 0.0)
            images = self.model.get_image_features(pixel_values=normalised(pictures)).pooler_output
            own = texts[places[key] : places[key] + len(task.classes)]
            scores.append(
                100 * float(((images @ own.T).argmax(1) == torch.from_numpy(labels)).float().mean())
            )
        return f"zero-shot {np.mean(scores[:8]):.1f} (8 tasks) {np.mean(scores):.1f} (all)"


def web_pictures(count: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """`count` web pictures of every task and the place of each one's caption among all captions."""
    pictures, targets = [], []
    for key, task in TASKS.items():
        images, labels = draw_split(key, "web", count, seed, 0.0)
        target = torch.from_numpy(labels)
        if task.captions_shuffled:
            target = target[torch.randperm(count, generator=keyed_generator(seed, SHUFFLE))]
        pictures.append(images)
        targets.append(first_caption()[key] + target)
    return np.concatenate(pictures), torch.cat(targets)


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument(
        "--out", type=Path, default=None, help="default: the folder shipped with the package"
    )
    parser.add_argument(
        "--state", type=Path, default=STATE, help="where an interrupted run is kept"
    )
    given = parser.parse_args()
    out = given.out or Path(__file__).parent / "models" / given.role
    pretrain(given.role, out, given.steps, given.state)


if __name__ == "__main__":
    main()
