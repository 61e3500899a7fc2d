"""The weight of one linear as a function of λ, from one eigendecomposition of its left side (Eq.
17).

With Σ ωG = U S Uᵀ and R = Σ ω C Wᵀ − Σ ωG Aᵀ, Eq. 17 for the step away from the anchor (see
`ridge.py`) is

    W(λ)ᵀ = Aᵀ + U (S + λI)⁻¹ Uᵀ R,

so that after U, S and UᵀR every further λ costs one product instead of a factorisation. The ω of
Eq. 14 are inside of ΣωG: λ is relative to Gram matrices of unit norm here as there. What a λ does
to samples that were held out costs less still, O(d²).
Legend: d inputs · o outputs. Knows nothing of models, files or where the moments come from.
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
    """One linear at every λ."""

    values: Tensor  # (d,)  S, ascending, none below 0
    vectors: Tensor  # (d, d)  U
    step: Tensor  # (d, o)  Uᵀ (Σ ω C Wᵀ − Σ ωG Aᵀ)
    anchor: Tensor  # (o, d)  A

    def weight(self, ridge: float) -> Tensor:
        """W(λ), (o, d); `solve_ridge` gives the same."""
        return (
            self.anchor + (self.vectors @ (self.step / (self.values + ridge)[:, None])).T
        ).contiguous()

    def gains(self, held: RidgeSystem, ridges: Sequence[float]) -> Tensor:
        """How much nearer than the anchor W(λ) comes to the experts on other samples, for every λ.

        With J(W) = Σ ω/n ‖W X_cal − W_exp X_tgt‖², the data term of Eq. 12, the gain is J(A) −
        J(W(λ)). For f = 1/(S + λ),
        B = `step`, and L, r the left side and the step's right side of the samples held out, in the
        basis U, it is 2 Σ_j f_j (B rᵀ)_jj − fᵀ (L ∘ B Bᵀ) f.

        Args:    held: the system of the samples held out, kept as it is; ridges: n values of λ.
        Returns: gains (n,), float64.
        """
        right = self.vectors.T @ (held.right - held.left @ self.anchor.T)  # (d, o)  r
        linear = (self.step * right).sum(1)  # (d,)
        square = (self.vectors.T @ held.left @ self.vectors) * (self.step @ self.step.T)  # (d, d)
        f = 1 / (
            self.values + torch.tensor(ridges, dtype=SUM_DTYPE, device=self.values.device)[:, None]
        )  # (n, d)
        return 2 * f @ linear - ((f @ square) * f).sum(1)


def ridge_path(system: RidgeSystem, A: Tensor, *, site: str = "linear") -> RidgePath:
    """The path of a system, which is kept as it is.

    Args:    system: summed over tasks; A (o, d): anchor, Eq. 11; site: for the error.
    Raises:  SingularGram where the left side has no eigenvalues, because it holds NaN or infinity.
    """
    A = A.to(SUM_DTYPE)
    if not torch.isfinite(system.left).all():
        raise SingularGram(site, 0.0, len(system.left))
    values, vectors = torch.linalg.eigh(system.left)
    return RidgePath(
        values.clamp_min(0), vectors, vectors.T @ (system.right - system.left @ A.T), A
    )  # a Gram matrix has none below 0
