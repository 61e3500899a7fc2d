"""Stage `evaluate`: scores of every model of a role and pool on test samples, and small files that
explain them.
"""

from typing import Any

from featcal.files import atomic_folder, write_json
from reproduction.experiments.runs import TEXT_POOLS, MergeRun, role_and_pool
from reproduction.results import CURVES, SCORES, SEEN, write_rows, write_scores
from reproduction.stages.context import Context, load_context, recorded
from reproduction.stages.curves import curves
from reproduction.stages.scored import scored
from reproduction.stages.scoring import score
from reproduction.stages.seen import draws_of, seen_rows

REFERENCES = (
    "base",
    "expert",
    "multitask",
    "merged",
)  # what FeatCal starts from and is held against


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>/: scores, which samples are right, references, curves,
    settings; no rows where not run.

    Of encoders also seen.csv, the test samples that mergers and adapters were shown.
    """
    context = load_context()
    role, pool = role_and_pool(key)
    played = context.plays(role, pool)
    with (
        recorded(context, "evaluate", key),
        atomic_folder(context.layout.found("scores", key)) as out,
    ):
        scores = (
            score(context, f"evaluate {key}", role, pool, scored(context, role, pool))
            if played
            else {}
        )
        rows = [row for own in scores.values() for row in own]
        write_scores(out / "scores.csv", rows)
        held = [{c: row[c] for c in SCORES} for row in rows if row["method"] in REFERENCES]
        write_rows(out / "references.csv", held, SCORES)
        if pool not in TEXT_POOLS:
            seen = seen_rows(
                context, role, pool, draws_of(context, role, pool) if played else (), rows
            )
            write_rows(out / "seen.csv", seen, SEEN)
        write_rows(out / "curves.csv", curves(context, role, pool) if played else [], CURVES)
        write_json(out / "settings.json", _settings(context, key))


def _settings(context: Context, key: str) -> dict[str, Any]:
    """The resolved settings behind the scores, so that a results file explains itself."""
    role, pool = role_and_pool(key)
    experiments = context.experiments
    merged = {k: _merge_settings(m) for k, m in experiments.merged_in(role, pool).items()}
    adapted = {k: a.model_dump() for k, a in experiments.adapted_in(role, pool).items()}
    calibrated = {k: c.model_dump() for k, c in experiments.calibrated_in(role, pool).items()}
    shared = experiments.multitask.get(key)
    multitask = {key: shared.model_dump()} if shared else {}
    suite = {
        "name": context.suite.name,
        "data": context.suite.data.model_dump(),
        "heads": context.suite.heads,
    }
    return {
        "suite": suite,
        "multitask": multitask,
        "merge": merged,
        "calibrate": calibrated,
        "adapt": adapted,
    }


def _merge_settings(run: MergeRun) -> dict[str, Any]:
    """Method, settings and, where it looks at data, the draw."""
    return {
        "method": run.method,
        **(run.options or {}),
        **({"draw": run.draw.model_dump()} if run.draw else {}),
    }
