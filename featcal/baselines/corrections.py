"""Corrections after merging, one per task: Representation Surgery, ProbSurgery, mean shift.

To add one, write a class under `@baseline`, whose fields are its settings; `public` wraps it.
T tasks · n rows · d width of a feature.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn import functional

from featcal.baselines.adapters import Adapters, Baseline, Pair, Weights, baseline
from featcal.baselines.training import Training, public
from featcal.errors import BadBatches
from featcal.settings import require


@baseline("surgery", "Representation Surgery")
class Surgery(Training):
    """Train Representation Surgery for each task of a merged model.

    f' = f − U relu(D f) is trained towards the expert's feature of the same sample by the mean
    absolute difference; f (d,) is the merged model's last feature, D (r, d), U (d, r). The defaults
    are those of FeatCal's paper and FusionBench. The official repository takes features="raw" and
    reshuffle=2: 500 rounds, each a new shuffle and two batches.

    Args:
        merged, experts: modules or checkpoint folders; they are not changed.
        batches: by task, mappings of the model's keyword arguments. Labels are used only to find a
            decoder's tokens.
        head: for CLIP, the weight (p, h) of visual_projection, or a function from pooled output to
            features. Default: the model's own projection. A language model is corrected before
            its language head.
        device: of models given as folders. Default: the CPU.
        seed: of the initial weights and the order of samples.
        progress: called with one line of text every 100 steps.
        rank: r, at most d. Scale it with the model: the paper's 16 of 512 is 1/32.
        steps, lr, batch: optimiser steps per task, Adam's learning rate, samples per step.
        reshuffle: batches taken from one shuffle of the samples before the next. Default: all.
        encode: "once" computes features once; "each_step" for every batch, as published.
        features: "unit", the default, divides by the norm; "raw", before language heads, does not.

    Returns: Adapters: apply(task, features), before_head(model, task), save(folder), losses.
    Raises: BadSetting, UnknownKey; BadBatches; Diverged naming task and step.
    Source: Yang et al., Representation Surgery for Multi-Task Model Merging (ICML 2024).
    """

    features: Literal["unit", "raw"] = "unit"
    rank: PositiveInt = 16

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return each weight's shape; the first is drawn at random, the other zero."""
        limit = f"must be at most {width}, the width of the features"
        require(self.rank <= width, "surgery.rank", self.rank, limit)
        return {"down": (self.rank, width), "up": (width, self.rank)}

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """Return U relu(D f), which is subtracted from the features (…, n, d)."""
        return (features @ weights["down"].mT).relu() @ weights["up"].mT  # (…, n, r) -> (…, n, d)

    def row_losses(self, weights: Weights, merged: Tensor, expert: Tensor, noise: None) -> Tensor:
        """Return the mean absolute difference |f' − f_t| of every row, (T, n)."""
        return (merged - self.correction(weights, merged) - expert).abs().mean(-1)


surgery = public(Surgery)


@baseline("prob_surgery", "ProbSurgery")
class ProbSurgery(Training):
    """Train ProbSurgery, a Gaussian correction, for each task of a merged model.

    f' = f − z with z ~ N(μ, σ²), h = relu(A f), μ = M h and log σ² = V h; f (d,) is the merged
    model's last feature, A (H, d), M and V (d, H). The loss is the distance of f' to the expert's
    feature + kl_weight · KL(N(μ, σ²) ‖ N(0, 1)), the divergence summed over d. At test time z = μ.
    The official repository takes steps=5000 and reshuffle=100, and keeps the best of its 50 rounds
    on test samples, which is not done here.

    Args:
        merged, experts, batches, head, device, seed, progress, steps, lr, batch, reshuffle, encode:
            as for `surgery`.
        features: "raw" or "unit"; noise of σ = 1 would bury features of unit length.
        hidden: H, the width of the hidden layer; the official value.
        kl_weight: weight of the divergence; the official value.
        loss: distance to the expert's feature, averaged over its entries.

    Returns: Adapters, as `surgery`.
    Raises: as `surgery`.
    Source: Wei et al., Representation Surgery in Model Merging with Probabilistic Modeling (ICML
    2025).
    """

    noisy = True
    hidden: PositiveInt = 128
    kl_weight: NonNegativeFloat = 1e-4
    loss: Literal["l1", "mse", "smooth_l1"] = "l1"

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return each weight's shape; the first is initialised at random, the others at zero."""
        up = (width, self.hidden)
        return {"hidden": (self.hidden, width), "mean": up, "log_variance": up}

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """Return μ, which is subtracted from the features (…, n, d)."""
        return (features @ weights["hidden"].mT).relu() @ weights["mean"].mT

    def row_losses(self, weights: Weights, merged: Tensor, expert: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of each row, (T, n); noise (T, n, d) is ε of μ + σ ε, 0 at padding."""
        distance = getattr(functional, f"{self.loss}_loss")
        h = (merged @ weights["hidden"].mT).relu()  # (T, n, H)
        mu, log_variance = h @ weights["mean"].mT, h @ weights["log_variance"].mT  # (T, n, d)
        corrected = merged - mu - (0.5 * log_variance).exp() * noise
        kl = -0.5 * (1 + log_variance - mu**2 - log_variance.exp()).sum(-1)  # (T, n)
        return distance(corrected, expert, reduction="none").mean(-1) + self.kl_weight * kl


prob_surgery = public(ProbSurgery)


@baseline("mean_shift", "Mean shift")
class MeanShift(Baseline):
    """Add one constant vector per task to the merged model's last feature, without any training.

    f' = f + s_t with s_t = (1/n) Σ_i (f_t(x_i) − f(x_i)) over the n rows of task t; f (d,) is the
    merged model's feature and f_t the expert's. The mean of f' over these rows equals the expert's.

    Args:
        merged, experts, batches, head, device: as for `surgery`.
        features: "raw" leaves features as they are; "unit" divides them by their norm first.

    Returns: Adapters, as `surgery`, without losses.
    Raises: BadSetting, UnknownKey; BadBatches.
    Source: none; a control for the adapters. Like them it needs the task's identity at test time.
    """

    features: Literal["unit", "raw"] = "raw"

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return each weight's shape."""
        return {"shift": (1, width)}

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """Return −s (d,), which is subtracted from every row."""
        return -weights["shift"][0]

    def fit(self, pairs: Mapping[str, Pair], seed: int = 42, *_: object) -> Adapters:
        """Return the mean of expert − merged features of each task, summed in float64."""
        shifts = {}
        for task, pair in pairs.items():
            features = (self.prepared(rows) for rows in (pair.expert, pair.merged))  # (n, d)
            expert, merged = (rows.mean(0, keepdim=True, dtype=torch.float64) for rows in features)
            shift = (expert - merged).cpu()  # (1, d)
            if not torch.isfinite(shift).all():
                problem = "gives features that are not finite; look for NaN in samples and models"
                raise BadBatches(task, problem)
            shifts[task] = {"shift": shift if pair.merged.dtype == torch.float64 else shift.float()}
        return Adapters(self, seed, shifts)


mean_shift = public(MeanShift)
