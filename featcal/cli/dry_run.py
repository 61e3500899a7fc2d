"""`featcal calibrate --dry-run`: what was drawn and what the run will need, from the same
arguments; nothing is computed.
"""

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
    """The drawn samples of every task, and the needs that `featcal plan` tells for them.

    Raises: BadSetting where the disk has less room than is needed.
    """
    from featcal.cli.plan import as_mapping, planned_needs, show
    from featcal.planning.needs import Workload

    most = max(drawn.samples for drawn in batches.values())
    longest = max(drawn.longest for drawn in batches.values())
    on_gpu = given["device"].type == "cuda"
    load = Workload(
        len(batches),
        most,
        min(size, most),
        on_gpu,
        host_budget=given["host_memory"],
        settings=settings,
    )
    try:
        found = planned_needs(
            model.to(given["dtype"]), load, longest or None, longest > 0, given["plan"]
        )
    # what it takes to run a model without numbers is more than what calibration asks of it
    except NOT_RUN as error:
        if isinstance(error, FeatCalError) and not isinstance(error, BadPlan):
            raise
        reason = " ".join(str(error).splitlines()[0].split())[:200]
        say(
            f"everything was found and replays; what the run needs cannot be told without numbers ({reason})"
        )
        return
    require_space("--out", out, found.disk)
    if as_json:
        drawn = {
            task: {"samples": of.samples, "longest": of.longest} for task, of in batches.items()
        }
        say_json({"drawn": drawn, "needs": as_mapping(found)})
        return
    rows = [
        [task, str(of.samples), *([str(of.longest)] if longest else [])]
        for task, of in batches.items()
    ]
    table(
        "everything was found, models are alike and replay one sample of each task",
        ["task", "samples", *(["longest text, tokens"] if longest else [])],
        rows,
    )
    show(found, load)
    say("nothing was computed and nothing written (--dry-run)")
