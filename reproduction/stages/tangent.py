"""Task arithmetic in the tangent space, a control of the study `field`: its experts are others,
trained and run linearised.

It is no network of the base's form but a tower and its directional derivative, so that nothing
which solves or changes layers can be put behind it; it stands in the table by itself.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.experiments.field import FieldStudy
from reproduction.experiments.runs import Pool
from reproduction.stages import scoring
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored

TANGENT = "tangent"


def models_of(folder: Path) -> list[Scored]:
    """What is scored: the merged model, and each task's own expert as one row."""
    return [
        Scored(f"{TANGENT}/{part}", folder / part, part, TANGENT) for part in ("merged", "expert")
    ]


def make(
    context: Context, study: FieldStudy, out: Path, timed: Callable[[str, Callable[[], Any]], Any]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Write weights as folders like the base, out/merged/ and out/expert/<task>/; the chosen scale,
    and all with their values.
    """
    from safetensors.torch import load_file

    import featcal
    from featcal.models.device import torch_device
    from featcal.models.load import load_vision
    from featcal.models.save import save_model
    from reproduction.suites.linearised import Linearised, linearised_expert
    from reproduction.suites.load_task import load_task

    suite, layout, device = context.suite, context.layout, torch_device(context.suite.device)
    folder, tensors = (
        layout.base(study.role, study.pool),
        load_file(layout.heads(study.role, study.pool)),
    )
    base, experts = load_vision(folder).to(device), {}
    for task in suite.tasks_of(study.role, study.pool):
        images = load_task(layout.data_of(study.role), task, "train", folder)
        given = tensors, images, suite.fine_tuning(task), task, suite.expert_seed
        experts[task] = timed("experts", partial(linearised_expert, base, *given))
        save_model(experts[task], out / "expert" / task, like=folder)

    def merged(scale: float) -> Any:
        return featcal.merge("task_arithmetic", base, experts, scale=scale, device=device)

    def validated() -> dict[float, float]:
        models = {scale: Linearised(base, merged(scale)) for scale in study.tangent}
        chosen, place = (
            partial(scoring.drawn, study.rows, study.seed),
            (context, study.role, study.pool),
        )
        return scoring.averages(
            *place, models, partial(scoring.samples_of, *place, split="validation", most=chosen)
        )

    values = timed("choosing", validated)
    best = max(values, key=lambda scale: (round(values[scale], 4), -scale))
    save_model(timed("merged", partial(merged, best)), out / "merged", like=folder)
    return {"scale": best}, [
        {"scale": scale, "value": round(value, 4)} for scale, value in values.items()
    ]


def encoder(context: Context, role: str, pool: Pool, model: Scored, task: str) -> Any:
    """What is run on a task, of the folders that `make` writes."""
    from featcal.models.device import torch_device
    from featcal.models.load import load_vision
    from reproduction.suites.linearised import Linearised

    assert model.folder is not None
    folder = model.folder / task if model.method == "expert" else model.folder
    return Linearised(load_vision(context.layout.base(role, pool)), load_vision(folder)).to(
        torch_device(context.suite.device)
    )
