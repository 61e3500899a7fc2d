"""The playground: merge, calibrate and evaluate the models of one role here and now, with settings
of one's own.

For notebooks/playground.ipynb. It reads what the stages `prepare_data` and `prepare` made and keeps
nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from featcal.errors import UnknownKey
from featcal.settings import Calibration, require
from reproduction.engine.context import Context, load_context
from reproduction.experiments import MergeRun
from reproduction.prepare.sources import read_sources
from reproduction.report.played import SEED, Played, Wanted

BATCH, EVALUATED = (
    32,
    250,
    # images at a time: those of the calibration, whose sums the command line repeats; those of a test
)


def play(
    role: str,
    pool: int,
    merger: str,
    *,
    ridge: float,
    anchor_blend: float,
    interpolation: float,
    samples: int,
    test_images: int,
    start: Path | None = None,
) -> Played:
    """Merge, calibrate with λ, ρ and α on n training images per task, and hold both models against
    base and experts.

    Args:    role, pool, merger: words of params.yaml, in the suite that it names.  samples: n.
             test_images: of each task, drawn,
             at most so many.  start: a folder of the project, the current one where None.
    Returns: accuracies and drift; without them where the role's experts or the images have not been
    made.
    Raises:  UnknownKey or BadSetting, before anything is read, for a word or value that cannot be
             used.
    """
    settings = Calibration(ridge=ridge, anchor_blend=anchor_blend, interpolation=interpolation)
    for name, number in (("samples", samples), ("test_images", test_images)):
        require(number >= 1, name, number, "must be at least 1")
    context = load_context(start)
    merge = merger_named(context, role, pool, merger)
    wanted = Wanted(context.suite.name, role, pool, merger, settings, samples, test_images)
    layout = context.layout
    if not (layout.heads(role, pool).is_file() and (layout.data / "sources.json").is_file()):
        return Played(wanted)
    return _played(context, wanted, merge)


def merger_named(context: Context, role: str, pool: int, merger: str) -> MergeRun:
    """The merge of params.yaml that goes by this name. Raises: UnknownKey naming role, pool or
    merger.
    """
    if context.role(role) is None:
        raise UnknownKey(f"role of suite {context.suite.name}", role, list(context.suite.roles))
    context.suite.tasks_of(role, pool)
    # a method that looks at images would need its own draw; those from weights alone take seconds
    known = {
        run.upstream: run
        for run in context.experiments.merged_in(role, pool).values()
        if run.draw is None
    }
    if merger not in known:
        raise UnknownKey(f"merger of {role} and {pool} tasks", merger, list(known))
    return known[merger]


def _played(context: Context, wanted: Wanted, merge: MergeRun) -> Played:
    """What `play` returns where everything is there."""
    from torch import nn

    import featcal
    from featcal.models.load import torch_device

    role, pool, layout, device = (
        wanted.role,
        wanted.pool,
        context.layout,
        torch_device(context.suite.device),
    )
    base = layout.base(role, pool)
    experts = {task: layout.expert(role, pool, task) for task in context.suite.tasks_of(role, pool)}
    batches = {task: _batches(context, wanted, task) for task in experts}
    merged = featcal.merge(merge.method, base, experts, **merge.options or {})
    assert isinstance(merged, nn.Module)  # no folder was asked for
    merged.to(device)
    result = featcal.calibrate(
        merged, base=base, experts=experts, batches=batches, settings=wanted.settings, device=device
    )
    models = {"merged": merged, "featcal": result.model}
    right: dict[str, dict[str, tuple[int, int]]] = {}
    drift: list[dict[str, Any]] = []
    for task in experts:
        counted, rows = _held_against(context, wanted, task, models)
        for name, counts in counted.items():
            right.setdefault(name, {})[task] = counts
        drift += rows
    return Played(wanted, right, drift, commands(context, wanted, merge), result.model)


def _batches(context: Context, wanted: Wanted, task: str) -> list[dict[str, Any]]:
    """Training images of one task, those that a table's calibration with this seed draws first."""
    from featcal.data.batches import draw_indices
    from reproduction.prepare.sources import load_task

    images = load_task(
        context.layout.data, task, "train", context.layout.base(wanted.role, wanted.pool)
    )
    return list(images.batches(draw_indices(task, len(images.labels), wanted.samples, SEED), BATCH))


def _held_against(
    context: Context, wanted: Wanted, task: str, models: Mapping[str, Any]
) -> tuple[dict[str, tuple[int, int]], list[dict[str, Any]]]:
    """Right answers of base, models and the task's expert, and the models' drift from the expert,
    block by block.
    """
    from safetensors.torch import load_file

    from featcal.calibration.report import model_drift
    from featcal.evaluation.zero_shot import evaluate_pool
    from featcal.models.load import load_vision
    from reproduction.prepare.sources import load_task

    layout, role, pool = context.layout, wanted.role, wanted.pool
    images = load_task(layout.data, task, "test", layout.base(role, pool))
    order = np.random.default_rng([SEED, crc32(task.encode()), crc32(b"playground")]).permutation(
        len(images)
    )
    some = images.take(order[: wanted.test_images])
    device = next(models["merged"].parameters()).device
    expert = load_vision(layout.expert(role, pool, task)).to(device)
    every = {"base": load_vision(layout.base(role, pool)).to(device), **models, "expert": expert}
    heads = load_file(layout.heads(role, pool))
    judged = evaluate_pool(
        every, {task: some}, {task: heads[f"head/{task}"]}, heads["visual_projection"], EVALUATED
    )
    rows = [
        {"model": name, "task": task} | row
        for name, model in models.items()
        for row in model_drift(model, expert, some.batches(None, EVALUATED))
    ]
    return {
        name: (int(right[task].sum()), len(right[task])) for name, right in judged.items()
    }, rows


def commands(context: Context, wanted: Wanted, merge: MergeRun) -> str:
    """The same merge and calibration as shell commands, to be given in the project's folder."""
    layout, out = context.layout, Path("outputs/playground")
    tasks = context.suite.tasks_of(wanted.role, wanted.pool)

    def told(path: Path) -> str:
        return str(path.relative_to(layout.root))

    base = f"--base {told(layout.base(wanted.role, wanted.pool))}"
    experts = [
        f"--expert {task}={told(layout.expert(wanted.role, wanted.pool, task))}" for task in tasks
    ]
    options = [f"--set {name}={value}" for name, value in (merge.options or {}).items()]
    settings = wanted.settings
    chosen = f"--ridge {settings.ridge} --anchor-blend {settings.anchor_blend} --interpolation {settings.interpolation}"
    draw = f"--samples {wanted.samples} --seed {SEED} --set batch={BATCH}"
    made = [
        f"featcal merge {merge.method}",
        base,
        *options,
        *experts,
        f"--out {out / 'merged'} --force",
    ]
    mended = [
        "featcal calibrate",
        f"--merged {out / 'merged'} {base}",
        *experts,
        *_places(context, tasks),
        chosen,
        draw,
    ]
    mended += [f"--out {out / 'calibrated'} --force"]
    return "\n".join(" \\\n    ".join(parts) for parts in (made, mended))


def _places(context: Context, tasks: Iterable[str]) -> Iterator[str]:
    """`--data` of every task: its folder, or its data set of the hub at the pinned revision."""
    sources = read_sources(context.layout.data)
    for task in tasks:
        source = sources[task]
        folder = context.layout.data / source.location
        at = f"@{source.revision}" if source.revision else ""
        yield f"--data {task}={folder.relative_to(context.layout.root) if source.kind == 'folder' else source.location + at}"
