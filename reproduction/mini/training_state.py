"""The state file of a pre-training: an interrupted run goes on from it and ends in the same bytes
as an undisturbed one.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from featcal.files import atomic_path
from reproduction.mini.muon import Optimiser

WARM_UP, FLOOR, CLIP_NORM = 60, 0.05, 1.0
STATE = Path(".featcal/pretrain")


class Training(Protocol):
    """A base in training. recipe: with `steps`, and `every` so many of them a state file.   done:
    steps so far.
    """

    recipe: Any
    model: Any
    optimiser: Optimiser
    done: int

    def step(self) -> float: ...


T = TypeVar("T", bound=Training)


def run_to_end(
    begin: Callable[[Any], T],
    recipe: Any,
    role: str,
    folder: Path,
    write: Callable[[T], None],
    more: Callable[[T], str] = lambda run: "",
) -> None:
    """All steps, behind those of the state file in <folder>/<role>/ if it is of this recipe; then
    `write` makes files of it.

    A line is printed with every state, and `more` at its end. Runs on one thread, since the sums of
    several would come in any order.
    """
    state = Path(folder) / role / "state.safetensors"
    with one_thread():
        run = begin(recipe)
        run.done = restore_state(state, run.model, run.optimiser, repr(recipe))
        started, first = perf_counter(), run.done
        while run.done < recipe.steps:
            loss = run.step()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), CLIP_NORM)
            run.optimiser.step(schedule(run.done, recipe.steps))
            run.done += 1
            if run.done % recipe.every == 0 or run.done == recipe.steps:
                save_state(state, run.model, run.optimiser, repr(recipe), run.done)
                seconds = (perf_counter() - started) / (run.done - first)
                print(
                    f"{role} step {run.done} loss {loss:.3f} {seconds:.3f} s/step {more(run)}".rstrip(),
                    flush=True,
                )
        write(run)
        state.unlink(missing_ok=True)


def schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to FLOOR."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARM_UP) * (FLOOR + (1 - FLOOR) * cosine)


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread inside the `with`, as many as before behind it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def save_state(path: Path, model: nn.Module, optimiser: Optimiser, recipe: str, done: int) -> None:
    """Weights, optimiser and the number of steps done, complete or not at all."""
    tensors = {
        f"model/{name}": value.detach().contiguous() for name, value in model.named_parameters()
    }
    tensors.update({name: value.contiguous() for name, value in optimiser.state().items()})
    with atomic_path(path) as hidden:
        save_file(tensors, hidden, metadata={"recipe": recipe, "done": str(done)})


def restore_state(path: Path, model: nn.Module, optimiser: Optimiser, recipe: str) -> int:
    """Steps done by the run that wrote the file, model and optimiser as it left them; 0 without a
    file or for another recipe.
    """
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
