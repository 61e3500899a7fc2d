"""A study: settings that make models, keep none of them, and record small tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from featcal.files import atomic_folder, write_json
from reproduction.engine.context import Setup, load_context, pick
from reproduction.engine.examples import write_sheet
from reproduction.engine.make import make
from reproduction.engine.score import score
from reproduction.engine.spec import ModelSpec
from reproduction.engine.workers import console
from reproduction.experiments import role_and_pool, studies
from reproduction.results import Row, write_rows, write_scores


@dataclass(frozen=True)
class StudyResult:
    """The results of a study.

    tables: rows of tables other than the scores.   facts: for the settings file.
    record: for the run record.   pictures: examples, in rows.
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
        if kind.pictured:
            write_sheet(result.pictures, folder / f"{name}.examples.png")


def make_and_score(
    label: str, setup: Setup, models: Sequence[ModelSpec], **options: Any
) -> list[Row]:
    """Make models and return their rows. options: as of `score`."""
    make(label, setup, models)
    return score(f"{label} score", setup, models, **options)


def score_parts(
    label: str,
    setup: Setup,
    folder: Path,
    parts: Mapping[str, Path],
    models: Callable[[Setup], Iterable[ModelSpec]],
    columns: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Row]:
    """Make models from a changed role, and return their rows with more columns.

    parts: what differs in its prepared folder, such as `experts`.   options: as of `score`.
    folder: of the models, and of the parts in it; deleted at the end.
    """
    replaced = replace(setup, context=replace(setup.context, outputs_folder=folder))
    prepared = replaced.prepared
    prepared.mkdir(parents=True)
    links = {prepared / path.name: path for path in setup.prepared.glob("*")}
    links |= {prepared / name: target for name, target in parts.items()}
    if "experts" not in parts:  # those of a smaller pool lie in its folder
        links |= {prepared.with_name(path.name): path for path in setup.prepared.parent.glob("*")}
    links |= {replaced.data: setup.data, replaced.texts: setup.texts}
    for link, target in links.items():
        if not link.exists():
            link.symlink_to(target)
    rows = make_and_score(label, replaced, list(models(replaced)), **options)
    rmtree(folder)
    return [row | dict(columns or {}) for row in rows]
