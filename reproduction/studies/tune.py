"""λ, ρ and α of FeatCal chosen without labels, and every candidate scored on test samples.

The scores are for the report only: the search sees the divergence on training samples held out from
each calibration.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import plan_of, streams
from reproduction.engine.score import score
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import Found
from reproduction.experiments import SWEPT, TEXT_POOLS, Reading, Study
from reproduction.results import TUNE

REFERENCE = "reference"  # origin of the suite's own settings, which are no candidate


class TuneStudy(Study):
    """Settings of the study.

    suite:   settings that labelled validation samples chose; a reference, not a candidate.
    samples: of each task, including those held out.   at_once: candidates calibrated together.
    """

    section = "tune"
    scores = TUNE
    upstream: str
    paper: Calibration
    suite: Calibration | None
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    trials: PositiveInt
    holdout: Annotated[float, Field(gt=0, lt=1)]
    at_once: PositiveInt
    reading: Reading | None = None

    def check(self) -> None:
        fine = (self.reading is not None) == (self.pool in TEXT_POOLS)
        require(fine, "tune.reading", self.reading, "must be given for texts, and for texts alone")

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return rows of every candidate and of the reference, λ of the path, and seconds."""
        from reproduction.field.tune import Candidate, Search, best, proposals, rounds

        label, known = f"tune {self.key}", list[Candidate]()
        limits = {"trials": self.trials, "holdout": self.holdout, "seed": self.seed}
        search = Search(**limits, n_jobs=self.at_once)
        first: dict[str, Any] = {"path": (setup, self, None, folder / "path")}
        if self.suite is not None:  # next to the path, which one core is busy with
            first[REFERENCE] = (setup, self, self.suite, folder / REFERENCE)
        begun = setup.context.run(label, tried, first)
        path, seconds = begun["path"]
        cost = {"path": seconds}
        for numbers in rounds(search):
            proposed = {
                str(one.number): one for one in proposals(search, numbers, self.paper, path, known)
            }
            jobs = {n: (setup, self, one.settings, folder / n) for n, one in proposed.items()}
            for number, (divergence, seconds) in setup.context.run(label, tried, jobs).items():
                one = proposed[number]
                known.append(Candidate(one.number, one.origin, one.settings, divergence))
                cost[number] = seconds
            known.sort(key=lambda one: one.number)
        chosen, origins = best(known).number, [one.origin for one in known]
        if self.suite is not None:
            known.append(Candidate(len(known), "search", self.suite, begun[REFERENCE][0]))
            origins.append(REFERENCE)
        models = []
        for one, origin in zip(known, origins, strict=True):
            name = REFERENCE if origin == REFERENCE else str(one.number)
            columns = {"trial": one.number, "origin": origin, "chosen": int(one.number == chosen)}
            columns |= {word: f"{getattr(one.settings, word):g}" for word in SWEPT}
            columns["divergence"] = one.mean
            keys = ("featcal", self.upstream, "tuned", self.seed)
            models.append(ModelSpec(name, folder / name, *keys, columns=columns))
        rows = [row for own in score(label, setup, models).values() for row in own]
        return Found(rows, facts={"path": path}, record={"cost": cost})


def tried(
    setup: Setup, study: TuneStudy, calibration: Calibration | None, out: Path
) -> tuple[Any, float]:
    """Return one candidate's divergence by task, or without settings λ of the path; and seconds."""
    from safetensors.torch import load_file

    import featcal
    from reproduction.field.tune import distances, path_gains, ridge_of, split_all

    begin, device, heads = perf_counter(), setup.context.device, None
    batches = streams(setup, study.drawn(), study.reading)
    kept, held = split_all(batches, study.holdout, study.seed)
    if not setup.of_texts:
        tensors = load_file(setup.heads)
        scale = tensors["logit_scale"].exp()
        heads = {task: scale * tensors[f"head/{task}"] for task in setup.tasks}
    merged, plan = setup.merged(study.upstream), plan_of(setup, study.reading)
    found: Any
    if calibration is None:
        given = (merged, setup.base, setup.experts, kept, held, study.paper)
        found = ridge_of(path_gains(*given, plan=plan, device=device))
    else:
        models: Mapping[str, Any] = {"base": setup.base, "experts": setup.experts}
        run = partial(featcal.calibrate, merged, batches=kept, plan=plan, **models)
        run(settings=calibration, device=device, out=out)
        found = distances(setup.load(out), setup.experts, held, setup.projection(), heads)
    return found, round(perf_counter() - begin, 2)
