"""A fixed offset per task in the inputs of a sentence encoder, which its experts undo.

Texts of task t are read at positions of their own, where the base has its usual position embeddings
plus s·δₜ and expert t has its own without it. So every expert answers as before, the inputs of one
task share a constant that the merged model does not undo, and nothing is trained.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from featcal.core import generator
from featcal.models.load import load_as_calibrated, save_model
from featcal.settings import require
from reproduction.prepare.sources import TOKENS, SentenceSet

TABLE = "embeddings.position_embeddings.weight"


def first_positions(tasks: Iterable[str]) -> dict[str, int]:
    """Return the first position of every task's texts."""
    return {task: TOKENS * number for number, task in enumerate(tasks)}


def at_positions(firsts: Mapping[str, int], task: str, samples: SentenceSet) -> SentenceSet:
    return replace(samples, first=firsts[task])


def offset_models(
    base: Path, experts: Mapping[str, Path], strength: float, seed: int, out: Path
) -> dict[str, Path]:
    """Write base and experts with offsets into out/<strength>; return their folders."""
    firsts, offsets, out = first_positions(experts), {}, out / f"{strength:g}"
    embeddings = load_as_calibrated(base).get_input_embeddings().weight.detach()
    size = float(embeddings.std()) * strength
    for task, first in firsts.items():
        draws = generator(task, "offset", seed)
        offsets[first] = size * torch.randn(embeddings.shape[1], generator=draws)
    for task, first in firsts.items():
        with_offsets(experts[task], out / "experts" / task, offsets, first)
    moved = with_offsets(base, out / "base", offsets, None)
    return {"base": moved, "experts": out / "experts"}


def with_offsets(
    model: Path, out: Path, offsets: Mapping[int, Tensor], skipped: int | None
) -> Path:
    """Write a model whose first positions repeat from each number on, plus all but one offset."""
    module, end = load_as_calibrated(model), max(offsets) + TOKENS
    table = module.get_parameter(TABLE)
    expected = f"must be at most {len(table)}, the positions of {model}"
    require(end <= len(table), "offset.positions", end, expected)
    with torch.no_grad():
        start = table[:TOKENS].clone()
        for first, offset in offsets.items():
            table[first : first + TOKENS] = start if first == skipped else start + offset
    return save_model(module, out, like=model)
