"""The zero-shot answers of an encoder of images or texts, as functions of its tensors; of
adamerging, fisher, gradient_matching.

n samples · h width of the encoder · p width of a feature · K classes of a task.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from transformers import CLIPVisionModel

from featcal.errors import BadSetting
from featcal.merging.head import PROJECTION, SCALE
from featcal.merging.job import Job
from featcal.models.pooling import pooled


def encoder(job: Job, method: str) -> nn.Module:
    """A module like the base that answers by zero-shot heads, on the job's device. Raises:
    BadSetting for another kind.
    """
    model = job.structure().to(job.device).eval()
    if not (isinstance(model, CLIPVisionModel) or encodes_texts(model)):
        kinds = f"is for CLIPVisionModel and encoders of texts, and the base is a {type(model).__name__}"
        raise BadSetting("merge.method", method, kinds)
    return model


def encodes_texts(model: nn.Module) -> bool:
    """Whether a model of transformers reads tokens and has no language head."""
    reads: bool = getattr(model, "main_input_name", None) == "input_ids"
    return reads and getattr(model, "get_output_embeddings", lambda: None)() is None


def answer_logits(
    head: Mapping[str, Tensor],
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    task: str,
    batch: Mapping[str, Any],
) -> Tensor:
    """exp(logit_scale) f Wᵀ (n, K), f the features of unit length of a model with these tensors and
    W the task's heads (K, p).
    """
    weight = next(iter(tensors.values()))
    call = {
        name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in batch.items()
    }
    vectors = pooled(model, functional_call(model, dict(tensors), kwargs=call), call)  # (n, h)
    assert vectors is not None
    projection = head.get(PROJECTION)
    projected = vectors if projection is None else vectors @ projection.to(weight).T
    feature = nn.functional.normalize(projected, dim=-1)  # (n, p)
    return head[SCALE].to(weight).exp() * feature @ head[f"head/{task}"].to(weight).T
