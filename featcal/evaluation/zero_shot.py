"""The feature of a picture or a sentence that is compared with a head: pooled, of pictures
projected, normalised.

n pictures or sentences · h width of the model · p width of a head. Where nothing is projected, p is
h."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from featcal.errors import BadData, NotFinite
from featcal.models.batch import pooled_output, token_mean

# a model, or a function from a batch's keywords to projected features (n, p): a model with adapters
# behind it, say
Encoder = nn.Module | Callable[[Mapping[str, Tensor]], Tensor]


class Samples(Protocol):
    """What evaluation needs of pictures or sentences: labels (n,) in the order of the batches, and
    class names by label.
    """

    @property
    def labels(self) -> Any: ...
    @property
    def classes(self) -> Sequence[str]: ...
    def batches(self, indices: None, size: int) -> Iterable[dict[str, Tensor]]: ...


def unit_features(
    model: Encoder, projection: Tensor | None, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Unit-length features of one batch, (n, p).

    projection: of CLIP, weight of visual_projection, (p, h); always the base's. None of a model
    that projects nothing.
    """
    return unit_length(projected_features(model, projection, inputs))


@torch.no_grad()
def projected_features(
    model: Encoder, projection: Tensor | None, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Features of one batch as they leave the projection, (n, p); inputs: keywords of the model's
    forward.
    """
    if not isinstance(model, nn.Module):
        return model(inputs)
    weight = next(model.parameters())
    placed = {
        name: x.to(weight.device, weight.dtype if x.is_floating_point() else None)
        for name, x in inputs.items()
    }
    vectors = pooled_output(model, model(**placed), placed)  # (n, h)
    assert vectors is not None
    return vectors if projection is None else vectors @ projection.to(vectors).T  # (n, p)


def unit_length(features: Tensor) -> Tensor:
    """Every row divided by its norm."""
    return features / features.norm(dim=-1, keepdim=True)


def features_of(
    model: Encoder, projection: Tensor | None, samples: Samples, batch: int, place: str = "model"
) -> Tensor:
    """Unit-length features of a whole set, (n, p), on the CPU. Raises: NotFinite naming `place`."""
    found = []
    for inputs in samples.batches(None, batch):
        features = unit_features(model, projection, inputs)
        require_finite(features, place)
        found.append(features.cpu())
    return torch.cat(found)


def require_finite(features: Tensor, place: str) -> None:
    """Raise NotFinite unless all features are numbers."""
    if not torch.isfinite(features).all():
        raise NotFinite(place, "its features")


@torch.no_grad()
def zero_shot_head(
    clip: nn.Module,
    tokenizer: Any,
    classes: Sequence[str],
    templates: Sequence[str],
    batch: int = 256,
) -> Tensor:
    """Text features of every class, (K, p): each prompt normalised, averaged over templates,
    normalised again.

    Raises: NotFinite when a text feature is not a number.
    """
    prompts = _prompts(classes, templates)
    found = []
    for start in range(0, len(prompts), batch):
        tokens = tokenizer(
            prompts[start : start + batch], padding=True, truncation=True, return_tensors="pt"
        )
        ids, mask = (
            tokens["input_ids"].to(_device(clip)),
            tokens["attention_mask"].to(_device(clip)),
        )
        found.append(clip.get_text_features(input_ids=ids, attention_mask=mask).pooler_output)  # type: ignore[operator]
    return _head(torch.cat(found), classes)


@torch.no_grad()
def sentence_head(
    model: nn.Module,
    tokenizer: Any,
    classes: Sequence[str],
    templates: Sequence[str],
    batch: int = 64,
) -> Tensor:
    """The same of a sentence encoder, (K, h): its own embeddings of the class names. Raises:
    NotFinite.
    """
    prompts = _prompts(classes, templates)
    found = []
    for start in range(0, len(prompts), batch):
        tokens = tokenizer(
            prompts[start : start + batch], padding=True, truncation=True, return_tensors="pt"
        ).to(_device(model))
        found.append(token_mean(model(**tokens).last_hidden_state, tokens["attention_mask"]))
    return _head(torch.cat(found), classes)


def class_mean_head(
    vision: nn.Module, projection: Tensor, images: Samples, batch: int = 250
) -> Tensor:
    """Mean picture of every class, (K, p): unit features of the base model averaged within a class,
    normalised again.

    For classes that the text tower has no words for. Raises: BadData for a class without pictures.
    """
    labels = torch.as_tensor(images.labels)
    counts = torch.bincount(labels, minlength=len(images.classes))
    if (counts == 0).any():
        empty = images.classes[int((counts == 0).nonzero()[0])]
        raise BadData(
            "class means",
            f"class {empty!r} has no picture in this split",
            "drop the class or add pictures of it",
        )
    features = features_of(vision, projection, images, batch, "base model")
    sums = torch.zeros(len(images.classes), features.shape[1], dtype=torch.float64)
    sums.index_add_(0, labels, features.double())
    return unit_length(sums / counts[:, None]).to(features.dtype)


def words_known(tokenizer: Any, classes: Sequence[str], templates: Sequence[str]) -> bool:
    """Whether the tokenizer has a token for every word of every prompt; byte-pair tokenizers know
    every word.
    """
    # special tokens left out: CLIP's own tokenizer uses its end token as the unknown one
    prompts = _prompts(classes, templates)
    ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    return all(tokenizer.unk_token_id not in row for row in ids)


def _prompts(classes: Sequence[str], templates: Sequence[str]) -> list[str]:
    # not str.format: a class name or template may hold braces of its own
    return [template.replace("{}", name) for name in classes for template in templates]


def _head(prompts: Tensor, classes: Sequence[str]) -> Tensor:
    """Vectors of all prompts, class by class, as unit vectors of the classes, (K, p). Raises:
    NotFinite.
    """
    head = unit_length(unit_length(prompts).reshape(len(classes), -1, prompts.shape[-1]).mean(1))
    bad = (~torch.isfinite(head).all(-1)).nonzero()
    if len(bad):
        raise NotFinite("base model", f"the text feature of class {classes[int(bad[0])]!r}")
    return head.cpu()


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


# the model whose projected features (n, p) are changed, and how, given the task: ("merged",
# adapters.apply)
Adapted = tuple[str, Callable[[str, Tensor], Tensor]]


def evaluate_pool(
    models: Mapping[str, Encoder | Mapping[str, Encoder]],
    sets: Mapping[str, Samples],
    heads: Mapping[str, Tensor],
    projection: Tensor | None,
    batch: int = 250,
    adapted: Mapping[str, Adapted] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Which pictures or sentences each model gets right.

    models: a model for all tasks, or {task: model} for those it exists for (experts).  heads: (K,
    p) per task.
    projection: (p, h), or None.  adapted: by a name of its own, what changes another model's
    features; it runs once for all.
    Returns: {model: {task: (n,) bool}}, in the order of the set; the answer is the largest of head
    · feature (the logit scale changes none).
    Raises: NotFinite naming model and task.
    """
    adapted = adapted or {}
    judged: dict[str, dict[str, Tensor]] = {name: {} for name in (*models, *adapted)}
    for task, samples in sets.items():
        here = _models_of(models, task)
        named = (*here, *(name for name, (behind, _) in adapted.items() if behind in here))
        correct: dict[str, list[Tensor]] = {
            name: [torch.zeros(0, dtype=torch.bool)] for name in named
        }
        labels, seen = torch.as_tensor(samples.labels), 0
        for inputs in samples.batches(None, batch):
            truth = labels[seen : seen + len(next(iter(inputs.values())))]
            seen += len(truth)
            for model_name, model in here.items():
                projected = projected_features(model, projection, inputs)
                changes = {
                    name: change
                    for name, (behind, change) in adapted.items()
                    if behind == model_name
                }
                for name, change in {model_name: None, **changes}.items():
                    features = unit_length(projected if change is None else change(task, projected))
                    require_finite(features, f"model {name}, task {task}")
                    answers = (features @ heads[task].to(features).T).argmax(-1).cpu()  # (n,)
                    correct[name].append(answers == truth)
        for name, parts in correct.items():
            judged[name][task] = torch.cat(parts)
    return judged


def percent(correct: Tensor) -> float:
    """Accuracy in percent, from which samples are right, (n,)."""
    return 100 * int(correct.sum()) / len(correct)


def _models_of(
    models: Mapping[str, Encoder | Mapping[str, Encoder]], task: str
) -> dict[str, Encoder]:
    found: dict[str, Encoder] = {}
    for name, model in models.items():
        if not isinstance(model, Mapping):
            found[name] = model
        elif task in model:
            found[name] = model[task]
    return found
