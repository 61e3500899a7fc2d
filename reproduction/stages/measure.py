"""Stage `measure`: the distance of a merged model and its calibrations from the experts.

n samples · p width of a feature. Features are of length one, as the classifier sees them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from math import nan, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from featcal.baselines.adapters import Adapters
from featcal.core.moments import Drift
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.files import atomic_folder
from featcal.models.batch import Batch, Batches, padding_mask, unit_length
from featcal.models.blocks import model_call
from featcal.models.load import evaluation_mode
from featcal.models.modules import is_linear
from featcal.models.plan import BlockPlan, Stack, blocks_of, part_of, plan_for
from reproduction.engine.context import Setup, load_context, pick
from reproduction.engine.features import block_outputs, projected
from reproduction.engine.samples import load_split
from reproduction.engine.spec import ModelSpec, specs
from reproduction.experiments import MeasureRun, role_and_pool
from reproduction.results import MEASURED, Row, write_rows

BATCH = 250
METHODS = ("merged", "featcal", "surgery", "prob_surgery")
PROJECTED = 100  # samples per task in the plane
KEPT = 500  # samples of the shown task whose cosines are kept one by one


def run(key: str) -> None:
    """Write outputs/<suite>/drift/<key>/<name>.csv for every name of MEASURED."""
    context = load_context()
    measure_run = pick("measure", context.experiments.measure, key)
    rows: dict[str, list[Row]] = {name: [] for name in MEASURED}
    with context.recorded("measure", key):
        setup = Setup(context, *role_and_pool(key))
        if measure_run is not None and setup.available:
            jobs = {task: (setup, measure_run, task) for task in setup.tasks}
            results = context.run(f"measure {key}", measure_task, jobs)
            for name in MEASURED:
                rows[name] = [row for task_rows in results.values() for row in task_rows[name]]
            for name in ("drift", "alignment", "vectors"):  # stable within a model
                rows[name].sort(key=lambda row: (METHODS.index(row["method"]), row["setting"]))
        with atomic_folder(setup.folder("drift")) as folder:
            for name, columns in MEASURED.items():
                write_rows(folder / f"{name}.csv", rows[name], columns)


def measured_models(setup: Setup, measure_run: MeasureRun) -> list[ModelSpec]:
    """Return the merged model, then the models made from it at the run's settings and seed."""
    models = [m for m in specs(setup) if m.upstream == measure_run.upstream and m.method in METHODS]
    settings, seed = measure_run.settings, measure_run.seed
    return [m for m in models if m.method == "merged" or (m.setting in settings and m.seed == seed)]


def measure_task(setup: Setup, measure_run: MeasureRun, task: str) -> dict[str, list[Row]]:
    """Return the rows of one task, by file; rows of single samples for the run's task only."""
    projection, samples = setup.projection(), load_split(setup, task, "test")
    base, expert = setup.load(setup.base), setup.load(setup.expert(task))
    target = unit_length(projected(expert, projection, samples, BATCH, f"expert of {task}"))
    raw: dict[str, Any] = {}  # before features are divided by their norm, which adapters may want
    features_by_model, rows = {"expert": target}, {name: list[Row]() for name in MEASURED}
    for model in measured_models(setup, measure_run):
        line = {**setup.row_keys, "task": task, **model.row_keys}
        if model.corrects:
            adapters = Adapters.load(model.folder)
            features = unit_length(adapters.apply(task, raw[model.corrects]))
        else:
            loaded, location = setup.load(model.folder), f"{model.name}, task {task}"
            raw[model.name] = projected(loaded, projection, samples, BATCH, location)
            features = unit_length(raw[model.name])
            blocks = model_drift(loaded, expert, samples.batches(None, BATCH))
            last = Drift()
            last.add(features, target)
            rows["drift"] += [line | row for row in (*blocks, drift_row("features", last, last))]
            for part, names in parameter_groups(loaded).items():
                cosine, size = task_vector_alignment(loaded, base, expert, names)
                count = sum(loaded.get_parameter(name).numel() for name in names)
                part_row = {"part": part, "cosine": cosine, "size": size, "count": count}
                rows["vectors"].append(line | part_row)
            if model.setting in ("", measure_run.settings[0]):
                features_by_model[model.method] = features
        rows["alignment"].append(alignment_row(line, features, target))
        if task == measure_run.task:
            rows["similarity"] += similarity_rows(line, features, target)
    rows["projection"] += projection_rows(task, samples.labels, features_by_model)
    return rows


def features_by_block(
    model: nn.Module, batch: Batch, plan: BlockPlan
) -> dict[str, tuple[Stack, Tensor]]:
    """Return the stacks and features (batch, tokens, d) by block: "embeddings", "00", "01", …"""
    with evaluation_mode([model]), exact_products(), ExitStack() as hooks:
        stacks = (blocks_of(model, stack) for stack in plan.stacks)
        outputs = [hooks.enter_context(block_outputs(blocks)) for blocks in stacks]
        model(**model_call(model, batch))
    by_block = {}
    for stack, features in zip(plan.stacks, outputs, strict=True):
        start = f"{stack.name}." if len(outputs) > 1 else ""
        by_block |= {f"{start}{block}": (stack, h) for block, h in features.items()}
    return by_block


def model_drift(model: nn.Module, expert: nn.Module, batches: Batches) -> list[Row]:
    """Return drift after every block over all tokens, and distance and cosine of the first token."""
    tokens, first, plan = dict[str, Drift](), dict[str, Drift](), plan_for(model)
    for batch in batches:
        features, expert_features = (features_by_block(m, batch, plan) for m in (model, expert))
        for block, (stack, h) in features.items():
            h_exp, mask = expert_features[block][1], padding_mask(batch, h, stack.mask, model)
            tokens.setdefault(block, Drift()).add(h, h_exp, mask)
            first.setdefault(block, Drift()).add(h[:, 0], h_exp[:, 0])
    return [drift_row(block, tokens[block], first[block]) for block in tokens]


def drift_row(block: str, tokens: Drift, first: Drift) -> Row:
    """Return the drift of one block: over all tokens, and of the first token."""
    l2 = first.distance / first.count  # the mean of ‖h − h_exp‖₂
    distances = {"relative_drift": tokens.relative, "l2": l2, "cosine": first.cosine}
    return {"block": block, **distances, "count": int(first.count)}


def evenly_spaced(count: int, limit: int) -> list[int]:
    """Return at most `limit` indices, evenly over `count` samples, which may be sorted by class."""
    return list(range(count)) if count <= limit else [i * count // limit for i in range(limit)]


def alignment_row(line: Row, features: Tensor, expert: Tensor) -> Row:
    """Return mean cosine and distance to the expert, and the cosines' standard deviation."""
    cosines = (features * expert).double().sum(-1)
    distance = float((features - expert).double().norm(dim=-1).mean())
    spread = float(cosines.std()) if len(cosines) > 1 else 0.0
    values = {"cosine": float(cosines.mean()), "cosine_sd": spread, "l2": distance}
    return line | values | {"count": len(cosines)}


def similarity_rows(line: Row, features: Tensor, expert: Tensor) -> Iterator[Row]:
    """Yield the cosine of single samples, at most KEPT of them."""
    keys = {column: line[column] for column in ("task", "method", "setting")}
    cosines = (features * expert).double().sum(-1).tolist()
    for index in evenly_spaced(len(cosines), KEPT):
        yield keys | {"index": index, "similarity": cosines[index]}


def projection_rows(task: str, labels: Any, features: Mapping[str, Tensor]) -> Iterator[Row]:
    """Yield two principal components of all the models' features (n, p), which share their axes."""
    indices = evenly_spaced(len(next(iter(features.values()))), PROJECTED)
    points = {model: f[indices].double() for model, f in features.items()}
    joint = torch.cat(list(points.values()))  # (models · n, p)
    _, _, directions = torch.linalg.svd(joint - joint.mean(0), full_matrices=False)
    signs = directions[:2].sum(1, keepdim=True).sign()  # a direction has no sign of its own
    axes = directions[:2] * signs
    for model, f in points.items():
        for i, (x, y) in zip(indices, ((f - joint.mean(0)) @ axes.T).tolist(), strict=True):
            label = int(labels[i])
            yield {"task": task, "model": model, "index": i, "label": label, "x": x, "y": y}


def task_vector_alignment(
    model: nn.Module, base: nn.Module, expert: nn.Module, names: Iterable[str]
) -> tuple[float, float]:
    """Return cos(v, v_exp) and ‖v‖ / ‖v_exp‖ of v = θ − θ_base and v_exp = θ_exp − θ_base, or nan."""
    parameters = [dict(module.named_parameters()) for module in (model, base, expert)]
    product = square = target_square = 0.0
    for name in names:
        new, start, target = (m[name].detach().to(SUM_DTYPE).flatten() for m in parameters)
        change, target_change = new - start, target - start
        product += float(torch.dot(change, target_change))
        square += float(torch.dot(change, change))
        target_square += float(torch.dot(target_change, target_change))
    cosine = product / sqrt(square * target_square) if square and target_square else nan
    return cosine, (sqrt(square / target_square) if target_square else nan)


def parameter_groups(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of all parameters, "backbone", and of blocks' linear weights, "linear"."""
    solved = []
    for path in (stack.blocks for stack in plan_for(model).stacks):
        linears = (n for n, module in part_of(model, path).named_modules() if is_linear(module))
        solved += [f"{path}.{name}.weight" for name in linears]
    return {"backbone": [name for name, _ in model.named_parameters()], "linear": solved}
