"""Calibration or extrapolation: what ρ, the order and α are worth when λ is chosen again for each.

Protocol, fixed before any score was seen. After one merger, FeatCal is calibrated at every order, α
and ρ with several λ; of each such cell, the λ with the least divergence is scored. The divergence is
the mean over tasks of KL(expert's answers ‖ model's) on training samples that no calibration sees;
labels play no part. Next to the cells: the anchor alone at each ρ (λ so large that nothing is
solved; ρ = 1 is the merged model), the paper's settings with one part of `stream` added, and
`stream` with one part left out. Of `stream`, the ρ with the least divergence is used.

Last, ρ at the cell of forward order, the first α and the last ρ acts on some weights only. With
S = Σ ωG of a site, its eigenvectors v with eigenvalues g, and the anchors A at ρ and A₁ at ρ = 1,
the anchor is A₁ + (A − A₁) Σ vvᵀ over those with g < λ, those with g ≥ λ, none, or all; biases and
norms keep ρ = 1. λ is that of the cell. Added once the cells of the synthetic images were seen, where
the least λ was chosen everywhere and ρ has no effect: the same at the paper's λ.

What is run is limited by time alone; pipeline/studies.yaml says what was left out.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt

from featcal.files import read_json, write_json
from featcal.settings import Calibration, require
from reproduction.engine.context import Setup, fingerprint
from reproduction.engine.samples import Drawn, Selection, load_split
from reproduction.engine.score import Row, answers
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import Found, make
from reproduction.experiments import Each, Study
from reproduction.results import EXTRAPOLATION, EXTRAPOLATION_CANDIDATES

if TYPE_CHECKING:
    from torch import nn

    from featcal.calibration.features import Spool
    from featcal.calibration.models import Models
    from featcal.calibration.sweep import Student
    from featcal.models.batch import TaskBatches

ANCHOR, CELL, STREAM, ALONE, LEFT_OUT, SPECTRUM = (
    "anchor", "cell", "stream", "alone", "left out", "spectrum",
)  # fmt: skip
NO_DATA = 1e9  # λ at which nothing is solved
PARTS = {
    "residual target": "residual", "order": "order", "joint bias": "affine", "α": "interpolation",
    "ρ": "anchor_blend", "λ": "ridge",
}  # fmt: skip  # of `stream`, that the paper's settings lack
NOWHERE, BELOW, ABOVE, WEIGHTS, EVERYTHING = "nowhere", "below", "above", "weights", "everything"


@dataclass(frozen=True)
class Candidate:
    """One calibration. choice: what it is for.   variant: of the candidates for that."""

    choice: str
    variant: str
    settings: Calibration

    @property
    def cell(self) -> tuple[Any, ...]:
        """Return what candidates share of which one λ is chosen."""
        settings = self.settings
        ridge = None if self.choice == CELL else settings.ridge
        return self.choice, self.variant, settings.interpolation, settings.anchor_blend, ridge

    @property
    def columns(self) -> Row:
        """Return the candidate's columns of a row; an empty λ is chosen by halves of the samples."""
        settings = self.settings
        ridge = "" if settings.ridge == "auto" else f"{settings.ridge:g}"
        numbers = {
            name: f"{getattr(settings, name):g}" for name in ("interpolation", "anchor_blend")
        }
        return {"choice": self.choice, "variant": self.variant, **numbers, "ridge": ridge}


class ExtrapolationStudy(Study):
    """Settings of the study.

    stream:   settings of the library's default, whose ρ is chosen among `blends`.
    samples:  of each task to calibrate on.   held_out: further ones, for the divergence.
    scored:   test samples of each task. Default: all.
    """

    section = "extrapolation"
    scores = EXTRAPOLATION
    tables: ClassVar = {"extrapolation.candidates": EXTRAPOLATION_CANDIDATES}
    upstream: str
    paper: Calibration
    stream: Calibration
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
        self.first()

    def first(self) -> dict[str, list[Candidate]]:
        """Return what is calibrated first, in groups that share the passes of their teachers."""
        groups = {
            f"{order} α={alpha:g}": [
                Candidate(CELL, order, self.at(order, alpha, rho, ridge))
                for rho in self.blends
                for ridge in self.ridges
            ]
            for order in self.orders
            for alpha in self.interpolations
        }
        alpha = self.interpolations[0]
        groups[ANCHOR] = [
            Candidate(ANCHOR, "", self.at("forward", alpha, rho, NO_DATA)) for rho in self.blends
        ]
        groups[STREAM] = [
            Candidate(STREAM, "", self.stream.but(anchor_blend=rho)) for rho in self.blends
        ]
        return groups

    def second(self, stream: Calibration, ridge: float) -> dict[str, list[Candidate]]:
        """Return what is calibrated once ρ of `stream` and λ of the spectrum's cell are chosen."""
        changed = [Candidate(ALONE, "", self.paper)]
        for name, field in PARTS.items():
            added, removed = ({field: getattr(one, field)} for one in (stream, self.paper))
            changed.append(Candidate(ALONE, name, self.paper.but(**added)))
            changed.append(Candidate(LEFT_OUT, name, stream.but(**removed)))
        by_site = [one for one in changed if one.settings.order == "sites"]
        rho = self.blends[-1]
        places = (NOWHERE, BELOW, ABOVE, WEIGHTS, EVERYTHING)
        spectrum = [
            Candidate(SPECTRUM, place, self.at("forward", self.interpolations[0], rho, value))
            for value in dict.fromkeys((ridge, self.paper.ridge))
            for place in places
        ]
        return {
            "parts in forward order": [one for one in changed if one not in by_site],
            "parts by site": by_site,
            SPECTRUM: spectrum,
        }

    def at(self, order: str, alpha: float, rho: float, ridge: float) -> Calibration:
        """Return the paper's method at an order, α, ρ and λ."""
        changes = {"interpolation": alpha, "anchor_blend": rho, "ridge": ridge}
        return self.paper.but(order=order, **changes)

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return rows of the candidates that are scored, and the divergence of all."""
        label, merged = f"extrapolation {self.key}", folder / "merged"
        merger = setup.context.experiments.merge[f"{self.key}-{self.upstream}"]
        make(label, setup, [ModelSpec("merged", merged, "merged", self.upstream, settings=merger)])
        files = [setup.heads, *merged.glob("*.safetensors")]
        for model in (setup.base, *setup.experts.values()):
            files += model.glob("*.safetensors")
        grid = ("orders", "interpolations", "blends", "ridges", "stream")
        common = {name: value for name, value in self.model_dump().items() if name not in grid}
        digest = fingerprint(common, sorted(files))
        store = setup.context.layout.unfinished(f"extrapolation-{self.key}-{digest}")
        store.mkdir(parents=True, exist_ok=True)

        def run(groups: Mapping[str, Sequence[Candidate]]) -> list[Row]:
            jobs = {}
            for name, group in groups.items():
                own = fingerprint(
                    [(one.choice, one.variant, dict(one.settings)) for one in group], ()
                )
                jobs[name] = (setup, self, merged, group, store / f"{own}.json")
            results = setup.context.run(label, measured, jobs)
            below.update({k: v for result in results.values() for k, v in result["below"].items()})
            return [row for result in results.values() for row in result["rows"]]

        below: dict[str, Row] = {}
        rows = run(self.first())
        streams = [row for row in rows if row["choice"] == STREAM]
        rho = float(min(streams, key=lambda row: row["divergence"])["anchor_blend"])
        wanted = (CELL, "forward", *(f"{x:g}" for x in (self.interpolations[0], self.blends[-1])))
        names = ("choice", "variant", "interpolation", "anchor_blend")
        cell = next(r for r in rows if r["chosen"] and tuple(r[n] for n in names) == wanted)
        rows += run(self.second(self.stream.but(anchor_blend=rho), float(cell["ridge"])))
        words = {**setup.words, "upstream": self.upstream, "method": "featcal", "setting": ""}
        scores, candidates = [], []
        for row in rows:
            counts = row.pop("counts")
            candidates.append({**setup.words, "upstream": self.upstream, **row})
            del row["chosen"]
            scores += [
                {**words, **row, "metric": "accuracy", "seed": self.seed, "task": task, **one}
                for task, one in counts.items()
            ]
        shutil.rmtree(store)
        tables = {"extrapolation.candidates": candidates}
        return Found(scores, tables, facts={"below": below, "stream_blend": rho})


def measured(
    setup: Setup,
    study: ExtrapolationStudy,
    merged: Path,
    candidates: Sequence[Candidate],
    file: Path,
) -> dict[str, Any]:
    """Calibrate candidates together and return rows with their divergence, and with scores where λ
    is chosen; they are kept in a file for an interrupted run.
    """
    if file.is_file():
        found: dict[str, Any] = read_json(file)
        return found
    from featcal.calibration.calibrate import budgets
    from featcal.calibration.features import Spool
    from featcal.calibration.models import open_models
    from featcal.calibration.ranks import Ranks
    from featcal.calibration.sweep import Student, sweep
    from featcal.core.precision import exact_products
    from featcal.data.batches import draw_indices

    kept, held_out = {}, {}
    for task in setup.tasks:
        samples = load_split(setup, task, "train")
        count = study.samples + study.held_out
        drawn = draw_indices(task, len(samples.labels), count, study.seed)
        kept[task] = Drawn(samples.take(drawn[: study.samples]), study.batch)
        held_out[task] = samples.take(drawn[study.samples :])
    below: dict[str, Row] = {}
    with ExitStack() as opened:
        given = (merged, setup.base, setup.experts, None, candidates[0].settings)
        device = setup.context.device
        models = open_models(*given, whole=True, device=device, dtype=None)
        opened.enter_context(models.evaluated())
        opened.enter_context(exact_products())
        spool = opened.enter_context(Spool(*budgets(device, None), file.parent))
        students = [Student(models.student_copy(), one.settings) for one in candidates]
        if candidates[0].choice == SPECTRUM:
            variants = [one.variant for one in candidates]
            below = calibrate_by_spectrum(models, students, variants, kept, spool)
        else:
            sweep(models, students, kept, spool, Ranks(), block_drift=False)
        modules = [student.handle.module for student in students]
    divergence = divergences(setup, modules, held_out, study.batch)
    best: dict[tuple[Any, ...], int] = {}
    for number in sorted(range(len(candidates)), key=divergence.__getitem__):
        best.setdefault(candidates[number].cell, number)
    scored = {str(number): modules[number] for number in sorted(best.values())}
    selection = Selection("test", study.scored, study.seed)
    counts = answers(setup, lambda _: scored, partial(selection.read, setup))
    rows = [
        {
            **one.columns,
            "divergence": divergence[number],
            "chosen": int(str(number) in scored),
            "counts": counts.get(str(number), {}),
        }
        for number, one in enumerate(candidates)
    ]
    found = {"rows": rows, "below": below}
    write_json(file, found)
    return found


def divergences(
    setup: Setup, modules: Sequence["nn.Module"], held_out: Mapping[str, Any], batch: int
) -> list[float]:
    """Return for each model the mean over tasks of KL(expert's answers ‖ model's)."""
    from safetensors.torch import load_file

    from featcal.calibration.answers import Scores, kl_and_top1
    from featcal.evaluation.zero_shot import unit_length
    from reproduction.stages.measure import projected

    tensors, projection, totals = load_file(setup.heads), setup.projection(), [0.0] * len(modules)
    scale = tensors["logit_scale"].exp()
    for task, samples in held_out.items():
        head = scale * tensors[f"head/{task}"]  # (K, p)

        place, expert = f"a model, task {task}", setup.load(setup.expert(task))
        theirs = Scores(unit_length(projected(expert, projection, samples, batch, place)) @ head.T)
        for number, module in enumerate(modules):
            features = projected(module, projection, samples, batch, place)
            ours = Scores(unit_length(features) @ head.T)
            totals[number] += float(kl_and_top1(ours, theirs)[0].mean()) / len(held_out)
    return totals


def calibrate_by_spectrum(
    models: "Models",
    students: Sequence["Student"],
    variants: Sequence[str],
    batches: "TaskBatches",
    spool: "Spool",
) -> dict[str, dict[str, float]]:
    """Calibrate students in forward order, each with ρ on its variant's part of the weights.

    A solution with ρ = 1 is pulled to the student's own weights. So those are replaced by the
    variant's anchor once the block is observed, and then solved with ρ = 1.

    Returns: by λ the shares that lie below it, means over sites: of the directions, of the inputs'
    energy tr S, and of the squared change ‖A − A₁‖².
    """
    import torch

    from featcal.calibration.block import add_task_systems, anchors, solve_systems
    from featcal.calibration.features import advance
    from featcal.calibration.observe import Systems, observe
    from featcal.calibration.ranks import Ranks
    from featcal.calibration.sweep import features_by_task, student_blocks
    from featcal.models.modules import load_side_by_side
    from featcal.models.streamed import in_turn

    handles = [student.handle for student in students]
    shares: dict[str, list[Any]] = {}
    [(source, stack)] = models.plan.in_order
    features = features_by_task(models, handles, stack, batches, spool, source, {})
    for path, blocks in student_blocks(models, students, stack, source):
        systems = [Systems() for _ in blocks]
        for task, teacher in in_turn(models.experts, path):
            specs = {number: spec for number, (_, spec) in enumerate(blocks)}
            moments = observe([block for block, _ in blocks], teacher, features[task], specs)
            for number, own in moments.items():
                add_task_systems(systems[number], own, teacher, specs[number].settings)
        with models.base.block(path) as base:
            for number, (block, spec) in enumerate(blocks):
                variant, rho = variants[number], spec.settings.anchor_blend
                ridge = spec.settings.ridge
                for site, [system] in systems[number].sites.items():
                    A, a = anchors(block, base, site, 1.0)  # (o, d), (o,)
                    change = anchors(block, base, site, rho)[0] - A
                    if variant == NOWHERE:
                        change.zero_()
                    elif variant in (BELOW, ABOVE):
                        g, V = torch.linalg.eigh(system.left)  # (d,), (d, d)
                        below = g < ridge
                        V = V[:, below if variant == BELOW else ~below]
                        part = change @ V @ V.T
                        if variant == BELOW:
                            energy, moved = g[below].sum() / g.sum(), part.norm() / change.norm()
                            own_shares = below.double().mean(), energy, moved**2
                            shares.setdefault(f"{ridge:g}", []).append(own_shares)
                        change = part
                    if variant != EVERYTHING:
                        linears = [block.get_submodule(name) for name in site]
                        load_side_by_side(linears, A + change, a)
                blend = rho if variant == EVERYTHING else 1.0
                own = replace(spec, settings=spec.settings.but(anchor_blend=blend))
                solve_systems(systems[number], block, base, own, Ranks())
                for track in features.values():
                    advance(block, stack, track.students[number])
    names = ("directions", "energy", "change")
    means = {ridge: torch.tensor(own).mean(0).tolist() for ridge, own in shares.items()}
    return {ridge: dict(zip(names, own, strict=True)) for ridge, own in means.items()}
