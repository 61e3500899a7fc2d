"""Calibration or extrapolation: what ρ, the order and α are worth when λ is chosen again for each.

Protocol, fixed before any score was seen. After one merger, FeatCal is calibrated at every order, α
and ρ with several λ; of each such cell, and of `stream` over ρ, the one of least KL to the experts on
training samples that no calibration sees is scored. Next to them: the anchor alone at each ρ, the
paper's settings with one part of `stream` added to them, and `stream` without one of its parts.

Last, ρ acts on some weights only, at the cell of forward order, the first α and the last ρ. With the
eigenvectors v and eigenvalues g of a site's Σ ωG, and the anchors A at ρ and A₁ at ρ = 1, the anchor
is A₁ + (A − A₁) Σ vvᵀ over g < λ, g ≥ λ, none, or all; biases and norms keep ρ = 1. Added once the
cells of the synthetic images were seen, where ρ has no effect: the same at the paper's λ.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeInt, PositiveInt

from featcal.calibration.block import (
    Student,
    add_task_systems,
    anchors,
    solve_systems,
    student_blocks,
)
from featcal.calibration.features import Models, advance, features_by_task
from featcal.calibration.observe import Systems, observe
from featcal.calibration.ranks import Ranks
from featcal.calibration.scratch import Spool
from featcal.data.batches import draw_indices
from featcal.models.batch import TaskBatches
from featcal.models.load import save_model
from featcal.models.modules import load_side_by_side
from featcal.models.streamed import in_turn
from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.features import projected
from reproduction.engine.make import make
from reproduction.engine.samples import Selection, load_split, streams
from reproduction.engine.score import score
from reproduction.engine.spec import ModelSpec, featcal_at
from reproduction.engine.study import StudyResult
from reproduction.experiments import Each, Study
from reproduction.field.walk import opened
from reproduction.results import EXTRAPOLATION, EXTRAPOLATION_CANDIDATES
from reproduction.studies.default import divergence

ANCHOR, CELL, STREAM, ALONE, LEFT_OUT, SPECTRUM = (
    "anchor", "cell", "stream", "alone", "left out", "spectrum",
)  # fmt: skip
NO_DATA = 1e9  # λ at which nothing is solved
GRID = ("interpolation", "anchor_blend", "ridge")  # columns, in the order of the grid
PARTS = {
    "residual target": "residual", "order": "order", "joint bias": "affine", "α": "interpolation",
    "ρ": "anchor_blend", "λ": "ridge",
}  # fmt: skip  # of `stream`, that the paper's settings lack
VARIANTS = ("nowhere", "below", "above", "weights", "everything")
NOWHERE, BELOW, ABOVE, _, EVERYTHING = VARIANTS


class ExtrapolationStudy(Study):
    """Settings of the study.

    stream: the library's default, whose ρ is chosen among `blends`; None: neither it nor its parts nor
    ρ on some weights are run.   held_out: samples of each task that no calibration sees, for the
    divergence.   scored: test samples of each task; None: all.
    """

    scores = EXTRAPOLATION
    tables: ClassVar = {"extrapolation.candidates": EXTRAPOLATION_CANDIDATES}
    upstream: str
    paper: Calibration
    stream: Calibration | None
    orders: Each[str]
    interpolations: Each[float]
    blends: Each[float]
    ridges: Each[float]
    samples: PositiveInt
    held_out: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    scored: PositiveInt | None = None

    def check(self) -> None:
        require("forward" in self.orders, "extrapolation.orders", self.orders, "lacks forward")
        self.first(Path())

    def model(self, folder: Path, choice: str, variant: str, **changes: Any) -> ModelSpec:
        """Return the paper's method with changes. An empty λ is chosen by halves of the samples."""
        settings, columns = self.paper.but(**changes), {"choice": choice, "variant": variant}
        for name in GRID:
            value = getattr(settings, name)
            columns[name] = "" if value == "auto" else f"{value:g}"
        name = "-".join(columns.values())
        return featcal_at(self, folder, name, settings, setting="", columns=columns)

    def first(self, folder: Path) -> list[ModelSpec]:
        """Return the cells, the anchors alone, and `stream` at every ρ."""
        models = []
        for order, *point in product(self.orders, self.interpolations, self.blends, self.ridges):
            grid = dict(zip(GRID, point, strict=True))
            models.append(self.model(folder, CELL, order, order=order, **grid))
        fixed = {"order": "forward", "interpolation": self.interpolations[0], "ridge": NO_DATA}
        groups = {ANCHOR: fixed} | ({STREAM: dict(self.stream)} if self.stream else {})
        for (choice, settings), blend in product(groups.items(), self.blends):
            models.append(self.model(folder, choice, "", **{**settings, "anchor_blend": blend}))
        return models

    def second(self, folder: Path, settings: Calibration, ridge: float) -> list[ModelSpec]:
        """Return the parts of `stream` at its ρ, and ρ on some weights at a λ and at the paper's."""
        stream = dict(settings)
        changed = [self.model(folder, ALONE, "")]
        for name, field in PARTS.items():
            changed.append(self.model(folder, ALONE, name, **{field: stream[field]}))
            without = stream | {field: getattr(self.paper, field)}
            changed.append(self.model(folder, LEFT_OUT, name, **without))
        changed.sort(key=lambda model: model.settings.order == "sites")
        shared: dict[str, Any] = {"order": "forward", "interpolation": self.interpolations[0]}
        shared["anchor_blend"] = self.blends[-1]
        for value, variant in product(dict.fromkeys((ridge, self.paper.ridge)), VARIANTS):
            changed.append(self.model(folder, SPECTRUM, variant, **shared, ridge=value))
        return changed

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        label, models, facts = self.label, self.first(folder), dict[str, Any]()
        make(label, setup, models)
        models = self.measured(setup, models)
        if self.stream:
            part_models, facts = self.with_parts(setup, folder, models)
            models += part_models
        chosen, selection = best_of(models), Selection("test", self.scored, self.seed)
        rows = score(f"{label} score", setup, chosen, selection=selection)
        keys = {**setup.row_keys, "upstream": self.upstream}
        candidates = [{**keys, **m.columns, "chosen": int(m in chosen)} for m in models]
        return StudyResult(rows, {"extrapolation.candidates": candidates}, facts)

    def with_parts(
        self, setup: Setup, folder: Path, first: Sequence[ModelSpec]
    ) -> tuple[list[ModelSpec], dict[str, Any]]:
        """Return the models of `second`, made and measured, and facts about them."""
        stream = min((m for m in first if m.columns["choice"] == STREAM), key=distance).settings
        start = f"{CELL}-forward-{self.interpolations[0]:g}-{self.blends[-1]:g}-"
        [cell] = best_of([model for model in first if model.name.startswith(start)])
        second = self.second(folder, stream, cell.settings.ridge)
        partly = [model for model in second if model.columns["choice"] == SPECTRUM]
        make(self.label, setup, [model for model in second if model not in partly])
        jobs = {SPECTRUM: (setup, self, partly)}
        below = setup.context.run(self.label, spectrum, jobs)[SPECTRUM]
        facts = {"below": below, "stream_blend": stream.anchor_blend}
        return self.measured(setup, second), facts

    def measured(self, setup: Setup, models: Sequence[ModelSpec]) -> list[ModelSpec]:
        """Return models with their divergence among their columns."""
        jobs = {model.name: (setup, self, model) for model in models}
        divergences = setup.context.run(f"{self.label} divergence", mean_divergence, jobs)
        return [m.but(columns={**m.columns, "divergence": divergences[m.name]}) for m in models]


def distance(model: ModelSpec) -> float:
    return float(model.columns["divergence"])


def best_of(models: Sequence[ModelSpec]) -> list[ModelSpec]:
    """Return the models that are scored, in their order: of each cell the λ of least divergence."""
    best: dict[tuple[Any, ...], ModelSpec] = {}
    for model in sorted(models, key=distance):
        free = ("divergence", "ridge") if model.columns["choice"] == CELL else ("divergence",)
        best.setdefault(tuple(v for n, v in model.columns.items() if n not in free), model)
    return [model for model in models if model in best.values()]


def mean_divergence(setup: Setup, study: ExtrapolationStudy, model: ModelSpec) -> float:
    """Return the mean over tasks of KL(expert's answers ‖ model's) on held-out samples."""
    projection, student, total = setup.projection(), setup.load(model.folder), 0.0
    for task, head in setup.scaled_heads().items():
        samples, teacher = load_split(setup, task, "train"), setup.load(setup.expert(task))
        count = study.samples + study.held_out
        indices = draw_indices(task, len(samples.labels), count, study.seed)
        arguments = (projection, samples.take(indices[study.samples :]), study.batch)
        features = projected(student, *arguments, f"{model.name}, task {task}")
        expert = projected(teacher, *arguments, f"expert of {task}")
        total += float(divergence(features, expert, head).mean()) / len(setup.tasks)
    return total


def spectrum(
    setup: Setup, study: ExtrapolationStudy, models: Sequence[ModelSpec]
) -> dict[str, dict[str, float]]:
    """Make the models whose ρ acts on some weights only; return the shares below each λ."""
    merged = setup.merged(study.upstream)
    arguments = (merged, setup.base, setup.experts, models[0].settings, setup.context.device)
    with opened(*arguments) as (loaded, spool):
        students = [Student(loaded.student_copy(), model.settings) for model in models]
        variants = [model.columns["variant"] for model in models]
        batches = streams(setup, models[0].draw)
        below = calibrate_by_spectrum(loaded, students, variants, batches, spool)
        for model, student in zip(models, students, strict=True):
            save_model(student.handle.module, model.folder, like=merged)
    return below


def calibrate_by_spectrum(
    models: Models,
    students: Sequence[Student],
    variants: Sequence[str],
    batches: TaskBatches,
    spool: Spool,
) -> dict[str, dict[str, float]]:
    """Calibrate students in forward order, each with ρ on its variant's part of the weights.

    A solution with ρ = 1 is pulled to the student's own weights, so those become the anchor.
    Returns: by λ the means over sites of the shares below it: of directions, tr S and ‖A − A₁‖².
    """
    handles = [student.handle for student in students]
    shares: dict[str, list[Any]] = {}
    [(source, stack)] = models.plan.in_order
    features = features_by_task(models, handles, stack, batches, spool, source, {})
    for path, blocks in student_blocks(models, students, stack, source):
        systems = [Systems() for _ in blocks]
        for task, teacher in in_turn(models.experts, path):
            specs = {number: spec for number, (_, spec) in enumerate(blocks)}
            moments = observe([block for block, _ in blocks], teacher, features[task], specs)
            for number, task_moments in moments.items():
                add_task_systems(systems[number], task_moments, teacher, specs[number].settings)
        with models.base.block(path) as base:
            for number, (block, spec) in enumerate(blocks):
                variant, settings = variants[number], spec.settings
                for site, [system] in systems[number].sites.items():
                    A, a = anchors(block, base, site, 1.0)  # (o, d), (o,)
                    change = anchors(block, base, site, settings.anchor_blend)[0] - A
                    if variant == NOWHERE:
                        change.zero_()
                    elif variant in (BELOW, ABOVE):
                        g, V = torch.linalg.eigh(system.left)  # (d,), (d, d)
                        below, full_norm = g < settings.ridge, change.norm()
                        V = V[:, below if variant == BELOW else ~below]
                        change = change @ V @ V.T
                        if variant == BELOW:
                            energy, moved = g[below].sum() / g.sum(), change.norm() / full_norm
                            site_shares = below.double().mean(), energy, moved**2
                            shares.setdefault(f"{settings.ridge:g}", []).append(site_shares)
                    if variant != EVERYTHING:
                        linears = [block.get_submodule(name) for name in site]
                        load_side_by_side(linears, A + change, a)
                blend = settings.anchor_blend if variant == EVERYTHING else 1.0
                spec = replace(spec, settings=settings.but(anchor_blend=blend))
                solve_systems(systems[number], block, base, spec, Ranks())
                for track in features.values():
                    advance(block, stack, track.students[number])
    names = ("directions", "energy", "change")
    means = {ridge: torch.tensor(values).mean(0).tolist() for ridge, values in shares.items()}
    return {ridge: dict(zip(names, values, strict=True)) for ridge, values in means.items()}
