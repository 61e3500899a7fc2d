"""An intervention: a fixed offset per task in the inputs of a sentence encoder, which its experts undo.

Texts of task t are read at positions of their own, where the base has its usual position embeddings
plus s·δₜ and expert t has its own without it. So every expert answers as before, the inputs of one task
share a constant that the merged model does not undo, and nothing is trained. Synthetic images have
such a constant, the fixed change of each task's images; public texts do not.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import Batch, Selection, streams
from reproduction.engine.score import Row, answers
from reproduction.engine.study import Found
from reproduction.experiments import Draw, Each, Rivals, Study
from reproduction.results import OFFSET

if TYPE_CHECKING:
    from torch import Tensor

TABLE = "embeddings.position_embeddings.weight"


class OffsetStudy(Study):
    """Settings of the study.

    strengths: s; 1 is an offset whose entries deviate as much as those of word embeddings.
    scored:    test samples of each task.
    """

    section = "offset"
    scores = OFFSET
    upstream: str
    rivals: Rivals
    paper: Calibration
    strengths: Each[float]
    samples: PositiveInt
    seed: NonNegativeInt
    scored: PositiveInt

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return rows of experts, merged and calibrated models and adapters at every strength."""
        jobs = {f"{s:g}": (setup, self, s, folder / f"{s:g}") for s in self.strengths}
        results = setup.context.run(f"offset {self.key}", measured, jobs)
        rows = [row for rows, _ in results.values() for row in rows]
        return Found(rows, facts={"drift": {name: drift for name, (_, drift) in results.items()}})


@dataclass(frozen=True)
class Placed:
    """Samples of one task at its own positions."""

    samples: Any
    first: int

    @property
    def labels(self) -> Any:
        """Return the labels, (n,)."""
        return self.samples.labels

    @property
    def classes(self) -> Any:
        """Return the names of the classes."""
        return self.samples.classes

    def batches(self, indices: Any, size: int) -> Iterator[Batch]:
        """Yield batches with position_ids."""
        for batch in self.samples.batches(indices, size):
            yield placed(batch, self.first)


def placed(batch: Batch, first: int) -> Batch:
    """Return a batch whose texts are read from a position on."""
    import torch

    ids = batch["input_ids"]
    positions = torch.arange(first, first + ids.shape[1]).expand_as(ids)
    return {**batch, "position_ids": positions}


def with_offsets(
    model: Path, out: Path, offsets: Mapping[int, "Tensor"], plain: Collection[int], width: int
) -> Path:
    """Write a model whose positions are repeated: `width` of them from every number of `offsets`
    on, each plus its offset (d,), but for those in `plain`.
    """
    import torch

    from featcal.models.load import load_as_calibrated
    from featcal.models.save import save_model

    module = load_as_calibrated(model)
    table = module.get_parameter(TABLE)
    expected = f"must be at most {len(table)}, the positions of {model}"
    require(max(offsets) + width <= len(table), "offset.positions", max(offsets) + width, expected)
    with torch.no_grad():
        start = table[:width].clone()
        for first, offset in offsets.items():
            table[first : first + width] = start if first in plain else start + offset
    return save_model(module, out, like=model)


def measured(
    setup: Setup, study: OffsetStudy, strength: float, out: Path
) -> tuple[list[Row], dict[str, tuple[float, float]]]:
    """Return rows at one strength, and by task the merged model's squared drift from the expert
    and the part of it that is the same for all samples.
    """
    import torch

    import featcal
    from featcal.baselines.mean_shift import MeanShift
    from featcal.baselines.training import pool_features
    from featcal.core.draws import generator
    from featcal.models.load import load_as_calibrated
    from reproduction.prepare.sentences import TOKENS

    firsts = {task: TOKENS * number for number, task in enumerate(setup.tasks)}
    words = load_as_calibrated(setup.base).get_input_embeddings().weight
    size = strength * float(words.detach().std())
    offsets = {
        first: size * torch.randn(words.shape[1], generator=generator(task, "offset", study.seed))
        for task, first in firsts.items()
    }
    base = with_offsets(setup.base, out / "base", offsets, (), TOKENS)
    experts = {
        task: with_offsets(setup.expert(task), out / task, offsets, [firsts[task]], TOKENS)
        for task in setup.tasks
    }
    run = setup.context.experiments.merge[f"{study.key}-{study.upstream}"]
    merged = out / "merged"
    featcal.merge(run.method, base, experts, out=merged, **(run.options or {}))

    def seen(draw: Draw) -> dict[str, list[Batch]]:
        drawn = streams(setup, draw)
        return {task: [placed(batch, firsts[task]) for batch in drawn[task]] for task in drawn}

    rivals, device, projection = study.rivals, setup.context.device, setup.projection()
    calibrated = {rivals.setting: rivals.featcal, "paper": study.paper}
    for setting, settings in calibrated.items():
        batches = seen(rivals.draw("featcal", study.samples, study.seed))
        given: dict[str, Any] = {"base": base, "experts": experts, "batches": batches}
        given |= {"settings": settings, "device": device, "out": out / "calibrated" / setting}
        featcal.calibrate(merged, **given, resume=False)
    batches = seen(rivals.draw("surgery", study.samples, study.seed))
    pairs = pool_features(merged, experts, batches, projection, device)
    fitted = {
        ("surgery", rivals.setting): rivals.surgery.fit(pairs, study.seed),
        ("prob_surgery", rivals.setting): rivals.prob_surgery.fit(pairs, study.seed),
        ("mean_shift", rivals.setting): MeanShift().fit(pairs),
    }
    models = {("merged", ""): setup.load(merged)}  # the first, which adapters correct
    for setting in calibrated:
        models["featcal", setting] = setup.load(out / "calibrated" / setting)
    selection = Selection("test", study.scored, study.seed)

    def read(task: str) -> Placed:
        return Placed(selection.read(setup, task), firsts[task])

    def all_models(task: str) -> dict[Any, Any]:
        return {**models, ("expert", ""): setup.load(experts[task])}

    changes: Any = {name: adapters.apply for name, adapters in fitted.items()}
    counts: Any = answers(setup, all_models, read, changes)  # type: ignore[arg-type]
    rows = []
    for (method, setting), found in counts.items():
        columns = {"method": method, "setting": setting, "strength": f"{strength:g}"}
        columns |= {"metric": "accuracy", "seed": study.seed}
        upstream = "" if method == "expert" else study.upstream
        common = {**setup.words, "upstream": upstream, **columns}
        rows += [{**common, "task": task, **one} for task, one in found.items()]
    drift = {}
    for task, pair in pairs.items():
        difference = (pair.expert - pair.merged).double()  # (n, p)
        parts = difference.square().sum(1).mean(), difference.mean(0).square().sum()
        drift[task] = (round(float(parts[0]), 6), round(float(parts[1]), 6))
    return rows, drift
