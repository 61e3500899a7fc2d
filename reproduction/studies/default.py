"""The default of `featcal.calibrate`, compared with fixed settings and with tuned adapters.

Protocol, fixed before any score existed. After each merger, on one draw of n training samples a
task without labels, these are scored on the same test samples:

- the merged model, and `auto`, the library's default;
- fixed settings: the paper's, the tuned ones, the large anchor and BEST; the best is the one of
  highest test average after this merger with this n, which favours it;
- adapters, in more trials of size, rate and steps than auto has candidates. The trial, or no
  adapter, of least KL through the tasks' heads on the samples that auto holds out is trained again
  on the samples of auto's last calibration.

Nothing else is chosen by test samples or labels. Draws are run in their order, all mergers with one
before the next; every finished draw is reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from shutil import rmtree
from time import process_time
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

import featcal
from featcal.baselines.adapters import Adapters, Pair
from featcal.baselines.training import pool_features
from featcal.calibration import choose
from featcal.core.precision import wide
from featcal.files import read_json, write_json
from featcal.merging.registry import method_named, settings_of
from featcal.models.batch import output_embeddings, unit_length
from featcal.settings import Calibration, require
from reproduction.engine.context import Setup, fingerprint
from reproduction.engine.samples import Selection, plan_of, streams
from reproduction.engine.score import for_all_tasks, model_scores
from reproduction.engine.study import StudyResult
from reproduction.engine.workers import fan_out, keep_freed_memory
from reproduction.experiments import ADAPTERS, Each, Reading, Study
from reproduction.results import CANDIDATES, DEFAULT, GREEDY, Row

# a preset of featcal until auto replaced it: what did best on validation samples of synthetic images
BEST = Calibration(
    ridge=1e-4, anchor_blend=1.0, interpolation=1.0, residual=1.0, order="sites", affine="joint"
)
LIBRARY = Path(featcal.__file__).parent
MERGED, AUTO, NO_ADAPTER = "merged", "auto", "none"
SIZES = {"surgery": "rank", "prob_surgery": "hidden"}  # by adapter, the name of its size


class DefaultStudy(Study):
    """Settings of the study.

    mergers:  settings by method; none looks at data.
    draws:    number of samples and seed, in the order in which they are run.
    scored:   test samples of each task. Default: all. Language models take all tests.
    rank, hidden, lr, steps: every combination is a trial of an adapter.
    """

    section = "default"
    scores = DEFAULT
    tables: ClassVar = {"default.candidates": CANDIDATES}
    paper: Calibration
    suite: Calibration
    mergers: Mapping[str, Mapping[str, Any]]
    draws: Each[tuple[PositiveInt, NonNegativeInt]]
    batch: PositiveInt
    rank: Each[PositiveInt]
    hidden: Each[PositiveInt]
    lr: Each[PositiveFloat]
    steps: Each[PositiveInt]
    scored: PositiveInt | None = None
    reading: Reading | None = None

    def check(self) -> None:
        for method, options in self.mergers.items():
            settings_of(method, options, f"default.mergers.{method}")
            expected = "must be a merger that looks at no data"
            require(not method_named(method).needs, "default.mergers", method, expected)

    @property
    def fixed(self) -> dict[str, Calibration]:
        """Return the fixed settings by name, equal ones once."""
        candidates = {"paper": self.paper, "suite": self.suite}
        candidates |= {"large anchor": choose.CANDIDATES["large anchor"], "best": BEST}
        names: dict[Calibration, str] = {}
        for name, settings in candidates.items():
            names.setdefault(settings, name)
        return {name: settings for settings, name in names.items()}

    def store(self, setup: Setup) -> Path:
        """Return the folder of finished draws of these settings, experts and code."""
        settings = self.model_dump(exclude={"mergers", "draws"})
        weights = [file for e in setup.experts.values() for file in sorted(e.glob("*.safetensors"))]
        code = [*sorted(LIBRARY.rglob("*.py")), Path(__file__)]
        digest = fingerprint(settings, [*weights, *code])
        return setup.context.unfinished(f"default-{self.key}-{digest}")

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        """Return rows of every draw; finished ones are kept until all are."""
        store, files, jobs, earlier = self.store(setup), [], dict[str, Any](), 0.0
        for (n, seed), name in product(self.draws, self.mergers):
            mark = fingerprint(self.mergers[name], [])
            files.append(file := store / f"{name}-{n}-{seed}-{mark}.json")
            if file.is_file():
                earlier += sum(read_json(file)["cost"]["seconds"].values())
            else:
                jobs[f"{name}, {n} samples, seed {seed}"] = (setup, self, name, n, seed, file)
        workers = setup.context.suite.workers or 1
        dict(fan_out(self.label, run, jobs, workers, fresh=True))
        cases = [read_json(file) for file in files]
        rmtree(store)
        rows = [row for case in cases for row in case["rows"]]
        candidates = [row for case in cases for row in case["candidates"]]
        record = {"cost": [case["cost"] for case in cases], "earlier": earlier / workers}
        return StudyResult(rows, {"default.candidates": candidates}, record=record)


@dataclass
class Case:
    """One merger and draw: models, and batches and features (`pairs`) by task; heads: encoders'."""

    setup: Setup
    study: DefaultStudy
    base: nn.Module
    experts: Mapping[str, nn.Module]
    merged: nn.Module
    batches: Mapping[str, Sequence[Any]]
    pairs: Mapping[str, Pair]
    heads: Mapping[str, Tensor] | None
    seed: int
    seconds: dict[str, float] = field(default_factory=dict)

    def calibrated(self, name: str, settings: Any, batches: Mapping[str, Any]) -> Any:
        """Return the result of a calibration, its seconds noted."""
        start, plan = process_time(), plan_of(self.setup, self.study.reading)
        arguments: dict[str, Any] = {"base": self.base, "experts": self.experts, "batches": batches}
        arguments |= {"settings": settings, "plan": plan, "block_drift": False}
        result = featcal.calibrate(self.merged, **arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + process_time() - start
        return result

    def last_and_held_out(self, task: str) -> tuple[Tensor, Tensor]:
        """Return masks (n,) of a task's samples: for auto's last calibration, and held out."""
        return choose.parts_of(len(self.pairs[task].sizes))[1:]

    def tuned(self, method: str) -> tuple[Adapters | None, dict[str, float]]:
        """Return the best trial's adapters, trained on the samples of auto's last calibration,
        and the divergences of all trials; a training of the most steps gives those with fewer.
        """
        start, study, trials = process_time(), self.study, dict[str, Any]({NO_ADAPTER: None})
        settings, training, last = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for task, pair in self.pairs.items():
            mask, held_out = self.last_and_held_out(task)
            training[task], last[task] = (pair.of(m.nonzero()[:, 0]) for m in (~held_out, mask))
        key = SIZES[method]
        raw = {"features": "raw"} if self.setup.of_texts else {}
        for size, rate in product(getattr(study, key), study.lr):
            steps_of = {f"{key} {size}, rate {rate:g}, {n} steps": n for n in study.steps}
            for name, steps in steps_of.items():
                fields = {key: size, "lr": rate, "steps": steps, **raw}
                settings[name] = ADAPTERS[method].from_mapping(fields, method)
            audit = {steps: partial(trials.__setitem__, name) for name, steps in steps_of.items()}
            settings[max(steps_of, key=steps_of.__getitem__)].fit(training, self.seed, audit=audit)
        divergence = {name: self.divergence(adapters) for name, adapters in trials.items()}
        best = min(divergence, key=divergence.__getitem__)
        adapters = None if best == NO_ADAPTER else settings[best].fit(last, self.seed)
        self.seconds[method] = process_time() - start
        return adapters, divergence

    def divergence(self, adapters: Adapters | None) -> float:
        """Return KL(expert ‖ adapted) on held-out samples, the mean over tasks and samples."""
        total = 0.0
        for task, pair in self.pairs.items():
            held_out = pair.of(self.last_and_held_out(task)[1].nonzero()[:, 0])
            rows = adapters.apply(task, held_out.merged) if adapters else held_out.merged
            head = self.heads and self.heads[task]
            with torch.no_grad():
                kl = divergence(rows, held_out.expert, head, (self.merged, self.experts[task]))
            samples = [sample.mean() for sample in kl.split(held_out.sizes.tolist()) if len(sample)]
            total += float(torch.stack(samples).mean())
        return total / len(self.pairs)


def divergence(features: Any, expert: Any, head: Any, models: Sequence[Any] = ()) -> Any:
    """Return KL(expert ‖ model) of rows of features, (n,), by unit class vectors times the logit
    scale (K, p), or by the models' own language heads.
    """
    rows = features, expert
    if head is None:
        return choose.kl_and_top1(*map(choose.Scores, rows, map(output_embeddings, models)))[0]
    scores = (choose.Scores(unit_length(wide(x)) @ head.to(x.device).T) for x in rows)
    return choose.kl_and_top1(*scores)[0]


def run(setup: Setup, study: DefaultStudy, merger: str, n: int, seed: int, file: Path) -> None:
    """Write the results of one merger and draw."""
    keep_freed_memory()
    base = setup.load(setup.base)
    experts = {task: setup.load(folder) for task, folder in setup.experts.items()}
    options: dict[str, Any] = {"device": setup.context.device, **study.mergers[merger]}
    merged: Any = featcal.merge(merger, base, experts, **options)
    draw = study.featcal_draw(samples=n, seed=seed)
    batches = {t: list(b) for t, b in streams(setup, draw, study.reading).items()}
    pairs = pool_features(merged, experts, batches, setup.projection())
    heads = None if setup.of_texts else setup.scaled_heads()
    case = Case(setup, study, base, experts, merged, batches, pairs, heads, seed)
    write_json(file, results_of(case, merger, n))


def results_of(case: Case, merger: str, n: int) -> dict[str, Any]:
    """Return rows of scores, candidates with their divergence, and seconds of one merger and draw."""
    study, models, chosen = case.study, {MERGED: case.merged}, dict[str, str]()
    candidates: dict[str, dict[str, float]] = {}
    for name, settings in study.fixed.items():
        models[name] = case.calibrated(name, settings, case.batches).model
    result = case.calibrated(AUTO, AUTO, case.batches)
    models[AUTO], chosen[AUTO] = result.model, result.choice.chosen
    for name, by_task in result.choice.divergence.items():
        candidates.setdefault(AUTO, {})[name] = sum(by_task.values()) / len(by_task)
    adapted = {}
    for method in SIZES:
        adapted[method], candidates[method] = case.tuned(method)
    for name, divergences in candidates.items():
        chosen.setdefault(name, min(divergences, key=divergences.__getitem__))
    start = process_time()
    chosen_adapters = {name: adapters for name, adapters in adapted.items() if adapters}
    selection = Selection("test", study.scored)
    scores = model_scores(case.setup, for_all_tasks(models), selection, chosen_adapters)
    scores |= {name: scores[MERGED] for name in adapted if name not in chosen_adapters}
    case.seconds["scores"] = process_time() - start
    draw_keys: Row = {**case.setup.row_keys, "upstream": merger, "samples": n, "seed": case.seed}
    rows, candidate_rows = list[Row](), list[Row]()
    for name, by_task in scores.items():
        method, setting = (name, "") if name in (MERGED, *SIZES) else ("featcal", name)
        columns = {"method": method, "setting": setting, "candidate": chosen.get(name, "")}
        columns = {"metric": "accuracy", **draw_keys, **columns}
        task_scores = {task: score for task, score in by_task.items() if not task.endswith(GREEDY)}
        rows += [{**columns, "task": task, **score} for task, score in task_scores.items()]
    for name, divergences in candidates.items():
        for trial, value in divergences.items():
            columns = {"method": name, "candidate": trial, "chosen": int(trial == chosen[name])}
            candidate_rows.append({**draw_keys, **columns, "divergence": value})
    cost = {name: round(value, 2) for name, value in case.seconds.items()}
    cost = {"upstream": merger, "samples": n, "seed": case.seed, "seconds": cost}
    return {"rows": rows, "candidates": candidate_rows, "cost": cost}
