"""The processes that torchrun started, joined for one `with`: who they are, which GPU is whose, and
how they reach each other.

Knows nothing of what they compute. Loads torch only where there are several.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from featcal.errors import BadSetting, RankLostError, RemoteRankError

if TYPE_CHECKING:
    import torch

    from featcal.calibration.ranks import SeveralRanks

TRANSFER = timedelta(
    seconds=60
)  # one tensor for which all ranks are there; also their first finding each other
MEETING = timedelta(
    days=1
)  # a slow rank is waited for; of a dead one the connection breaks, which gloo notices at once
TOLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # by torchrun, to each process


@contextmanager
def started() -> Iterator[None]:
    """Inside, `ranks.current()` is this process among those that torchrun started; what goes wrong
    in one ends all.

    Raises: BadSetting where the environment tells of several processes, but not how they find each
    other; RankLostError where one of them does not come or is gone; RemoteRankError where another
    one ends with an error, which it has told by then.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    for name in TOLD:
        if name not in os.environ:
            raise BadSetting(
                name,
                None,
                "must be set beside WORLD_SIZE; start several processes with torchrun, or unset that",
            )
    import torch.distributed as dist

    from featcal.calibration.ranks import started_ranks

    ranks = joined()
    token = started_ranks.set(ranks)
    try:
        with ranks.fail_together():
            yield
    except RemoteRankError:
        with suppress(
            RankLostError
            # until the other one is gone, after its message: torchrun ends all when the first is gone
        ):
            ranks.together()
        raise
    finally:
        started_ranks.reset(token)
    # not behind an error: to the others a broken connection is the end of this process
    dist.destroy_process_group()


def joined() -> "SeveralRanks":
    """All processes' common group for tensors in the memory of the CPU, and one to meet in."""
    import torch.distributed as dist

    from featcal.calibration.ranks import SeveralRanks

    try:
        dist.init_process_group("gloo", timeout=TRANSFER)
        return SeveralRanks(object_group=dist.new_group(backend="gloo", timeout=MEETING))
    except RuntimeError as error:  # of which torch's errors of connections are
        raise RankLostError(error) from error


def own_device(device: "torch.device") -> "torch.device":
    """The device of this process: of several on GPUs each has its own, and their tensors move
    through NCCL from now on.

    Raises: BadSetting where there are more processes than GPUs.
    """
    if device.type != "cuda" or os.environ.get("WORLD_SIZE", "1") == "1":
        return device
    import torch
    import torch.distributed as dist

    from featcal.calibration.ranks import SeveralRanks, current

    ranks, local, count = current(), int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    assert isinstance(ranks, SeveralRanks)
    if local >= count:
        way_out = f"must be at most {count}, the number of GPUs here; or add --device cpu"
        raise BadSetting(
            "--nproc-per-node", int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), way_out
        )
    ranks.together()  # hears of a process without a GPU before it would be waited for
    torch.cuda.set_device(local)
    ranks.tensor_group = dist.new_group(backend="nccl", timeout=TRANSFER)
    return torch.device("cuda", local)
