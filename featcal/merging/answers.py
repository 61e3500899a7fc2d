"""Zero-shot answers of an encoder as functions of its tensors, for adamerging, fisher and
gradient_matching.

n samples · h width of the encoder · p width of a feature · K classes of a task.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import CLIPVisionModel

from featcal.core.draws import generator
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.errors import BadBatches, BadSetting, MissingPath, MissingTensor, TruncatedFile
from featcal.merging.registry import MergeJob
from featcal.merging.sources import Source
from featcal.models.batch import Batch, check_batch, naming, pooled_output, single_samples

PROJECTION, SCALE = "visual_projection", "logit_scale"


def read_head(head: str | Path | Mapping[str, Tensor], tasks: Iterable[str]) -> dict[str, Tensor]:
    """Read zero-shot heads from a file or a mapping of tensors.

    Returns: logit_scale (), head/<task> (K, p) for every task and, for images, visual_projection
    (p, h).
    Raises: MissingPath, TruncatedFile, MissingTensor; BadSetting for shapes that do not fit.
    """
    if isinstance(head, Mapping):
        tensors, label = head, "head"
    elif not Path(head).is_file():
        way_out = "give a heads.safetensors, or its tensors in a dictionary"
        raise MissingPath(head, "zero-shot heads", way_out)
    else:
        try:
            tensors, label = load_file(head), str(head)
        except SafetensorError as error:
            raise TruncatedFile(head, error) from None
    heads = [f"head/{task}" for task in tasks]
    wanted = [*([PROJECTION] if PROJECTION in tensors else []), SCALE, *heads]
    for name in wanted:
        if name not in tensors:
            raise MissingTensor(label, name, tensors.keys())
    p = tensors[PROJECTION].shape[0] if PROJECTION in tensors else tensors[heads[0]].shape[-1]
    for name in heads:
        shape = tuple(tensors[name].shape)
        if len(shape) != 2 or shape[1] != p or not torch.isfinite(tensors[name]).all():
            expected = f"must be a finite matrix with one row of {p} values per class"
            raise BadSetting(f"merge.head[{name!r}]", shape, expected)
    return {name: tensors[name] for name in wanted}


def encoder(job: MergeJob, method: str) -> nn.Module:
    """Make a module like the base that answers by zero-shot heads, on the job's device.

    Raises: BadSetting for another kind of model.
    """
    model = job.structure().to(job.device).eval()
    reads_text = getattr(model, "main_input_name", None) == "input_ids"
    language_head = getattr(model, "get_output_embeddings", lambda: None)()
    if not (isinstance(model, CLIPVisionModel) or (reads_text and language_head is None)):
        kind = type(model).__name__
        expected = f"requires a CLIPVisionModel or a text encoder, and the base is a {kind}"
        raise BadSetting("merge.method", method, expected)
    return model


def zero_shot_logits(
    head: Mapping[str, Tensor],
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    task: str,
    batch: Batch,
) -> Tensor:
    """Return exp(logit_scale) f Wᵀ, (n, K), with f (n, p) the unit-length features of a model with
    these tensors and W (K, p) the task's head.
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
    features = nn.functional.normalize(projected, dim=-1)  # (n, p)
    return head[SCALE].to(weight).exp() * features @ head[f"head/{task}"].to(weight).T


@torch.enable_grad()  # even under a caller's no_grad
def squared_gradients(
    job: MergeJob, model: nn.Module, source: Source, task: str, seed: int, purpose: str = "fisher"
) -> tuple[dict[str, Tensor], int]:
    """Return Σ (∂ log p(y | x) / ∂θ)² over the n samples of a task by tensor in float64, and n.

    Each label y is drawn from the model's own p(· | x), with `source`'s tensors as θ.
    Raises: BadBatches for a task without samples.
    """
    tensors = {
        name: source.finite_tensor(name).to(job.device).requires_grad_() for name in job.names
    }
    sums = {name: torch.zeros_like(tensor, dtype=SUM_DTYPE) for name, tensor in tensors.items()}
    draws, count = generator(task, purpose, seed), 0
    for number, batch in enumerate(job.batches[task]):
        check_batch(task, number, batch, model)
        for sample in single_samples([batch]):
            with naming(task, number), exact_products():
                logits = zero_shot_logits(job.head, model, tensors, task, sample)  # (1, K)
                log_p = logits.log_softmax(-1)
                label = torch.multinomial(log_p.detach().double().exp().cpu(), 1, generator=draws)
                gradients = torch.autograd.grad(
                    log_p[0, int(label)], list(tensors.values()), allow_unused=True
                )
            for name, gradient in zip(tensors, gradients, strict=True):
                if gradient is not None:
                    _add_squares(sums[name], gradient)
            count += 1
    if not count:
        raise BadBatches(task, "is empty; at least one batch with at least one sample is needed")
    job.progress(f"{purpose}: {task}, {count} samples")
    return sums, count


def _add_squares(total: Tensor, gradient: Tensor) -> None:
    """Add gradient² to the total; in a token table only to the few rows that a sample uses."""
    rows = gradient.any(1).nonzero().flatten() if gradient.dim() == 2 else ()
    if gradient.dim() == 2 and len(rows) < len(gradient) // 2:
        total[rows] += gradient[rows].to(total.dtype).square()
    else:
        wide = gradient.to(total.dtype)
        total.addcmul_(wide, wide)
