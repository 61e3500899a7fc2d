"""A study: settings that make models, keep none of them, and record small tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from featcal.files import atomic_folder, write_json
from reproduction.engine.context import Setup, load_context, pick
from reproduction.engine.make import make
from reproduction.engine.score import Evaluate, score
from reproduction.engine.spec import ModelSpec
from reproduction.engine.workers import console
from reproduction.experiments import role_and_pool, studies
from reproduction.results import Row, write_rows, write_scores


@dataclass(frozen=True)
class StudyResult:
    """The results of a study.

    tables: rows of tables other than the scores.   facts: for the settings file.
    record: for the run record.   pictures: what the study's `finish` draws.
    """

    scores: Sequence[Row] = ()
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[Any] = ()


def run_study(name: str, key: str) -> None:
    """Write outputs/<suite>/<name>/<key>/: tables and settings, without rows if it is not run."""
    context, kind = load_context(), studies()[name]
    study, result, facts = pick(name, context.experiments.studies[name], key), StudyResult(), {}
    if study is not None and study.device:
        context = replace(context, suite=context.suite.but(device=study.device))
    setup = Setup(context, *role_and_pool(key))
    with context.recorded(name, key) as record, atomic_folder(setup.folder(name)) as folder:
        if study is None or not (setup.available if kind.from_prepared else setup.in_suite):
            console.print(f"{name} {key}: not run in suite {context.suite.name}")
        else:
            with context.scratch(name) as models:
                result = study.run(setup, models)
            facts = {"study": study.model_dump(exclude={"device"}), **result.facts}
        record |= result.record
        if kind.scores:
            write_scores(folder / f"{name}.csv", result.scores, kind.scores)
        for table, columns in kind.tables.items():
            write_rows(folder / f"{table}.csv", result.tables.get(table, ()), columns)
        if kind.described:
            write_json(folder / f"{name}.settings.json", facts)
        kind.finish(folder, result)


def make_and_score(setup: Setup, label: str, models: list[ModelSpec], **options: Any) -> list[Row]:
    """Make models and return their rows. options: as of `rows_of`."""
    make(label, setup, models)
    return rows_of(setup, label, models, **options)


def rows_of(
    setup: Setup,
    label: str,
    models: Sequence[ModelSpec],
    corrected: Sequence[ModelSpec] = (),
    evaluate: Evaluate | None = None,
) -> list[Row]:
    """Return the rows of models. corrected: models with adapters.   evaluate: as of `score`."""
    scores = score(f"{label} score", setup, [*corrected, *models], evaluate)
    return [row for model in models for row in scores[model.name]]


def score_parts(
    label: str,
    setup: Setup,
    folder: Path,
    parts: Mapping[str, Path],
    models: Callable[[Setup], Iterable[ModelSpec]],
    columns: Mapping[str, Any] | None = None,
    evaluate: Evaluate | None = None,
) -> list[Row]:
    """Make models from these parts of the role, and return their rows with more columns.

    folder: of the models, and of the parts in it; deleted at the end.
    """
    replaced = replace(setup, context=replace(setup.context, outputs_folder=folder))
    replaced.prepared.mkdir(parents=True)
    for name, target in parts.items():
        (replaced.prepared / name).symlink_to(target)
    rows = make_and_score(replaced, label, list(models(replaced)), evaluate=evaluate)
    rmtree(folder)
    return [row | dict(columns or {}) for row in rows]
