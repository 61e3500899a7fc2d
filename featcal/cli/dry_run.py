"""`featcal calibrate --dry-run`: the samples drawn and an estimate of the run; computes nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli.arguments import require_space
from featcal.cli.solved import NOT_RUN
from featcal.cli.terminal import say, say_json, table
from featcal.errors import BadPlan, FeatCalError

if TYPE_CHECKING:
    from torch import nn

    from featcal.data.batches import Batches
    from featcal.settings import Calibration


def show_run(
    model: "nn.Module",
    batches: Mapping[str, "Batches"],
    size: int,
    given: Mapping[str, Any],
    settings: "Calibration",
    as_json: bool,
    out: Path,
) -> None:
    """Print the drawn samples of every task, and what `featcal plan` estimates for them.

    Raises: BadSetting where the disk has less room than is needed.
    """
    from featcal.calibration.estimate import Job
    from featcal.cli.plan import as_mapping, estimated, show

    most = max(drawn.samples for drawn in batches.values())
    longest = max(drawn.longest for drawn in batches.values())
    job = Job(
        len(batches),
        most,
        min(size, most),
        settings,
        on_gpu=given["device"].type == "cuda",
        host_memory=given["host_memory"],
    )
    model, tokens = model.to(given["dtype"]), longest or None
    try:
        needs = estimated(model, job, tokens, longest > 0, given["plan"])
    # a model that cannot run without weights can be calibrated all the same
    except NOT_RUN as error:
        if isinstance(error, FeatCalError) and not isinstance(error, BadPlan):
            raise
        reason = " ".join(str(error).splitlines()[0].split())[:200]
        say(f"all files were found and the model replays; it cannot be estimated ({reason})")
        return
    require_space("--out", out, sum(needs["disk"].values()))
    if as_json:
        drawn = {
            task: {"samples": of.samples, "longest": of.longest} for task, of in batches.items()
        }
        say_json({"drawn": drawn, "needs": as_mapping(needs)})
        return
    rows = [
        [task, str(of.samples), *([str(of.longest)] if longest else [])]
        for task, of in batches.items()
    ]
    table(
        "all files were found, models are alike and replay one sample of each task",
        ["task", "samples", *(["longest text, tokens"] if longest else [])],
        rows,
    )
    show(needs, job)
    say("nothing was computed and nothing written (--dry-run)")
