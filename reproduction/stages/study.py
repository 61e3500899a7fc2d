"""What every study's stage does around the study: settings, a folder for its models, its small
files, the record of the run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featcal.files import atomic_folder, write_json
from reproduction.experiments.runs import Pool
from reproduction.results import write_rows, write_scores
from reproduction.stages.context import Context, load_context, pick, recorded
from reproduction.stages.trials import room
from reproduction.stages.workers import console

Row = dict[str, Any]
Columns = Sequence[str]


@dataclass(frozen=True)
class Found:
    """What a study found; nothing, where the suite does not run it.

    scores: rows of models.   more: rows of other tables, by their names.   told: for the settings
    file.
    record: for the record of the run, which differs from run to run.   pictures: what `finish`
    draws.
    """

    scores: Sequence[Row] = ()
    more: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[Any] = ()


def run_study(
    name: str,
    key: str,
    find: Callable[..., Found],
    scores: Columns | None = None,
    more: Mapping[str, Columns] | None = None,
    settings: bool = True,
    finish: Callable[[Path, Found], None] | None = None,
    plays: Callable[[Context, str, Pool], bool] = Context.plays,
) -> None:
    """Write outputs/<suite>/<name>/<key>/: <name>.csv and .correct.csv, other tables,
    .settings.json; no rows where not run.

    find: makes the study's models in a folder that is gone afterwards, from the context, the key,
    the study and that folder.
    scores, more: columns of the scores, and of other tables by name.   finish: writes what is no
    table.
    plays: whether the suite can run it; a study that needs no model of `prepare` asks
    Context.knows.
    """
    context = load_context()
    study, found = pick(name, context.experiments.studies[name], key), Found()
    with (
        recorded(context, name, key) as record,
        atomic_folder(context.layout.found(name, key)) as out,
    ):
        if study is None or not plays(context, study.role, study.pool):
            console.print(f"{name} {key}: not run in suite {context.suite.name}")
        else:
            with room(context, name) as models:
                found = find(context, key, study, models)
        record |= found.record
        if scores:
            write_scores(out / f"{name}.csv", found.scores, scores)
        for table, columns in (more or {}).items():
            write_rows(out / f"{table}.csv", found.more.get(table, ()), columns)
        if settings:
            write_json(out / f"{name}.settings.json", dict(found.told))
        if finish:
            finish(out, found)
