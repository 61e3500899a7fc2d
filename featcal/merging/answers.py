"""Zero-shot answers of an encoder as functions of its tensors, for adamerging, fisher and
gradient_matching.

n samples · h width of the encoder · p width of a feature · K classes of a task.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import CLIPVisionModel

from featcal.core.draws import generator
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.errors import BadBatches, BadSetting, MissingPath, MissingTensor, TruncatedFile
from featcal.merging.registry import Job
from featcal.merging.sources import Source
from featcal.models.batch import check_batch, naming, pooled_output, single_samples

PROJECTION, SCALE = "visual_projection", "logit_scale"


def read_head(head: Any, tasks: Iterable[str]) -> dict[str, Tensor]:
    """Read zero-shot heads from a file or a mapping of tensors.

    Returns: logit_scale (), head/<task> (K, p) for every task and, for images, visual_projection
    (p, h).
    Raises: MissingPath, TruncatedFile, MissingTensor; BadSetting for shapes that do not fit.
    """
    tensors: Mapping[str, Tensor] = head if isinstance(head, Mapping) else _read(Path(head))
    place = "head" if isinstance(head, Mapping) else head
    heads = [f"head/{task}" for task in tasks]
    wanted = [*([PROJECTION] if PROJECTION in tensors else []), SCALE, *heads]
    for name in wanted:
        if name not in tensors:
            raise MissingTensor(place, name, tensors.keys())
    p = tensors[PROJECTION].shape[0] if PROJECTION in tensors else tensors[heads[0]].shape[-1]
    for name in heads:
        shape = tuple(tensors[name].shape)
        if len(shape) != 2 or shape[1] != p or not torch.isfinite(tensors[name]).all():
            expected = f"must be a finite matrix with one row of {p} numbers per class"
            raise BadSetting(f"merge.head[{name!r}]", shape, expected)
    return {name: tensors[name] for name in wanted}


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        way_out = "give heads.safetensors of a prepared role, or its tensors in a dictionary"
        raise MissingPath(file, "zero-shot heads", way_out)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise TruncatedFile(file, error) from None


def encoder(job: Job, method: str) -> nn.Module:
    """Make a module like the base that answers by zero-shot heads, on the job's device.

    Raises: BadSetting for another kind of model.
    """
    model = job.structure().to(job.device).eval()
    if not (isinstance(model, CLIPVisionModel) or encodes_texts(model)):
        kind = type(model).__name__
        expected = f"is for CLIPVisionModel and encoders of texts, and the base is a {kind}"
        raise BadSetting("merge.method", method, expected)
    return model


def encodes_texts(model: nn.Module) -> bool:
    """Return whether a model of transformers reads tokens and has no language head."""
    reads: bool = getattr(model, "main_input_name", None) == "input_ids"
    return reads and getattr(model, "get_output_embeddings", lambda: None)() is None


def answer_logits(
    head: Mapping[str, Tensor],
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    task: str,
    batch: Mapping[str, Any],
) -> Tensor:
    """exp(logit_scale) f Wᵀ, (n, K), with f (n, p) the unit-length features of a model with these
    tensors and W (K, p) the task's head.
    """
    weight = next(iter(tensors.values()))
    call = {
        name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in batch.items()
    }
    vectors = pooled_output(
        model, functional_call(model, dict(tensors), kwargs=call), call
    )  # (n, h)
    assert vectors is not None
    projection = head.get(PROJECTION)
    projected = vectors if projection is None else vectors @ projection.to(weight).T
    feature = nn.functional.normalize(projected, dim=-1)  # (n, p)
    return head[SCALE].to(weight).exp() * feature @ head[f"head/{task}"].to(weight).T


@torch.enable_grad()  # even under a caller's no_grad
def squared_slopes(
    job: Job, model: nn.Module, answering: Source, task: str, seed: int, purpose: str = "fisher"
) -> tuple[dict[str, Tensor], int]:
    """Σ (∂ log p(y | x) / ∂θ)² over the n samples of a task, with y drawn from the model's own
    p(· | x).

    Returns: sums by tensor in float64, and n. Raises: BadBatches for a task without samples.
    """
    tensors = {
        name: answering.finite_tensor(name).to(job.device).requires_grad_() for name in job.names
    }
    found = {name: torch.zeros_like(tensor, dtype=SUM_DTYPE) for name, tensor in tensors.items()}
    draws, count = generator(task, purpose, seed), 0
    for number, batch in enumerate(job.batches[task]):
        check_batch(task, number, batch, model)
        for one in single_samples([batch]):
            with naming(task, number), exact_products():
                answer = answer_logits(job.head, model, tensors, task, one).log_softmax(
                    -1
                )  # (1, K)
                label = torch.multinomial(answer.detach().double().exp().cpu(), 1, generator=draws)
                slopes = torch.autograd.grad(
                    answer[0, int(label)], list(tensors.values()), allow_unused=True
                )
            for name, slope in zip(tensors, slopes, strict=True):
                if slope is not None:
                    _add_squares(found[name], slope)
            count += 1
    if not count:
        raise BadBatches(task, "is empty; at least one batch with at least one sample is needed")
    job.progress(f"{purpose}: {task}, {count} samples")
    return found, count


def _add_squares(total: Tensor, slope: Tensor) -> None:
    """total += slope²; in a table of which a sample uses few rows, in those rows alone."""
    rows = slope.any(1).nonzero().flatten() if slope.dim() == 2 else ()
    if slope.dim() == 2 and len(rows) < len(slope) // 2:
        total[rows] += slope[rows].to(total.dtype).square()
    else:
        wide = slope.to(total.dtype)
        total.addcmul_(wide, wide)
