"""Stage `gather`: copies small files from outputs/ to results/, which is in git.

They never vary between two runs; seconds, machine and costs of calibrations go to run.json.
"""

from typing import Any

from featcal.files import atomic_path, read_json, write_json
from reproduction.engine.context import Context, load_context, pick
from reproduction.experiments import TEXT_POOLS, require_known, role_and_pool
from reproduction.results import run_record

BEFORE_SCORES = ("prepare", "multitask", "merge", "calibrate", "adapt", "evaluate")


def gather(name: str) -> None:
    """For `samples/clip_b32-8`: copy outputs/<suite>/samples/clip_b32-8/ to results/<suite>/, and
    write the run's record as run.json next to the files.
    """
    kind, _, key = name.partition("/")
    context = load_context()
    experiments, layout = context.experiments, context.layout
    scores = {f"{role}-{pool}": None for role, pool in experiments.prepared}
    entries: Any = {"scores": scores, "drift": experiments.measure, **experiments.studies}
    require_known("gather", kind, entries)
    pick(kind, entries[kind], key)
    folder = layout.results / kind / key
    for file in sorted(layout.found(kind, key).iterdir()):
        with atomic_path(folder / file.name) as hidden:
            hidden.write_bytes(file.read_bytes())
    verb = "measure" if kind == "drift" else kind
    chain = kind == "scores"
    record = _chain(context, key) if chain else read_json(layout.run(verb, key))
    write_json(folder / "run.json", record)


def _chain(context: Context, key: str) -> dict[str, Any]:
    """Return seconds of every stage before scores and what each calibration cost, as recorded;
    machine and versions of this one.
    """
    role, pool = role_and_pool(key)
    names: list[tuple[str, str | None]] = [
        ("prepare_texts" if pool in TEXT_POOLS else "prepare_data", None),
        *((verb, key) for verb in BEFORE_SCORES),
        *(("merge", merged) for merged in context.experiments.merged_in(role, pool)),
    ]
    seconds: dict[str, float] = {}
    cost: dict[str, dict[str, Any]] = {}  # by stage, by seed
    for verb, name in names:
        path = context.layout.run(verb, name)
        if path.is_file():
            record = read_json(path)
            seconds |= record["seconds"]
            cost |= record.get("cost", {})
    return run_record(seconds, cost=cost)
