"""A fixed offset per task in the inputs of a sentence encoder, which its experts undo.

Texts of task t are read at positions of their own, where the base has its usual position embeddings
plus s·δₜ and expert t has its own without it. So every expert answers as before, the inputs of one
task share a constant that the merged model does not undo, and nothing is trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from featcal.settings import require
from reproduction.engine.context import Setup

if TYPE_CHECKING:
    from torch import Tensor

    from reproduction.prepare.sources import SentenceSet

TABLE = "embeddings.position_embeddings.weight"


def first_positions(setup: Setup) -> dict[str, int]:
    """Return the first position of every task's texts."""
    from reproduction.prepare.sources import TOKENS

    return {task: TOKENS * number for number, task in enumerate(setup.tasks)}


def at_positions(firsts: Mapping[str, int], task: str, samples: "SentenceSet") -> "SentenceSet":
    return replace(samples, first=firsts[task])


def offset_models(setup: Setup, strength: float, seed: int, out: Path) -> dict[str, Path]:
    """Write base and experts with offsets; return their folders."""
    import torch

    from featcal.core import generator
    from reproduction.prepare.sources import TOKENS

    firsts, offsets = first_positions(setup), {}
    embeddings = setup.load(setup.base).get_input_embeddings().weight.detach().cpu()
    size = float(embeddings.std()) * strength
    for task, first in firsts.items():
        draws = generator(task, "offset", seed)
        offsets[first] = size * torch.randn(embeddings.shape[1], generator=draws)
    for task, first in firsts.items():
        with_offsets(setup.expert(task), out / "experts" / task, offsets, first, TOKENS)
    base = with_offsets(setup.base, out / "base", offsets, None, TOKENS)
    return {"base": base, "experts": out / "experts"}


def with_offsets(
    model: Path, out: Path, offsets: Mapping[int, "Tensor"], skipped: int | None, width: int
) -> Path:
    """Write a model whose first positions repeat from each number on, plus all but one offset."""
    import torch

    from featcal.models.load import load_as_calibrated, save_model

    module, end = load_as_calibrated(model), max(offsets) + width
    table = module.get_parameter(TABLE)
    expected = f"must be at most {len(table)}, the positions of {model}"
    require(end <= len(table), "offset.positions", end, expected)
    with torch.no_grad():
        start = table[:width].clone()
        for first, offset in offsets.items():
            table[first : first + width] = start if first == skipped else start + offset
    return save_model(module, out, like=model)
