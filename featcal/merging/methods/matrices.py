"""Mergers that treat a matrix as a whole: its singular vectors, or interference with experts.

TSV-Merge makes each expert's leading singular vectors orthogonal to the others'; Iso-C makes all
singular values of the sum equal, and Iso-CTS reserves some directions for each task. WUDI finds
the task vector that interferes least with every expert's own. Sources: Gargiulo et al., Task
Singular Vectors, 2025 (arXiv 2412.00081); Marczak et al., No Task Left Behind, 2025 (arXiv
2502.04959); FusionBench, fusion_bench/method/{task_singular_vector, isotropic_merging}. WUDI:
Cheng et al., 2025; FusionBench's and the official code differ in which matrices they take. The
sources merge token tables too, and keep directions beyond a matrix's numerical rank. LoRA adapters
and position tables have many: here Iso-C's σ̄ is larger for them, except LoRA merged in float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor

from featcal.errors import Diverged
from featcal.merging import tensors
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import VOCABULARY
from featcal.settings import Fraction, PositiveFraction, require


def thin_svd(matrix: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (o, k), S (k,), Vᵀ (k, d) of a matrix (o, d) of numerical rank k."""
    U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
    # singular values up to max(o, d) ε of `size`, else of the largest, are rounding
    rounding = (S[0] if size is None else size) * max(matrix.shape) * torch.finfo(S.dtype).eps
    rank = int((rounding < S).sum())
    return U[:, :rank], S[:rank], Vt[:rank]


def orthogonal(columns: Tensor) -> Tensor:
    """Return P Qᵀ of the SVD P S Qᵀ of (m, k), k ≤ m: the nearest matrix of orthonormal columns."""
    P, _, Qt = torch.linalg.svd(columns, full_matrices=False)
    return P @ Qt


def tsv_matrix(vectors: Sequence[Tensor]) -> Tensor:
    """Return τ = U⊥ Σ V⊥ᵀ, (o, d), or the mean of the τᵢ where r < N leaves no expert a rank.

    U, Σ and V join each τᵢ's ⌊r/N⌋ leading singular triples within its rank, r = min(o, d).
    """
    rank = min(vectors[0].shape) // len(vectors)
    if not rank:
        return tensors.tensor_sum(vectors) / len(vectors)
    parts = [(U[:, :rank], S[:rank], Vt[:rank].T) for U, S, Vt in map(thin_svd, vectors)]
    left, values, right = zip(*parts, strict=True)
    U, V = orthogonal(torch.cat(left, 1)), orthogonal(torch.cat(right, 1))
    return U * torch.cat(values) @ V.T


@method(source="Gargiulo et al., 2025; defaults of FusionBench", scale=1.0)
def tsv_merge(job: MergeJob, exclude: tuple[str, ...] = VOCABULARY) -> NamedTensors:
    """Yield the task vector of every matrix by TSV-Merge, of every other tensor the mean.

    exclude: names, with * for any letters, of matrices that are averaged. Default: token tables.
    """
    yield from tensors.matrix_by_matrix(job, exclude, tsv_matrix)


def iso_c_matrix(vectors: Sequence[Tensor]) -> Tensor:
    """Return τ = σ̄ U Vᵀ, (o, d), of the numerical rank of U S Vᵀ = Σ τᵢ; σ̄ is the mean of S."""
    U, S, Vt = thin_svd(tensors.tensor_sum(vectors))
    return (S.mean() if len(S) else 0.0) * (U @ Vt)


@method(source="Marczak et al., 2025; defaults of FusionBench", scale=1.0)
def iso_c(job: MergeJob, exclude: tuple[str, ...] = VOCABULARY) -> NamedTensors:
    """Yield the task vector of every matrix by Iso-C, of every other tensor the mean.

    The authors try scales up to 3, and FusionBench prints results of 1.5.
    exclude: names, with * for any letters, of matrices that are averaged. Default: token tables.
    """
    yield from tensors.matrix_by_matrix(job, exclude, iso_c_matrix)


def iso_cts_matrix(vectors: Sequence[Tensor], common: float) -> Tensor:
    """Return τ = σ̄ U⊥ V⊥ᵀ: leading directions of Σ τᵢ, then of every τᵢ − U_c U_cᵀ τᵢ.

    The first r − N k of r = min(o, d) directions are common and the others the tasks' own, with
    k = round((r − ⌊common · r⌋)/N) for each of N tasks. σ̄ is the mean of all their singular values.
    """
    r, count = min(vectors[0].shape), len(vectors)
    k = round((r - int(r * common)) / count)
    first = max(0, r - k * count)
    U, S, Vt = thin_svd(tensors.tensor_sum(vectors))
    parts = [(U[:, :first], S[:first], Vt[:first].T)]
    for vector in vectors:
        P, s, Qt = thin_svd(vector - U[:, :first] @ (U[:, :first].T @ vector), vector.norm())
        parts.append((P[:, :k], s[:k], Qt[:k].T))
    left, values, right = zip(*parts, strict=True)
    spectrum = torch.cat(values)
    mean = spectrum.mean() if len(spectrum) else 0.0
    return mean * orthogonal(torch.cat(left, 1)) @ orthogonal(torch.cat(right, 1)).T


@method(source="Marczak et al., 2025; defaults of FusionBench", scale=1.0)
def iso_cts(
    job: MergeJob, exclude: tuple[str, ...] = VOCABULARY, common: Fraction = 0.8
) -> NamedTensors:
    """Yield the task vector of every matrix by Iso-CTS, of every other tensor the mean.

    common:  share of directions that the experts have in common.
    exclude: as for iso_c.
    """
    yield from tensors.matrix_by_matrix(job, exclude, partial(iso_cts_matrix, common=common))


@dataclass(frozen=True)
class Interference:
    """L(τ) = Σ ‖(τ − τᵢ) τᵢᵀ‖² / ‖τᵢ‖² = ⟨τ, τG − 2R⟩ + c, whose sums are as large for any N."""

    G: Tensor  # (d, d)  Σ τᵢᵀτᵢ / ‖τᵢ‖²
    R: Tensor  # (o, d)  Σ τᵢ τᵢᵀτᵢ / ‖τᵢ‖²
    c: float  # Σ ‖τᵢτᵢᵀ‖² / ‖τᵢ‖²
    start: Tensor  # (o, d)  Σ τᵢ

    @classmethod
    def of(cls, vectors: Sequence[Tensor]) -> "Interference":
        """Sum over task vectors (o, d) in float64; one that is zero has no term."""
        o, d = vectors[0].shape
        G, R, c = vectors[0].new_zeros(d, d), vectors[0].new_zeros(o, d), 0.0
        for vector in vectors:
            size = vector.square().sum()
            if size > 0:
                gram = vector.T @ vector / size  # (d, d)
                G, R, c = G + gram, R + vector @ gram, c + float(gram.square().sum() * size)
        return cls(G, R, c, tensors.tensor_sum(vectors))

    def loss(self, tau: Tensor) -> tuple[float, Tensor]:
        """Return L(τ), at least 0 but for NaN, and its gradient (o, d)."""
        product = tau @ self.G  # (o, d)
        inner = float((tau * (product - 2 * self.R)).sum(dtype=torch.float64))
        return max(inner + self.c, 0.0), 2 * (product - self.R)  # max(0.0, NaN) is 0

    def minimum(self, rtol: float | None = None) -> Tensor:
        """Return τ* = R G⁺; eigenvalues of G below rtol times its largest count as 0."""
        return self.R @ torch.linalg.pinv(self.G, hermitian=True, rtol=rtol)


def minimize(problem: Interference, steps: int, rate: float, of: str) -> tuple[Tensor, list[float]]:
    """Minimise by Adam from Σ τᵢ. Returns: τ, or the start if its loss is lower; every loss."""
    tau = problem.start.clone()
    adam = torch.optim.Adam([tau], lr=rate)
    losses = []
    for step in range(steps + 1):
        loss, tau.grad = problem.loss(tau)
        losses.append(loss)
        if not loss < float("inf"):
            look = "overflowing values in the experts"
            raise Diverged(f"wudi: {of}", step, "merge.rate", rate, look)
        if step < steps:
            adam.step()
    # from a start that is the minimum, Adam can only climb
    return (tau if losses[-1] <= losses[0] else problem.start), losses


@method(source="Cheng et al., 2025; defaults of FusionBench")
def wudi(
    job: MergeJob,
    variant: Literal["fusion_bench", "official", "closed_form"] = "fusion_bench",
    steps: NonNegativeInt | None = None,
    rate: PositiveFraction = 1e-5,
    exclude: tuple[str, ...] = VOCABULARY,
    rtol: PositiveFloat | None = None,
) -> NamedTensors:
    """Yield every tensor by WUDI; the record keeps its loss, summed and by matrix.

    variant: "fusion_bench" (the paper's: every matrix, 400 steps; other tensors by their mean),
             "official" (linears of the blocks with q, k, v stacked, 300 steps; everything else
             stays the base's) or "closed_form" (as the first, at the minimum itself).
    steps:   of Adam. Default: the variant's.
    rate:    Adam's learning rate.
    exclude: names, with * for any letters, of matrices that are averaged. Default: token tables.
    rtol:    of the closed form, as for lot.
    """
    official, closed = variant == "official", variant == "closed_form"
    require(not closed or steps is None, "merge.wudi.steps", steps, "is for other variants only")
    require(closed or rtol is None, "merge.wudi.rtol", rtol, "is for closed_form only")
    count = (300 if official else 400) if steps is None else steps
    matrices = [(name,) for name in tensors.matrix_names(job, exclude)]
    groups = tensors.linear_groups(job, exclude) if official else matrices
    transposed = tensors.conv1d_names(job.base)
    ends, curve = dict[str, dict[str, float]](), list[float]()
    for number, names in enumerate(groups, start=1):
        W0, vectors, rows = tensors.stacked_vectors(job, names, transposed)
        problem = Interference.of(vectors)
        if closed:
            tau = problem.minimum(rtol)
            losses = [problem.loss(problem.start)[0], problem.loss(tau)[0]]
        else:  # in float32 unless the model has more precision
            dtype = torch.float64 if job.base[names[0]].dtype == torch.float64 else torch.float32
            G, R, start = (part.to(dtype) for part in (problem.G, problem.R, problem.start))
            tau, losses = minimize(Interference(G, R, problem.c, start), count, rate, names[0])
        curve = [a + b for a, b in zip(curve, losses, strict=True)] if curve else losses
        ends[" + ".join(names)] = {"start": losses[0], "end": min(losses[0], losses[-1])}
        job.progress(f"wudi {number}/{len(groups)}: {names[0]}  {losses[0]:.4g} → {losses[-1]:.4g}")
        for name, part in zip(names, torch.split(W0 + tau.double(), rows), strict=True):
            yield name, (part.T if name in transposed else part).to(job.base[name].dtype)
    job.record.update(loss=curve, matrices=ends)
    for name in sorted(set(job.names) - {name for names in groups for name in names}):
        base, experts = job.read(name)
        yield name, base if official else tensors.average_tensor(base, experts)


@method(source="Cheng et al., 2025, at the minimum of its loss")
def wudi_closed_form(
    job: MergeJob, exclude: tuple[str, ...] = VOCABULARY, rtol: PositiveFloat | None = None
) -> NamedTensors:
    """Yield every tensor by WUDI's closed form; exclude and rtol as for wudi."""
    yield from wudi(job, "closed_form", exclude=exclude, rtol=rtol)
