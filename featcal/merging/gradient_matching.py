"""Uncertainty-based gradient matching: every entry of a task vector weighted by the curvature of
its expert's answers.

Source: Daheim et al., Model Merging by Uncertainty-Based Gradient Matching, ICLR 2024 (arXiv
2310.12808); the authors' code, UKPLab/iclr2024-model-merging,
code/uncertainty_based_gradient_matching.py, with the diagonals of trainer_hessians.py, whose labels
are drawn from the answers. There H₀ comes from samples of the pretraining; here, where these are
not at hand, from the base's own answers to the experts' samples. The diagonals of base and experts
are in memory.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from featcal.blocks.batches import check_tasks
from featcal.merging.answers import encoder
from featcal.merging.arithmetic import task_vectors
from featcal.merging.fisher import squared_slopes
from featcal.merging.job import Job, Named


def matched_tensor(
    base: Tensor, experts: Sequence[Tensor], H0: Tensor, curvatures: Sequence[Tensor], scale: float
) -> Tensor:
    """θ = θ₀ + α Σ (H₀ + Hᵢ) τᵢ / (H₀ + α Σ Hᵢ), entry by entry. Returns: the base's shape and
    dtype.

    H₀ large leaves task arithmetic of scale α, and H₀ = 0 with α = 1 Fisher merging.
    """
    whole = H0 + scale * sum(curvatures[1:], curvatures[0])
    weighted = [
        (H0 + H) * vector for H, vector in zip(curvatures, task_vectors(base, experts), strict=True)
    ]
    return (base.double() + scale * sum(weighted[1:], weighted[0]) / whole).to(base.dtype)


def gradient_matching(job: Job) -> Iterator[Named]:
    """Every tensor by gradient matching; Hᵢ is the sum of squared slopes over the samples of a
    task, H₀ the base's over all.
    """
    check_tasks(job.experts, job.batches)
    chosen, model = job.settings, encoder(job, "gradient_matching")
    curvatures = [
        squared_slopes(job, model, expert, task)[0] for task, expert in job.experts.items()
    ]
    origin = [
        squared_slopes(job, model, job.base, task, "base's fisher")[0] for task in job.experts
    ]
    for name in job.names:
        base, experts = job.read(name)
        H0 = (
            chosen.base_weight * sum((own[name] for own in origin[1:]), origin[0][name])
            + chosen.floor
        )
        yield (
            name,
            matched_tensor(base, experts, H0, [own[name] for own in curvatures], chosen.scale),
        )
