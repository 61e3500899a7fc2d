"""Uncertainty-based gradient matching: weight every entry of a task vector by curvature.

Source: Daheim et al., Model Merging by Uncertainty-Based Gradient Matching, ICLR 2024 (arXiv
2310.12808); the authors' code, UKPLab/iclr2024-model-merging,
code/uncertainty_based_gradient_matching.py, with the diagonals of trainer_hessians.py, whose labels
are drawn from the answers. There H₀ comes from pretraining samples; here, where these are not
available, from the base's own answers to the experts' samples. All diagonals are in memory.
"""

from collections.abc import Sequence

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from featcal.merging.methods.adamerging import encoder
from featcal.merging.methods.fisher import squared_gradients
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import Tensors
from featcal.merging.tensors import task_vectors, tensor_sum
from featcal.models.batch import check_tasks


def matched_tensor(
    base: Tensor, experts: Sequence[Tensor], H0: Tensor, curvatures: Sequence[Tensor], scale: float
) -> Tensor:
    """Return θ = θ₀ + α Σ (H₀ + Hᵢ) τᵢ / (H₀ + α Σ Hᵢ), entry by entry, in the base's shape and dtype.

    A large H₀ gives task arithmetic of scale α; H₀ = 0 with α = 1 gives Fisher merging.
    """
    whole = H0 + scale * tensor_sum(curvatures)
    vectors = task_vectors(base, experts)
    weighted = [(H0 + H) * vector for H, vector in zip(curvatures, vectors, strict=True)]
    return (base.double() + scale * tensor_sum(weighted) / whole).to(base.dtype)


@method(
    source="Daheim et al., 2024",
    needs=("batches", "head"),
    note="the base's curvature comes from its answers to the experts' samples, "
    "as its own samples are not available",
)
def gradient_matching(
    job: MergeJob,
    scale: float = 1.0,
    base_weight: NonNegativeFloat = 1.0,
    floor: PositiveFloat = 1e-12,
    seed: NonNegativeInt = 42,
) -> NamedTensors:
    """Yield every tensor by gradient matching: Hᵢ sums expert i's squared gradients over its task's
    samples, H₀ the base's over all samples, divided by the number of tasks.

    scale:       α of every task vector.
    base_weight: factor of the base's curvature.
    floor:       δ, added to every entry. All defaults but the seed are the authors'.
    seed:        of the drawn labels.
    """
    check_tasks(job.experts, job.batches)
    model = encoder(job, "gradient_matching")

    def curvature(source: Tensors, task: str, purpose: str) -> dict[str, Tensor]:
        return squared_gradients(job, model, source, task, seed, purpose)[0]

    own = [curvature(expert, task, "fisher") for task, expert in job.experts.items()]
    origin = [curvature(job.base, task, "base's fisher") for task in job.experts]
    for name in job.names:
        base, experts = job.read(name)
        H0 = base_weight * tensor_sum([each[name] for each in origin]) / len(origin) + floor
        yield name, matched_tensor(base, experts, H0, [each[name] for each in own], scale)
