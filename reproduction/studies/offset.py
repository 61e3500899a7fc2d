"""An intervention: a fixed offset per task in the inputs of a sentence encoder, which its experts undo.

Texts of task t are read at positions of their own, where the base has its usual position embeddings
plus s·δₜ and expert t has its own without it. So every expert answers as before, the inputs of one
task share a constant that the merged model does not undo, and nothing is trained.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import Selection
from reproduction.engine.spec import ModelSpec, compared_models, merged_model
from reproduction.engine.study import StudyResult, score_parts
from reproduction.experiments import ADAPTERS, Comparison, Each, Study
from reproduction.results import OFFSET, Row

if TYPE_CHECKING:
    from torch import Tensor

    from reproduction.prepare.sources import SentenceSet

TABLE = "embeddings.position_embeddings.weight"


class OffsetStudy(Study):
    """Settings. strengths: s; offsets of 1 deviate as much as entries of word embeddings."""

    scores = OFFSET
    upstream: str
    comparison: Comparison
    paper: Calibration
    strengths: Each[float]
    samples: PositiveInt
    seed: NonNegativeInt
    scored: PositiveInt

    def models(self, setup: Setup) -> Iterator[ModelSpec]:
        """Yield the merged model, FeatCal at both settings, the experts, and adapters."""
        folder = setup.folder("studied")
        yield merged_model(setup, self.upstream).but(seed=self.seed)
        yield from reversed(compared_models(self, folder, "featcal"))
        yield ModelSpec("expert", None, "expert", seed=self.seed)
        yield from compared_models(self, folder, *ADAPTERS)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        firsts, rows = first_positions(setup), list[Row]()
        moved = replace(setup, change=partial(at_positions, firsts))
        selection = Selection("test", self.scored, self.seed)
        jobs = {f"{s:g}": (setup, s, self.seed, folder / f"{s:g}") for s in self.strengths}
        parts_by_strength = setup.context.run(f"{self.label} models", offset_models, jobs)
        for name, parts in parts_by_strength.items():
            args, columns = (moved, folder / name, parts, self.models), {"strength": name}
            rows += score_parts(f"{self.label} {name}", *args, columns=columns, selection=selection)
        return StudyResult(rows)


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
