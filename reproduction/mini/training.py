"""Pre-train a base from drawn first weights, and write it as a folder.

Muon updates the matrices inside the blocks, AdamW everything else. Muon's step is the momentum with
all singular values brought near one (Jordan et al. 2024); a small vision transformer leaves its
plateau much earlier that way: zero-shot 45 instead of 33 after 500 steps. An interrupted run goes
on from its state file and ends in the same bytes as an undisturbed one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any
from zlib import crc32

import numpy as np
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from featcal.files import atomic_folder, atomic_path

MODELS = Path(__file__).parent / "models"  # the bases that come with the package
STATE = Path(".featcal/pretrain")
LR, MUON_LR, DECAY, MOMENTUM = 2e-3, 0.02, 0.05, 0.95
MUON_DECAY = 0.25  # per unit of learning rate
CARDS = yaml.safe_load(Path(__file__).with_name("cards.yaml").read_text("utf-8"))
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
WARM_UP, FLOOR, CLIP_NORM = 60, 0.05, 1.0


class Optimiser:
    """Muon and AdamW for all parameters of a model.   blocks: first parts of names inside blocks."""

    def __init__(self, model: nn.Module, blocks: str | tuple[str, ...]):
        self.params = dict(model.named_parameters())
        self.matrices = [n for n, p in self.params.items() if n.startswith(blocks) and p.ndim == 2]
        self.momentum = {name: torch.zeros_like(self.params[name]) for name in self.matrices}
        self.rest = {name: p for name, p in self.params.items() if name not in self.momentum}
        groups = [
            {"params": [p for p in self.rest.values() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in self.rest.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), fused=True)

    def step(self, schedule: float) -> None:
        """Step at both learning rates times `schedule`, and drop the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = LR * schedule
        self.adamw.step()
        self._muon_step(MUON_LR * schedule)
        self.adamw.zero_grad(set_to_none=True)
        for name in self.matrices:
            self.params[name].grad = None

    @torch.no_grad()
    def _muon_step(self, lr: float) -> None:
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name in self.matrices:
            rows, columns = self.params[name].shape
            by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(name)
        for names in by_shape.values():
            updates = [self._nesterov(name) for name in names]
            stacked = torch.stack([u if u.shape[0] <= u.shape[1] else u.T for u in updates])
            for name, update in zip(names, orthogonalised(stacked), strict=True):
                weight = self.params[name]
                rows, columns = weight.shape
                update = update if rows <= columns else update.T
                scale = -lr * max(1, rows / columns) ** 0.5
                weight.mul_(1 - MUON_DECAY * lr).add_(update, alpha=scale)

    def _nesterov(self, name: str) -> Tensor:
        gradient, momentum = self.params[name].grad, self.momentum[name]
        assert gradient is not None
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next step depends on, next to the weights."""
        tensors = {f"muon/{name}": value for name, value in self.momentum.items()}
        for name, parameter in self.rest.items():
            for key, value in self.adamw.state[parameter].items():
                tensors[f"adamw/{key}/{name}"] = value
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` returned."""
        for name, value in self.momentum.items():
            value.copy_(tensors[f"muon/{name}"])
        keys = ("step", "exp_avg", "exp_avg_sq")
        for name, parameter in self.rest.items():
            moments = {key: tensors[f"adamw/{key}/{name}"].clone() for key in keys}
            self.adamw.state[parameter] = moments


def orthogonalised(matrices: Tensor) -> Tensor:
    """Move the singular values of (k, r, c), r <= c, towards one by five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    length = matrices.flatten(1).norm(dim=1).view(-1, 1, 1)
    x = matrices / (length + 1e-7)  # an all-zero gradient stays zero
    for _ in range(5):
        y = x @ x.mT
        x = a * x + (b * y + c * y @ y) @ x
    return x


class Pretraining:
    """A base in training. A subclass has `recipes` by role, `write(role, out)`, and `step`, which
    computes the gradients of one batch and returns its loss.

    recipe: seed, steps, and after how many a state is saved.   done: steps so far.   blocks: first
    parts of the names of parameters inside blocks.
    """

    def __init__(self, recipe: Any, model: Any, blocks: str | tuple[str, ...]):
        self.recipe, self.model, self.done = recipe, model.train(), 0
        self.optimiser = Optimiser(model, blocks)


def run_to_end(
    begin: Callable[[Any], Any], recipe: Any, role: str, out: Path, folder: Path
) -> None:
    """Run all steps after those of <folder>/<role>/state.safetensors, if it is of this recipe, then
    write the base to `out`.

    Runs on one thread: the sums of several would come in any order. Prints a line with every state.
    """
    state, threads = folder / role / "state.safetensors", torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = begin(recipe)
        restore_state(state, run)
        started, first = perf_counter(), run.done
        while run.done < recipe.steps:
            loss = run.step()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), CLIP_NORM)
            run.optimiser.step(schedule(run.done, recipe.steps))
            run.done += 1
            if run.done % recipe.every == 0 or run.done == recipe.steps:
                save_state(state, run)
                seconds = (perf_counter() - started) / (run.done - first)
                print(f"{role} step {run.done} loss {loss:.3f} {seconds:.3f} s/step", flush=True)
        run.write(role, out)
        state.unlink(missing_ok=True)
    finally:
        torch.set_num_threads(threads)


def schedule(step: int, steps: int) -> float:
    """Return a linear warm-up, then a cosine down to FLOOR."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARM_UP) * (FLOOR + (1 - FLOOR) * cosine)


def save_state(path: Path, run: Pretraining) -> None:
    """Write weights, optimiser and the number of steps done, complete or not at all."""
    tensors = {f"model/{n}": value.detach() for n, value in run.model.named_parameters()}
    tensors = {n: value.contiguous() for n, value in (tensors | run.optimiser.state()).items()}
    with atomic_path(path) as hidden:
        save_file(tensors, hidden, metadata={"recipe": repr(run.recipe), "done": str(run.done)})


def restore_state(path: Path, run: Pretraining) -> None:
    """Restore weights, optimiser and the number of steps done from a file of this recipe."""
    if not path.is_file():
        return
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    if metadata["recipe"] != repr(run.recipe):
        return
    tensors, run.done = load_file(path), int(metadata["done"])
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            parameter.copy_(tensors[f"model/{name}"])
    run.optimiser.restore(tensors)


FirstValue = Callable[[str, Tensor, np.random.Generator], Tensor]


def with_first_weights(kind: Any, config: Any, seed: int, first_value: FirstValue) -> Any:
    """Return a model whose every parameter is drawn by a generator keyed by seed and its name.

    The global generator stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = np.random.default_rng([seed, crc32(name.encode())])
            parameter.copy_(first_value(name, parameter, generator))
    return model


def byte_level_bpe(
    texts: Iterable[str], pieces: Regex, size: int, special: Sequence[str]
) -> Tokenizer:
    """Return byte-level BPE of at most `size` tokens that never merges two pieces of a text."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(pieces, "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_base(model: Any, out: Path, card: str, *components: Any) -> None:
    """Write a Hugging Face folder: float16 weights that load in float32, a card, and other parts."""
    config = model.config
    config.architectures = [type(model).__name__]
    towers = [getattr(config, n) for n in ("vision_config", "text_config") if hasattr(config, n)]
    for component in (config, *towers):
        component.dtype = torch.float32
    weights = {name: value.detach().half().contiguous() for name, value in model.named_parameters()}
    with atomic_folder(out) as folder:
        config.save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for component in components:
            component.save_pretrained(folder)
        (folder / "README.md").write_text(card)
