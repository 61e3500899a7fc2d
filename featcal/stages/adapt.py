"""Stage `adapt`: Surgery or ProbSurgery behind one merged model, at every setting and seed of params.yaml."""

from dataclasses import asdict
from functools import partial
from typing import Any

from featcal.stages.context import Context, load_context, pick, recorded
from featcal.stages.workers import console, fan_out
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/adapted/<key>/<setting>/seed<NN>/; an empty folder where the suite does not run it."""
    context = load_context()
    adapt = pick("adapt", context.experiments.adapt, key)
    with recorded(context, "adapt", key):
        if adapt.settings is None or not context.plays(adapt.role, adapt.pool):
            with atomic_folder(context.layout.adapted(key)):
                console.print(f"adapt {key}: not run in suite {context.suite.name}")
            return
        jobs = {}
        for setting, chosen in adapt.settings.items():
            jobs |= {f"{setting}, seed {seed}": (context, key, setting, seed) for seed in chosen.seeds}
        for _ in fan_out(f"adapt {key}", adapt_one, jobs, context.suite.workers):
            pass


def adapt_one(context: Context, key: str, setting: str, seed: int) -> None:
    """The adapters of all tasks for one setting and seed, which decides images, first weights, order and noise."""
    from safetensors.torch import load_file

    import featcal
    from featcal.models.device import torch_device
    from featcal.stages.streams import streams

    adapt = context.experiments.adapt[key]
    assert adapt.settings is not None
    chosen, layout, role, pool = adapt.settings[setting], context.layout, adapt.role, adapt.pool
    merged = layout.merged(f"{role}-{pool}-{adapt.upstream}")
    experts = {task: layout.expert(role, pool, task) for task in context.suite.pool(pool)}
    batches = streams(context, role, pool, chosen.draw, seed)
    more: dict[str, Any] = asdict(chosen.training)
    more["head"] = load_file(layout.heads(role, pool))["visual_projection"]
    more["device"] = torch_device(context.suite.device)
    if not context.suite.workers:
        more["progress"] = partial(_tell, f"{key} {setting} seed {seed}")
    if adapt.method == "surgery":
        adapters = featcal.surgery(merged, experts, batches, seed=seed, **more)
    else:
        adapters = featcal.prob_surgery(merged, experts, batches, seed=seed, **more)
    adapters.save(layout.adapted(key, setting, seed))


def _tell(name: str, line: str) -> None:
    console.print(f"  {name}  {line}", soft_wrap=True)
