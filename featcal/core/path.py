"""The weight of one linear as a function of λ, from one eigendecomposition of its left side
(Eq. 17).

With Σ ωG = U S Uᵀ and R = Σ ω C Wᵀ − Σ ωG Aᵀ, Eq. 17 for the step away from the anchor (see
`ridge.py`) is

    W(λ)ᵀ = Aᵀ + U (S + λI)⁻¹ Uᵀ R,

so after U, S and UᵀR each further λ costs one product instead of a factorisation, and its error on
held-out samples only O(d²). The ω of Eq. 14 are part of ΣωG, so λ is relative to Gram matrices of
unit norm.
Legend: d inputs · o outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE
from featcal.core.ridge import RidgeSystem
from featcal.errors import SingularGram


@dataclass(frozen=True)
class RidgePath:
    """One linear's weight at every λ."""

    values: Tensor  # (d,)  S, ascending, none below 0
    vectors: Tensor  # (d, d)  U
    step: Tensor  # (d, o)  Uᵀ (Σ ω C Wᵀ − Σ ωG Aᵀ)
    anchor: Tensor  # (o, d)  A

    def weight(self, ridge: float) -> Tensor:
        """Return W(λ), (o, d), the weight that `solve_ridge` gives."""
        step = self.vectors @ (self.step / (self.values + ridge)[:, None])  # (d, o)
        return (self.anchor + step.T).contiguous()

    def gains(self, held_out: RidgeSystem, ridges: Sequence[float]) -> Tensor:
        """Return how much closer to the experts W(λ) is than the anchor on held-out samples.

        With J(W) = Σ ω/n ‖W X_cal − W_exp X_tgt‖², the data term of Eq. 12, the gain is
        J(A) − J(W(λ)). For f = 1/(S + λ), B = `step`, and the held-out samples' left side L and
        right side r of the step in the basis U, it is 2 Σ_j f_j (B rᵀ)_jj − fᵀ (L ∘ B Bᵀ) f.

        Args:
            held_out: system of the held-out samples, left unchanged.
            ridges: n values of λ.

        Returns:
            The gains (n,), float64.
        """
        right = self.vectors.T @ (held_out.right - held_out.left @ self.anchor.T)  # (d, o)  r
        left = self.vectors.T @ held_out.left @ self.vectors  # (d, d)  L
        linear, square = (
            (self.step * right).sum(1),
            left * (self.step @ self.step.T),
        )  # (d,), (d, d)
        lam = torch.tensor(ridges, dtype=SUM_DTYPE, device=self.values.device)[:, None]  # (n, 1)
        f = 1 / (self.values + lam)  # (n, d)
        return 2 * f @ linear - ((f @ square) * f).sum(1)


def ridge_path(system: RidgeSystem, A: Tensor, *, site: str = "linear") -> RidgePath:
    """Return the path of a system.

    Args:
        system: summed over tasks, left unchanged.
        A: anchor (o, d), Eq. 11.
        site: its name in the error.

    Raises:
        SingularGram: the left side holds NaN or infinity, so it has no eigenvalues.
    """
    A = A.to(SUM_DTYPE)
    if not torch.isfinite(system.left).all():
        raise SingularGram(site, 0.0, len(system.left))
    values, vectors = torch.linalg.eigh(system.left)
    step = vectors.T @ (system.right - system.left @ A.T)
    return RidgePath(values.clamp_min(0), vectors, step, A)  # below 0 only by rounding
