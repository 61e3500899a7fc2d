"""Stage `gather`: copies small files from outputs/ into results/, which is in git: scores, drift,
or what a study found.

They never vary between two runs; seconds, machine and what calibrations cost go to run.json beside
them.
"""

from typing import Any

from featcal.errors import UnknownKey
from featcal.files import atomic_path, read_json, write_json
from reproduction.experiments.runs import TEXT_POOLS, role_and_pool
from reproduction.experiments.studies import STUDIES
from reproduction.results import run_record
from reproduction.stages.context import Context, load_context, pick

KINDS = ("scores", "drift", *STUDIES)
BEHIND_SCORES = ("prepare", "multitask", "merge", "calibrate", "adapt", "evaluate")


def run(name: str) -> None:
    """For `samples/clip_b32-8`: every file of outputs/<suite>/samples/clip_b32-8/ to
    results/<suite>/, and the run's record.
    """
    kind, _, key = name.partition("/")
    if kind not in KINDS:
        raise UnknownKey("gather", kind, list(KINDS))
    context = load_context()
    experiments, layout = context.experiments, context.layout
    entries: Any = {
        "scores": {f"{role}-{pool}": None for role, pool in experiments.prepared},
        "drift": experiments.measure,
    }
    pick(kind, (entries | experiments.studies)[kind], key)
    folder = layout.gathered(kind, key)
    for file in sorted(layout.found(kind, key).iterdir()):
        with atomic_path(folder / file.name) as hidden:
            hidden.write_bytes(file.read_bytes())
    verb = "measure" if kind == "drift" else kind
    write_json(
        folder / "run.json",
        _chain(context, key) if kind == "scores" else read_json(layout.run(verb, key)),
    )


def _chain(context: Context, key: str) -> dict[str, Any]:
    """Seconds of every stage that led to scores and what each calibration cost, as recorded;
    machine and versions of this one.
    """
    role, pool = role_and_pool(key)
    drawn = "prepare_texts" if pool in TEXT_POOLS else "prepare_data"
    names: list[tuple[str, str | None]] = [(drawn, None), *((verb, key) for verb in BEHIND_SCORES)]
    names += [
        ("merge", k) for k in context.experiments.merged_in(role, pool)
    ]  # of one merger, where each has a stage of its own
    seconds: dict[str, float] = {}
    cost: dict[str, dict[str, Any]] = {}  # by stage, by seed
    for verb, name in names:
        path = context.layout.run(verb, name)
        if path.is_file():
            record = read_json(path)
            seconds |= record["seconds"]
            cost |= record.get("cost", {})
    return run_record(seconds, cost=cost)
