"""Stage `results`: gathers the cached scores of a role and pool into the small files that are in git."""

from dataclasses import asdict
from typing import Any

from featcal.stages.context import Context, load_context, role_and_pool
from featcal.storage.results import DRIFT, PROJECTION, SCORES, read_json, read_rows, run_record, write_json, write_rows

REFERENCES = ("base", "expert", "merged")  # what FeatCal starts from and is held against


def run(key: str) -> None:
    """Write results/<suite>/<key>.csv, .references.csv, .drift.csv, .projection.csv, .settings.json and .run.json."""
    context = load_context()
    layout = context.layout
    scores = read_rows(layout.scores(key), SCORES)
    write_rows(layout.results / f"{key}.csv", scores, SCORES)
    write_rows(layout.results / f"{key}.references.csv", [row for row in scores if row["method"] in REFERENCES], SCORES)
    for name, columns in (("drift", DRIFT), ("projection", PROJECTION)):
        write_rows(layout.results / f"{key}.{name}.csv", read_rows(layout.drift(key) / f"{name}.csv", columns), columns)
    write_json(layout.results / f"{key}.settings.json", _settings(context, key))
    write_json(layout.results / f"{key}.run.json", _gathered(context, key))


def _settings(context: Context, key: str) -> dict[str, Any]:
    """The resolved settings behind the scores, so that a results file explains itself."""
    role, pool = role_and_pool(key)
    experiments = context.experiments
    merged = {k: {"method": m.method, **dict(m.options or {})} for k, m in experiments.merged_in(role, pool).items()}
    calibrated = {k: asdict(c) for k, c in experiments.calibrated_in(role, pool).items()}
    suite = {"name": context.suite.name, "data": asdict(context.suite.data), "heads": context.suite.heads}
    return {"suite": suite, "merge": merged, "calibrate": calibrated}


def _gathered(context: Context, key: str) -> dict[str, Any]:
    """Seconds of every stage that led here and what each calibration cost, as recorded; machine and versions of this one."""
    role, pool = role_and_pool(key)
    names = [("prepare_data", None), ("prepare", key), ("evaluate", key), ("measure", key)]
    names += [("merge", k) for k in context.experiments.merged_in(role, pool)]
    names += [("calibrate", k) for k in context.experiments.calibrated_in(role, pool)]
    seconds: dict[str, float] = {}
    cost: dict[str, dict[str, Any]] = {}  # by stage, by seed
    for verb, name in names:
        path = context.layout.run(verb, name)
        if path.is_file():
            record = read_json(path)
            seconds |= record["seconds"]
            cost |= record.get("cost", {})
    return run_record(seconds, cost=cost)
