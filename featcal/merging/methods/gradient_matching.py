"""Uncertainty-based gradient matching: weight every entry of a task vector by curvature.

Source: Daheim et al., Model Merging by Uncertainty-Based Gradient Matching, ICLR 2024 (arXiv
2310.12808); the authors' code, UKPLab/iclr2024-model-merging,
code/uncertainty_based_gradient_matching.py, with the diagonals of trainer_hessians.py, whose labels
are drawn from the answers. There H₀ comes from samples of the pretraining; here, where these are
not available, from the base's own answers to the experts' samples. The diagonals of base and
experts are in memory.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from featcal.merging.answers import encoder, squared_slopes
from featcal.merging.registry import Job, Named, method
from featcal.merging.tensors import added, task_vectors
from featcal.models.batch import check_tasks


def matched_tensor(
    base: Tensor, experts: Sequence[Tensor], H0: Tensor, curvatures: Sequence[Tensor], scale: float
) -> Tensor:
    """θ = θ₀ + α Σ (H₀ + Hᵢ) τᵢ / (H₀ + α Σ Hᵢ), entry by entry, in the base's shape and dtype.

    H₀ large leaves task arithmetic of scale α, and H₀ = 0 with α = 1 Fisher merging.
    """
    whole = H0 + scale * added(curvatures)
    vectors = task_vectors(base, experts)
    weighted = [(H0 + H) * vector for H, vector in zip(curvatures, vectors, strict=True)]
    return (base.double() + scale * added(weighted) / whole).to(base.dtype)


@method(
    "gradient_matching",
    source="Daheim et al., 2024",
    needs=("batches", "head"),
    note="the base's curvature comes from its answers to the experts' samples, "
    "as its own samples are not available",
)
def gradient_matching(
    job: Job,
    scale: float = 1.0,
    base_weight: Annotated[float, Field(ge=0)] = 1.0,
    floor: PositiveFloat = 1e-12,
    seed: NonNegativeInt = 42,
) -> Iterator[Named]:
    """Yield every tensor by gradient matching; Hᵢ sums squared slopes over the samples of a task,
    H₀ those of the base over all samples.

    scale: α of every task vector.   base_weight: factor of the base's curvature.
    floor: δ, added to every entry.   seed: of the labels. All but the seed are the authors'.
    """
    check_tasks(job.experts, job.batches)
    model = encoder(job, "gradient_matching")
    curvatures = [
        squared_slopes(job, model, expert, task, seed)[0] for task, expert in job.experts.items()
    ]
    origin = [
        squared_slopes(job, model, job.base, task, seed, "base's fisher")[0] for task in job.experts
    ]
    for name in job.names:
        base, experts = job.read(name)
        H0 = base_weight * added([own[name] for own in origin]) + floor
        yield name, matched_tensor(base, experts, H0, [own[name] for own in curvatures], scale)
