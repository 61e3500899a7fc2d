"""An intervention: a fixed offset per task in the inputs of a sentence encoder, which its experts undo.

Texts of task t are read at positions of their own, where the base has its usual position embeddings
plus s·δₜ and expert t has its own without it. So every expert answers as before, the inputs of one
task share a constant that the merged model does not undo, and nothing is trained.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import Batch, Selection, streams
from reproduction.engine.score import Row, answers
from reproduction.engine.study import StudyResult
from reproduction.experiments import Draw, Each, Rivals, Study
from reproduction.results import OFFSET

if TYPE_CHECKING:
    from torch import Tensor

TABLE = "embeddings.position_embeddings.weight"


class OffsetStudy(Study):
    """Settings. strengths: s; offsets of 1 deviate as much as entries of word embeddings."""

    section = "offset"
    scores = OFFSET
    upstream: str
    rivals: Rivals
    paper: Calibration
    strengths: Each[float]
    samples: PositiveInt
    seed: NonNegativeInt
    scored: PositiveInt

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        jobs = {f"{s:g}": (setup, self, s, folder / f"{s:g}") for s in self.strengths}
        found = setup.context.run(f"offset {self.key}", rows_at, jobs)
        return StudyResult([row for rows in found.values() for row in rows])


def placed(first: int, batch: Batch) -> Batch:
    """Return a batch whose texts are read from a position on."""
    import torch

    ids = batch["input_ids"]
    return {**batch, "position_ids": torch.arange(first, first + ids.shape[1]).expand_as(ids)}


def with_offsets(
    model: Path, out: Path, offsets: Mapping[int, "Tensor"], own: int | None, width: int
) -> Path:
    """Write a model whose first positions repeat from every number on, plus offsets but at `own`."""
    import torch

    from featcal.models.load import load_as_calibrated, save_model

    module, end = load_as_calibrated(model), max(offsets) + width
    table = module.get_parameter(TABLE)
    expected = f"must be at most {len(table)}, the positions of {model}"
    require(end <= len(table), "offset.positions", end, expected)
    with torch.no_grad():
        start = table[:width].clone()
        for first, offset in offsets.items():
            table[first : first + width] = start if first == own else start + offset
    return save_model(module, out, like=model)


def rows_at(setup: Setup, study: OffsetStudy, strength: float, out: Path) -> list[Row]:
    """Return the rows at one strength."""
    import torch

    import featcal
    from featcal.baselines.corrections import MeanShift
    from featcal.baselines.training import pool_features
    from featcal.core import generator
    from reproduction.prepare.sources import TOKENS

    firsts = {task: TOKENS * number for number, task in enumerate(setup.tasks)}
    words = setup.load(setup.base).get_input_embeddings().weight.detach().cpu()
    size, offsets = float(words.std()) * strength, {}
    for task, first in firsts.items():
        draws = generator(task, "offset", study.seed)
        offsets[first] = size * torch.randn(words.shape[1], generator=draws)
    base = with_offsets(setup.base, out / "base", offsets, None, TOKENS)
    experts = {}
    for task, first in firsts.items():
        experts[task] = with_offsets(setup.expert(task), out / task, offsets, first, TOKENS)
    run, merged = setup.context.experiments.merge[study.merged], out / "merged"
    featcal.merge(run.method, base, experts, out=merged, **(run.options or {}))

    def seen(draw: Draw) -> dict[str, list[Batch]]:
        drawn = streams(setup, draw)
        return {task: [placed(firsts[task], batch) for batch in drawn[task]] for task in drawn}

    rivals, device, seed = study.rivals, setup.context.device, study.seed
    given: dict[str, Any] = {"base": base, "experts": experts, "device": device, "resume": False}
    given["batches"] = seen(rivals.draw("featcal", study.samples, seed))
    models = {("merged", ""): setup.load(merged)}  # the first, which adapters correct
    for setting, settings in {"paper": study.paper, rivals.setting: rivals.featcal}.items():
        featcal.calibrate(merged, settings=settings, out=out / setting, **given)
        models["featcal", setting] = setup.load(out / setting)
    batches = seen(rivals.draw("surgery", study.samples, seed))
    pairs = pool_features(merged, experts, batches, setup.projection(), device)
    methods = (rivals.surgery, rivals.prob_surgery, MeanShift())
    changes: Any = {(m.name, rivals.setting): m.fit(pairs, seed).apply for m in methods}

    def read(task: str) -> Any:
        samples, place = Selection("test", study.scored, seed).read(setup, task), firsts[task]
        batches = lambda *given: map(partial(placed, place), samples.batches(*given))  # noqa: E731
        return SimpleNamespace(labels=samples.labels, batches=batches)

    def encoders(task: str) -> Any:
        return {**models, ("expert", ""): setup.load(experts[task])}

    counts: Any = answers(setup, encoders, read, changes)
    common = {**setup.words, "strength": f"{strength:g}", "metric": "accuracy", "seed": seed}
    rows = []
    for (method, setting), found in counts.items():
        upstream = "" if method == "expert" else study.upstream
        own = {**common, "upstream": upstream, "method": method, "setting": setting}
        rows += [{**own, "task": task, **one} for task, one in found.items()]
    return rows
