"""Extensions of the paper's method, each alone and together, with several mergers.

One variant is chosen by its mean on validation samples, as the suite's own settings were. Test
samples are scored too, for the report alone.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import PositiveInt

from featcal.settings import Calibration, Distinct, require
from reproduction.engine.context import Setup
from reproduction.engine.make import make
from reproduction.engine.samples import Selection
from reproduction.engine.score import Row, evaluate_model, score
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import Found
from reproduction.experiments import Names, Reading, Seeds, Study
from reproduction.results import BEYOND

OWN = ("merged", "paper", "suite")  # variants that every study has and that are not candidates
PRESET = "the preset best"  # a candidate that every study has
# the extensions that did best on validation samples of synthetic images, with the λ, ρ and α that
# did best there and on real texts; a preset of featcal when this study ran
BEST: dict[str, Any] = {
    "ridge": 1e-4,
    "anchor_blend": 1.0,
    "interpolation": 1.0,
    "residual": 1.0,
    "order": "sites",
    "affine": "joint",
}


class BeyondStudy(Study):
    """Settings of the study.

    chosen_on: mergers with which every variant is run; the others run what was chosen with these.
    variants:  by name, what differs from `suite`.
    few:       other numbers of samples for `suite` and the preset, with the first of `chosen_on`.
    """

    section = "beyond"
    scores = BEYOND
    upstreams: tuple[str, ...]
    chosen_on: Names
    paper: Calibration
    suite: Calibration
    variants: Mapping[str, Mapping[str, Any]]
    samples: PositiveInt
    few: Annotated[tuple[PositiveInt, ...], Distinct]
    batch: PositiveInt
    seeds: Seeds
    reading: Reading | None = None

    def check(self) -> None:
        fine = set(self.chosen_on) <= set(self.upstreams)
        require(fine, "beyond.chosen_on", self.chosen_on, "must be some of beyond.upstreams")
        require(bool(self.variants), "beyond.variants", self.variants, "must name some")
        always = (*OWN, PRESET)
        for name in self.variants:
            expected = f"must be none of {', '.join(always)}: always run"
            require(name not in always, "beyond.variants", name, expected)
            self.settings(name)

    def settings(self, variant: str) -> Calibration | None:
        """Return the settings of a variant; None for the merged model."""
        if variant in OWN:
            return None if variant == "merged" else getattr(self, variant)
        if variant == PRESET:
            return Calibration(**BEST)
        changed = {**dict(self.suite), **self.variants[variant]}
        return Calibration.from_mapping(changed, f"beyond.variants.{variant}")

    def first(self) -> list[tuple[str, str, int, int]]:
        """Return merger, variant, samples and seed of what is run before one is chosen."""
        variants = (*OWN, *self.variants, PRESET)
        return [(u, v, self.samples, self.seeds[0]) for u in self.chosen_on for v in variants]

    def further(self, chosen: str) -> list[tuple[str, str, int, int]]:
        """Return what is run after it: other mergers, other seeds, and other numbers of samples."""
        n, (seed, *seeds) = self.samples, self.seeds
        others = [upstream for upstream in self.upstreams if upstream not in self.chosen_on]
        variants = dict.fromkeys((*OWN, PRESET, chosen))
        found = [(u, v, n, seed) for u in others for v in variants]
        found += [(u, v, n, s) for u in self.upstreams for v in (chosen, "suite") for s in seeds]
        few = [number for number in self.few if number != n]
        return found + [(self.chosen_on[0], v, m, seed) for v in (PRESET, "suite") for m in few]

    def model(
        self, setup: Setup, folder: Path, upstream: str, variant: str, samples: int, seed: int
    ) -> ModelSpec:
        """Return one of those as a model."""
        name, settings = f"{upstream} {variant} n={samples} seed={seed}", self.settings(variant)
        columns = {"variant": variant, "samples": samples}
        if settings is None:
            merged = setup.merged(upstream)
            return ModelSpec(name, merged, "merged", upstream, columns=columns | {"samples": 0})
        setting = variant if variant in OWN else "beyond"
        draw = self.drawn(samples=samples, seed=seed)
        words = ("featcal", upstream, setting, seed, settings, draw, self.reading)
        return ModelSpec(name, folder / name, *words, columns=columns)

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return rows of every model, what was chosen, and seconds of every calibration."""
        label, models, scores = f"beyond {self.key}", list[ModelSpec](), dict[str, list[Row]]()
        validated: dict[str, list[float]] = {}
        seconds: dict[str, float] = {}

        def run(trials: list[tuple[str, str, int, int]], validate: bool) -> None:
            new = [self.model(setup, folder, *trial) for trial in trials]
            made = [model for model in new if model.method == "featcal"]
            models.extend(new)
            seconds.update(make(label, setup, made))
            scores.update(score(f"{label} test", setup, new))
            if validate:
                validated_by = partial(evaluate_model, selection=Selection("validation"))
                rows = score(f"{label} validation", setup, new, validated_by)
                validated.update({n: [one["value"] for one in own] for n, own in rows.items()})

        run(self.first(), validate=True)
        means = {}
        for variant in (*self.variants, PRESET):
            own = [validated[m.name] for m in models if m.columns["variant"] == variant]
            values = [value for one in own for value in one]
            means[variant] = sum(values) / len(values)
        chosen = max(means, key=means.__getitem__)
        run(self.further(chosen), validate=False)
        rows = []
        for model in models:
            values = validated.get(model.name, [None] * len(scores[model.name]))
            word = {"chosen": int(model.columns["variant"] == chosen)}
            pairs = zip(scores[model.name], values, strict=True)
            rows += [{**row, **word, "validation": value} for row, value in pairs]
        facts = {"chosen": chosen, "validation": means, "preset": BEST}
        cost = {name: {"seconds": round(value, 2)} for name, value in seconds.items()}
        return Found(rows, facts=facts, record={"cost": cost})
