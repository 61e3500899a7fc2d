"""Stage `measure`: how far merged and calibrated features are from the experts', block by block, and a picture of one task's.

On test images, at the output of the embeddings and of every block (all tokens, and the CLS token) and at the projected feature.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.runs import MeasureRun
from featcal.stages.context import Context, load_context, pick, recorded
from featcal.stages.workers import fan_out
from featcal.storage.atomic import atomic_folder
from featcal.storage.results import DRIFT, PROJECTION, write_rows

BATCH = 250
SHOWN = 200  # images of the projected task


def run(key: str) -> None:
    """Write outputs/<suite>/drift/<key>/{drift,projection}.csv; no rows where nothing plays the role."""
    context = load_context()
    measure = pick("measure", context.experiments.measure, key)
    drift: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    with recorded(context, "measure", key):
        if measure is not None and context.plays(measure.role, measure.pool):
            tasks = context.suite.pool(measure.pool)
            jobs = {task: (context, measure, task) for task in tasks}
            found = dict(fan_out(f"measure {key}", measure_task, jobs, context.suite.workers))
            rows = [row for task in tasks for row in found[task][0]]
            drift = sorted(rows, key=lambda row: (row["method"] != "merged", row["setting"]))  # stable within
            points = [point for task in tasks for point in found[task][1]]
        with atomic_folder(context.layout.drift(key)) as folder:
            write_rows(folder / "drift.csv", drift, DRIFT)
            write_rows(folder / "projection.csv", points, PROJECTION)


@dataclass(frozen=True)
class Measured:
    """One model that is held against the experts, as the results call it."""

    folder: Path
    method: str
    setting: str = ""
    seed: int | str = ""


def models_of(context: Context, measure: MeasureRun) -> list[Measured]:
    """The merged model and the calibrated ones."""
    merged = f"{measure.role}-{measure.pool}-{measure.upstream}"
    models = [Measured(context.layout.merged(merged), "merged")]
    for setting in measure.settings:
        folder = context.layout.calibrated(f"{merged}-{setting}", measure.seed)
        models.append(Measured(folder, "featcal", setting, measure.seed))
    return models


def measure_task(context: Context, measure: MeasureRun, task: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Drift rows of one task, and its projected features when it is the one to show."""
    from safetensors.torch import load_file

    from featcal.calibration.drift import model_drift
    from featcal.core.drift import Drift
    from featcal.evaluation.accuracy import features_of
    from featcal.models.device import torch_device
    from featcal.models.load import load_vision
    from featcal.suites.load_task import load_task

    layout, device = context.layout, torch_device(context.suite.device)
    projection = load_file(layout.heads(measure.role, measure.pool))["visual_projection"]
    images = load_task(layout.data, task, "test", layout.base(measure.role, measure.pool))
    expert = load_vision(layout.expert(measure.role, measure.pool, task)).to(device)
    own = features_of(expert, projection, images, BATCH)
    features, rows = {"expert": own}, []
    words = {"suite": context.suite.name, "role": measure.role, "pool": measure.pool, "upstream": measure.upstream, "task": task}
    for measured in models_of(context, measure):
        model = load_vision(measured.folder).to(device)
        seen = features_of(model, projection, images, BATCH)
        features.setdefault(measured.method, seen)
        final = Drift()
        final.add(seen, own)
        last = {"block": "features", "relative_drift": final.relative, "l2": final.l2, "cosine": final.cosine, "count": len(own)}
        line = words | {"method": measured.method, "setting": measured.setting, "seed": measured.seed}
        rows += [line | block for block in [*model_drift(model, expert, images.batches(None, BATCH)), last]]
    return rows, _projected(task, images.labels, features) if task == measure.task else []


def _projected(task: str, labels: Any, features: Any) -> list[dict[str, Any]]:
    """Two principal components of the three models' features together, so that all share their axes."""
    import torch

    joint = torch.cat([f[:SHOWN] for f in features.values()]).double()  # (3 n, p)
    _, _, directions = torch.linalg.svd(joint - joint.mean(0), full_matrices=False)
    axes = directions[:2] * directions[:2].sum(1, keepdim=True).sign()  # a principal direction has no sign of its own
    places = {model: (f[:SHOWN].double() - joint.mean(0)) @ axes.T for model, f in features.items()}
    return [
        {"task": task, "model": model, "index": i, "label": int(labels[i]), "x": float(x), "y": float(y)}
        for model, place in places.items()
        for i, (x, y) in enumerate(place.tolist())
    ]
