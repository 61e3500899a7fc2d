"""The state file of a pre-training: an interrupted run goes on from it and ends in the same bytes as an undisturbed one."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from featcal.storage.atomic import atomic_path
from reproduction.mini.muon import Optimiser


class Training(Protocol):
    """A base in training. recipe: with `steps`, and `every` so many of them a state file.   done: steps so far."""

    recipe: Any
    model: Any
    optimiser: Optimiser
    done: int

    def step(self) -> float: ...


def run_to_end(run: Training, role: str, state: Path, more: Callable[[], str] | None = None) -> None:
    """The remaining steps, behind those of the state file if it is of this recipe; a line is printed with every state.

    more: what the line ends with.
    """
    recipe = run.recipe
    run.done = restore_state(state, run.model, run.optimiser, repr(recipe))
    started, first = perf_counter(), run.done
    while run.done < recipe.steps:
        loss = run.step()
        if run.done % recipe.every == 0 or run.done == recipe.steps:
            save_state(state, run.model, run.optimiser, repr(recipe), run.done)
            seconds = (perf_counter() - started) / (run.done - first)
            print(f"{role} step {run.done} loss {loss:.3f} {seconds:.3f} s/step{f' {more()}' if more else ''}", flush=True)


def save_state(path: Path, model: nn.Module, optimiser: Optimiser, recipe: str, done: int) -> None:
    """Weights, optimiser and the number of steps done, complete or not at all."""
    tensors = {f"model/{name}": value.detach().contiguous() for name, value in model.named_parameters()}
    tensors.update({name: value.contiguous() for name, value in optimiser.state().items()})
    with atomic_path(path) as hidden:
        save_file(tensors, hidden, metadata={"recipe": recipe, "done": str(done)})


def restore_state(path: Path, model: nn.Module, optimiser: Optimiser, recipe: str) -> int:
    """Steps done by the run that wrote the file, model and optimiser as it left them; 0 without a file or for another recipe."""
    if not path.is_file():
        return 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    if metadata["recipe"] != recipe:
        return 0
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model/{name}"])
    optimiser.restore(tensors)
    return int(metadata["done"])
