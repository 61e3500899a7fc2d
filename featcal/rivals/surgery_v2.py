"""The public function `surgery_v2`: Representation Surgery at every block of a merged model."""

from collections.abc import Callable, Iterable, Mapping

import torch

from featcal.rivals.deep_adapters import DeepAdapters
from featcal.rivals.deep_training import deep_adapters
from featcal.rivals.features import Batch, Head
from featcal.rivals.pool import Model
from featcal.rivals.settings import SurgeryV2

DEFAULT = SurgeryV2()


def surgery_v2(
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
    """Train per task z' = z − U relu(D z) on every token behind every block, and on the last
    feature, all of them together.

    Minimised is Σ_l |mean over tokens of z'_l − that of the expert|₁ + |f' − f_t|₁, each a mean
    over samples and entries, with gradients through the merged model, which stays as it is.

    Args:
        merged, experts, batches, head, seed, device, progress: as of `surgery`; models are encoders
        of images or texts.
        rank, steps, lr, batch, reshuffle: the authors'; 500 rounds, each with a new shuffle and two
        batches of 16.

    Returns: DeepAdapters: inside(model, task) for the forward, apply(task, features) behind it,
    save(folder), losses.
    Raises: BadPlan for other models; BadSetting, UnknownKey; BadBatches; Diverged naming task and
    step.
    Source: Yang et al., SurgeryV2, 2024 (arXiv 2410.14389); EnnengYang/SurgeryV2,
    src/merging_model.py and main_tv_surgery_v2.py.
    """
    settings = SurgeryV2(rank=rank, steps=steps, lr=lr, batch=batch, reshuffle=reshuffle)
    return deep_adapters(settings, merged, experts, batches, head, seed, device, progress)
