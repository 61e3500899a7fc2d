"""The public function `interv_merge`: small interventions on one token inside a merged model."""

from collections.abc import Callable, Iterable, Mapping

import torch

from featcal.rivals.deep_adapters import DeepAdapters
from featcal.rivals.deep_training import deep_adapters
from featcal.rivals.features import Batch, Head
from featcal.rivals.pool import Model
from featcal.rivals.settings import IntervMerge

DEFAULT = IntervMerge()


def interv_merge(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    *,
    head: Head = None,
    rank: int = DEFAULT.rank,
    steps: int = DEFAULT.steps,
    lr: float = DEFAULT.lr,
    batch: int = DEFAULT.batch,
    reshuffle: int | None = DEFAULT.reshuffle,
    seed: int = 42,
    device: str | torch.device | None = None,
    progress: Callable[[str], None] | None = None,
) -> DeepAdapters:
    """Train per task h' = h + Vᵀ (W h + b − V h − c) on the first token of every attention's
    output, before it is added.

    Minimised is the mean absolute difference of the last feature to the expert's, with gradients
    through the merged model, which stays as it is. The first token is the class token of CLIP and
    BERT; through it a mean over tokens is reached too.

    Args:
        merged, experts, batches, head, seed, device, progress: as of `surgery_v2`.
        rank, steps, lr, batch, reshuffle: of the authors' scripts; 500 rounds, each with a new
        shuffle and two batches of 16.

    Returns, Raises: as `surgery_v2`; BadPlan also where no linear of a block writes into the
    residual stream.
    Source: Osial et al., Parameter-Efficient Interventions for Enhanced Model Merging, SDM 2025
    (arXiv 2412.17023);
        MarcinOsial/IntervMerge, src/main_intervmerge.py, src/utils/model_utils.py,
        src/intervmerge_task_artimetic.sh.
    """
    settings = IntervMerge(rank=rank, steps=steps, lr=lr, batch=batch, reshuffle=reshuffle)
    return deep_adapters(settings, merged, experts, batches, head, seed, device, progress)
