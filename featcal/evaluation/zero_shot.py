"""Zero-shot accuracy: features of images or sentences compared with a head of class vectors.

n images or sentences · h width of the model · p width of a head (h where nothing is projected).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import BadData, NotFinite
from featcal.models.batch import pooled_output, token_mean

Inputs = Mapping[str, Tensor]  # keyword arguments of a model's forward
# a model, or a function from inputs to projected features (n, p), such as a model with adapters
Encoder = nn.Module | Callable[[Inputs], Tensor]
# images or sentences: labels (n,) in the order of batches(None, size), and names of classes
Samples = Any
# the model whose projected features (n, p) change, and how: ("merged", adapters.apply)
Adapted = tuple[str, Callable[[str, Tensor], Tensor]]


@torch.no_grad()
def projected_features(model: Encoder, projection: Tensor | None, inputs: Inputs) -> Tensor:
    """Return features of one batch after the projection, (n, p).

    projection: for CLIP, the base's visual_projection weight (p, h); None for other models.
    """
    if not isinstance(model, nn.Module):
        return model(inputs)
    weight = next(model.parameters())
    moved = {
        name: x.to(weight.device, weight.dtype if x.is_floating_point() else None)
        for name, x in inputs.items()
    }
    vectors = pooled_output(model, model(**moved), moved)  # (n, h)
    if vectors is None:
        name = type(model).__name__
        raise BadData(name, "its output has no pooled feature", "use a model with a pooler")
    return vectors if projection is None else vectors @ projection.to(vectors).T  # (n, p)


def unit_length(features: Tensor) -> Tensor:
    """Return the rows divided by their norm."""
    return features / features.norm(dim=-1, keepdim=True)


def require_finite(features: Tensor, label: str) -> None:
    """Raise NotFinite unless all features are finite."""
    if not torch.isfinite(features).all():
        raise NotFinite(label, "its features")


@torch.no_grad()
def zero_shot_head(
    model: Any,
    tokenizer: Any,
    classes: Sequence[str],
    templates: Sequence[str],
    batch: int = 256,
) -> Tensor:
    """Return a unit vector for every class, (K, p): each prompt normalised, averaged over
    templates, normalised again.

    A prompt's vector is a CLIP's text feature, or a sentence encoder's mean over tokens.
    Raises: NotFinite for a vector with NaN or infinity.
    """
    prompts, parts = prompts_of(classes, templates), []
    device = next(model.parameters()).device
    for start in range(0, len(prompts), batch):
        texts = prompts[start : start + batch]
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
        inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        if hasattr(model, "get_text_features"):
            parts.append(model.get_text_features(**inputs).pooler_output)
        else:
            parts.append(token_mean(model(**inputs).last_hidden_state, inputs["attention_mask"]))
    vectors = unit_length(torch.cat(parts))
    head = unit_length(vectors.reshape(len(classes), len(templates), -1).mean(1))
    bad = (~torch.isfinite(head).all(-1)).nonzero()
    if len(bad):
        raise NotFinite("base model", f"the text feature of class {classes[int(bad[0])]!r}")
    return head.cpu()


def class_mean_head(
    vision: nn.Module, projection: Tensor | None, images: Samples, batch: int = 250
) -> Tensor:
    """Return the mean image of every class, (K, p): unit features of the base model averaged within
    a class, normalised again.

    For classes whose names the text tower does not know. Raises: BadData for a class without
    images.
    """
    labels = torch.as_tensor(images.labels)
    counts = torch.bincount(labels, minlength=len(images.classes))
    if (counts == 0).any():
        empty = images.classes[int((counts == 0).nonzero()[0])]
        problem = f"class {empty!r} has no image in this split"
        raise BadData("class means", problem, "drop the class or add images of it")
    parts = []
    for inputs in images.batches(None, batch):
        parts.append(unit_length(projected_features(vision, projection, inputs)).cpu())
        require_finite(parts[-1], "base model")
    features = torch.cat(parts)
    sums = torch.zeros(len(images.classes), features.shape[1], dtype=torch.float64)
    sums.index_add_(0, labels, features.double())
    return unit_length(sums / counts[:, None]).to(features.dtype)


def words_known(tokenizer: Any, classes: Sequence[str], templates: Sequence[str]) -> bool:
    """Return True if the tokenizer has tokens for all prompts; byte-pair tokenizers always do."""
    # without special tokens: CLIP's own tokenizer uses its end token as the unknown one
    ids = tokenizer(prompts_of(classes, templates), add_special_tokens=False)["input_ids"]
    return all(tokenizer.unk_token_id not in row for row in ids)


def prompts_of(classes: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Return the prompts of each class in turn."""
    # not str.format: a class name or template may contain braces
    return [template.replace("{}", name) for name in classes for template in templates]


def evaluate_pool(
    models: Mapping[str, Encoder | Mapping[str, Encoder]],
    sets: Mapping[str, Samples],
    heads: Mapping[str, Tensor],
    projection: Tensor | None,
    batch: int = 250,
    adapted: Mapping[str, Adapted] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Return True for each image or sentence a model gets right: {model: {task: (n,)}}.

    The answer is the largest entry of head · feature; the logit scale does not change it.

    models: a model for all tasks, or {task: model} for those it exists for (experts).
    heads: (K, p) by task.   projection: (p, h), or None.
    adapted: by its own name, a change of another model's features; that model runs once for all.
    Raises: NotFinite naming model and task.
    """
    adapted = adapted or {}
    correct: dict[str, dict[str, Tensor]] = {name: {} for name in (*models, *adapted)}
    for task, samples in sets.items():
        encoders = {
            name: model[task] if isinstance(model, Mapping) else model
            for name, model in models.items()
            if not isinstance(model, Mapping) or task in model
        }
        names = (*encoders, *(name for name, (model, _) in adapted.items() if model in encoders))
        parts = {name: [torch.zeros(0, dtype=torch.bool)] for name in names}
        labels, start = torch.as_tensor(samples.labels), 0
        for inputs in samples.batches(None, batch):
            expected = labels[start : start + len(next(iter(inputs.values())))]
            start += len(expected)
            for model_name, encoder in encoders.items():
                projected = projected_features(encoder, projection, inputs)
                variants = {model_name: projected} | {
                    name: change(task, projected)
                    for name, (model, change) in adapted.items()
                    if model == model_name
                }
                for name, features in variants.items():
                    features = unit_length(features)
                    require_finite(features, f"model {name}, task {task}")
                    predicted = (features @ heads[task].to(features).T).argmax(-1).cpu()  # (n,)
                    parts[name].append(predicted == expected)
        for name, own in parts.items():
            correct[name][task] = torch.cat(own)
    return correct


def percent(correct: Tensor) -> float:
    """Return the percentage of right samples, given as (n,) booleans."""
    return 100 * int(correct.sum()) / len(correct)
