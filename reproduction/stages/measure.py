"""Stage `measure`: how far the merged model, its calibrated ones and its adapters are from the
experts, on test samples.

Drift at the output of the embeddings and of every block (all tokens, and the CLS token) and at the
projected feature; final features of all tasks in a plane and their cosines to the expert's; and how
parameters moved from the base's.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from featcal.files import atomic_folder
from reproduction.experiments.runs import MeasureRun
from reproduction.results import MEASURED, write_rows
from reproduction.stages.context import Context, load_context, pick, recorded
from reproduction.stages.final_features import (
    alignment_row,
    projected,
    projection_rows,
    similarity_rows,
)
from reproduction.stages.scored import Scored, scored
from reproduction.stages.workers import fan_out

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH = 250
METHODS = ("merged", "featcal", "surgery", "prob_surgery")

Rows = dict[str, list[dict[str, Any]]]


def run(key: str) -> None:
    """Write outputs/<suite>/drift/<key>/<name>.csv for every name of MEASURED; no rows where
    nothing plays the role.
    """
    context = load_context()
    measure = pick("measure", context.experiments.measure, key)
    rows: Rows = {name: [] for name in MEASURED}
    with recorded(context, "measure", key):
        if measure is not None and context.plays(measure.role, measure.pool):
            tasks = context.suite.tasks_of(measure.role, measure.pool)
            jobs = {task: (context, measure, task) for task in tasks}
            found = dict(fan_out(f"measure {key}", measure_task, jobs, context.suite.workers))
            for name in MEASURED:
                rows[name] = [row for task in tasks for row in found[task][name]]
            for name in ("drift", "alignment", "vectors"):  # stable within a model
                rows[name].sort(key=lambda row: (METHODS.index(row["method"]), row["setting"]))
        with atomic_folder(context.layout.found("drift", key)) as folder:
            for name, columns in MEASURED.items():
                write_rows(folder / f"{name}.csv", rows[name], columns)


def measured(context: Context, measure: MeasureRun) -> list[Scored]:
    """The merged model, then what was made from it at the settings and with the seed that are
    measured.
    """
    models = scored(context, measure.role, measure.pool)
    models = [m for m in models if m.upstream == measure.upstream and m.method in METHODS]
    return [
        m
        for m in models
        if m.method == "merged" or (m.setting in measure.settings and m.seed == measure.seed)
    ]


def measure_task(context: Context, measure: MeasureRun, task: str) -> Rows:
    """Rows of one task, by file; single samples of the task to show only."""
    from safetensors.torch import load_file

    from featcal.baselines.adapters import Adapters
    from featcal.calibration.report import model_drift
    from featcal.evaluation.zero_shot import unit_length
    from featcal.models.load import load_as_calibrated, torch_device
    from reproduction.prepare.sources import load_task

    layout, device = context.layout, torch_device(context.suite.device)
    projection = load_file(layout.heads(measure.role, measure.pool)).get("visual_projection")
    samples = load_task(
        layout.data_of(measure.role), task, "test", layout.base(measure.role, measure.pool)
    )
    base = load_as_calibrated(layout.base(measure.role, measure.pool)).to(device)
    expert = load_as_calibrated(layout.expert(measure.role, measure.pool, task)).to(device)
    own = unit_length(projected(expert, projection, samples, BATCH, f"expert of {task}"))
    raw: dict[
        str, Any
    ] = {}  # features of each model before they are divided by their norm, which adapters may want
    shown = {"expert": own}
    rows: Rows = {name: [] for name in MEASURED}
    words = {
        "suite": context.suite.name,
        "role": measure.role,
        "pool": measure.pool,
        "upstream": measure.upstream,
        "task": task,
    }
    for chosen in measured(context, measure):
        line = words | {column: chosen.words[column] for column in ("method", "setting", "seed")}
        assert chosen.folder is not None  # only each task's own expert has none
        if chosen.adapted_model:
            features = unit_length(
                Adapters.load(chosen.folder).apply(task, raw[chosen.adapted_model])
            )
        else:
            model = load_as_calibrated(chosen.folder).to(device)
            raw[chosen.name] = projected(
                model, projection, samples, BATCH, f"{chosen.name}, task {task}"
            )
            features = unit_length(raw[chosen.name])
            blocks = [
                *model_drift(model, expert, samples.batches(None, BATCH)),
                _last(features, own),
            ]
            rows["drift"] += [line | block for block in blocks]
            rows["vectors"] += [line | part for part in _moved(model, base, expert)]
            if chosen.setting in ("", measure.settings[0]):
                shown[chosen.method] = features
        rows["alignment"].append(alignment_row(line, features, own))
        if task == measure.task:
            rows["similarity"] += similarity_rows(line, features, own)
    rows["projection"] += projection_rows(task, samples.labels, shown)
    return rows


def _last(features: "Tensor", own: "Tensor") -> dict[str, Any]:
    """Drift of the final features (n, p), as one more block."""
    from featcal.core.drift import Drift

    drift = Drift()
    drift.add(features, own)
    return {
        "block": "features",
        "relative_drift": drift.relative,
        "l2": drift.l2,
        "cosine": drift.cosine,
        "count": len(own),
    }


def _moved(model: "nn.Module", base: "nn.Module", expert: "nn.Module") -> Iterator[dict[str, Any]]:
    """The model's change from the base against the expert's, over all parameters and over the
    weights that are calibrated.
    """
    from reproduction.stages.task_vectors import parameter_groups, task_vector_alignment

    for part, names in parameter_groups(model).items():
        cosine, size = task_vector_alignment(model, base, expert, names)
        yield {
            "part": part,
            "cosine": cosine,
            "size": size,
            "count": sum(model.get_parameter(n).numel() for n in names),
        }
