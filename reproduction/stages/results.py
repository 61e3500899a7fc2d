"""Stage `results`: gathers the cached scores of a role and pool into the small files that are in git."""

from dataclasses import asdict
from typing import Any

from featcal.storage.results import (
    SCORES,
    correct_columns,
    correct_path,
    digests,
    read_json,
    read_rows,
    run_record,
    write_json,
    write_rows,
)
from reproduction.experiments.runs import TEXT_POOLS, MergeRun, role_and_pool
from reproduction.experiments.studies import STUDIES
from reproduction.stages.columns import CURVES, MEASURED, SCALES, SEEN
from reproduction.stages.context import Context, load_context
from reproduction.stages.curves import curves, scales
from reproduction.stages.seen import draws_of, seen_rows

OF_A_POOL = ("prepare", "multitask", "merge", "calibrate", "adapt", "evaluate", "measure")
REFERENCES = ("base", "expert", "multitask", "merged")  # what FeatCal starts from and is held against


def run(key: str) -> None:
    """Write results/<suite>/<key>.csv and beside it .correct, .references, .curves, .settings and .run.

    Of images also .seen, the test images that mergers and adapters were shown. Where drift is measured and controls are run, also
    .drift, .alignment, .similarity, .projection, .vectors and .scales.
    """
    context = load_context()
    layout = context.layout
    scores = read_rows(layout.scores(key), SCORES)
    write_rows(layout.results / f"{key}.csv", scores, SCORES)
    write_rows(layout.results / f"{key}.references.csv", [row for row in scores if row["method"] in REFERENCES], SCORES)
    columns, file = correct_columns(), layout.results / f"{key}.csv"
    write_rows(correct_path(file), read_rows(correct_path(layout.scores(key)), columns), columns)
    role, pool = role_and_pool(key)
    played = context.plays(role, pool)
    if pool not in TEXT_POOLS:
        seen = seen_rows(context, role, pool, draws_of(context, role, pool) if played else (), scores)
        write_rows(layout.results / f"{key}.seen.csv", seen, SEEN)
    write_rows(layout.results / f"{key}.curves.csv", curves(context, role, pool) if played else [], CURVES)
    if key in context.experiments.measure:
        for name, columns in MEASURED.items():
            write_rows(layout.results / f"{key}.{name}.csv", read_rows(layout.drift(key) / f"{name}.csv", columns), columns)
        write_rows(layout.results / f"{key}.scales.csv", scales(context, role, pool) if played else [], SCALES)
    write_json(layout.results / f"{key}.settings.json", _settings(context, key))
    own = [file for file in layout.results.glob(f"{key}.*") if file.name.split(".")[1] not in (*STUDIES, "run")]
    write_json(layout.results / f"{key}.run.json", _gathered(context, key) | {"files": digests(own)})


def _settings(context: Context, key: str) -> dict[str, Any]:
    """The resolved settings behind the scores, so that a results file explains itself."""
    role, pool = role_and_pool(key)
    experiments = context.experiments
    merged = {k: _merge_settings(m) for k, m in experiments.merged_in(role, pool).items()}
    adapted = {k: asdict(a) for k, a in experiments.adapted_in(role, pool).items()}
    ablated = {k: asdict(a) for k, a in experiments.ablated_in(role, pool).items()}
    calibrated = {k: asdict(c) for k, c in experiments.calibrated_in(role, pool).items()}
    shared = experiments.multitask.get(key)
    multitask = {key: asdict(shared)} if shared else {}
    suite = {"name": context.suite.name, "data": asdict(context.suite.data), "heads": context.suite.heads}
    return {"suite": suite, "multitask": multitask, "merge": merged, "calibrate": calibrated, "adapt": adapted, "ablate": ablated}


def _merge_settings(run: MergeRun) -> dict[str, Any]:
    """Method, settings and, where it looks at data, the draw."""
    return {"method": run.method, **(run.options or {}), **({"draw": asdict(run.draw)} if run.draw else {})}


def _gathered(context: Context, key: str) -> dict[str, Any]:
    """Seconds of every stage that led here and what each calibration cost, as recorded; machine and versions of this one."""
    role, pool = role_and_pool(key)
    drawn = "prepare_texts" if pool in TEXT_POOLS else "prepare_data"
    names: list[tuple[str, str | None]] = [(drawn, None), *((verb, key) for verb in OF_A_POOL)]
    names += [("merge", k) for k in context.experiments.merged_in(role, pool)]  # of one merger, where each has a stage of its own
    names += [("calibrate", k) for k in dict.fromkeys(c.merged for c in context.experiments.calibrated_in(role, pool).values())]
    names += [("adapt", k) for k in dict.fromkeys(a.merged for a in context.experiments.adapted_in(role, pool).values())]
    names += [("ablate", k) for k in context.experiments.ablated_in(role, pool)]
    seconds: dict[str, float] = {}
    cost: dict[str, dict[str, Any]] = {}  # by stage, by seed
    for verb, name in names:
        path = context.layout.run(verb, name)
        if path.is_file():
            record = read_json(path)
            seconds |= record["seconds"]
            cost |= record.get("cost", {})
    return run_record(seconds, cost=cost)
