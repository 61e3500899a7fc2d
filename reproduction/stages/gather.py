"""Stage `gather`: copies small files from outputs/ to results/, which is in git.

They never vary between two runs; seconds, machine and costs of calibrations go to run.json. It
reads no experiments, whose schema loads torch.
"""

import shutil
from pathlib import Path
from typing import Any

from featcal.errors import MissingPath
from featcal.files import atomic_folder, read_json, write_json
from reproduction.results import chosen_suite, project_root, read_yaml, run_record

# The stages before the scores of a role and pool, in the order of their seconds in run.json.
CHAIN = ("prepare", "multitask", "merge", "calibrate", "adapt", "evaluate")


def run(name: str) -> None:
    """For `samples/clip_b32-8`: copy outputs/<suite>/samples/clip_b32-8/ to results/<suite>/, and
    write the run's record as run.json next to the files.
    """
    root = project_root()
    suite = chosen_suite(read_yaml(root / "params.yaml"))
    outputs, (kind, _, key) = root / "outputs" / suite, name.partition("/")
    source, target = outputs / name, root / "results" / suite / name
    if not key or not source.is_dir():
        way_out = (
            "name a folder of results, such as scores/clip_b32-8, and run its stage: dvc repro"
        )
        raise MissingPath(source, "the results to gather", way_out)
    verb, chain = "measure" if kind == "drift" else kind, kind == "scores"
    record = (
        _chain(outputs / "run", key) if chain else read_json(outputs / f"run/{verb}-{key}.json")
    )
    with atomic_folder(target) as folder:
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, folder / file.name)
        write_json(folder / "run.json", record)


def _chain(runs: Path, key: str) -> dict[str, Any]:
    """Return seconds of every stage before scores and what each calibration cost, as recorded;
    machine and versions of this one.
    """
    merged = sorted(path.stem for path in runs.glob(f"merge-{key}-*.json"))
    texts = not key.rpartition("-")[2].isdigit()  # pools of texts have names
    names = ["prepare_texts" if texts else "prepare_data", *(f"{verb}-{key}" for verb in CHAIN)]
    seconds: dict[str, float] = {}
    cost: dict[str, dict[str, Any]] = {}  # by stage, by seed
    for name in [*names, *merged]:
        path = runs / f"{name}.json"
        if path.is_file():
            record = read_json(path)
            seconds |= record["seconds"]
            cost |= record.get("cost", {})
    return run_record(seconds, cost=cost)
