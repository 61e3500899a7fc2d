"""Heads without training: one unit vector per class, from prompts or from pictures.

K classes · p width shared by text and pictures. The head always comes from the base model, whatever
model it is used with.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import BadData, NotFinite
from featcal.evaluation.features import Samples, features_of, unit_length
from featcal.models.pooling import token_mean


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
