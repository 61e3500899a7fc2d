"""Check that batches fit a model, find their padding, and take features as a head receives them.

n samples · d width of a feature · p width of a projected one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from featcal.errors import BadBatches, BadPlan, nearest
from featcal.models.blocks import model_call, module_inputs, refusals
from featcal.settings import require

Model = nn.Module | str | Path  # a module or a checkpoint folder
Batch = Mapping[str, Any]  # keyword arguments of a model's forward
Batches = Iterable[Batch]  # of one task
TaskBatches = Mapping[str, Batches]  # by task
Head = Tensor | Callable[[Tensor], Tensor] | Mapping[str, Tensor] | None

PROVING = 2  # samples for checking a plan; the result does not depend on their number
IGNORED = -100  # transformers' label of a token without a target
WINDOWS = "attention_window", "block_size"  # to whole ones Longformer, BigBird and others pad texts
# keys of config.json for what some models do to the logits of their language head
AFTER_HEAD = "logits_scaling logit_scale lm_head_multiplier final_logit_softcapping".split()
AFTER_HEAD += "logits_soft_cap output_logit_soft_cap".split()


def check_named(entries: Mapping[str, Any], key: str) -> None:
    """Raise BadSetting unless entries have names, and adapters in memory a base of their own."""
    given = isinstance(entries, Mapping) and len(entries) > 0
    require(given, key, type(entries).__name__, "must be a dictionary with at least one entry")
    valid = all(isinstance(name, str) and name for name in entries)
    require(valid, key, [*entries], "must have names that are texts and not empty")
    adapted = {id(m): m for m in entries.values() if hasattr(m, "get_base_model")}
    bases = {id(model.get_base_model()) for model in adapted.values()}
    expected = "must have a base of its own for every PeftModel; on one, the last adapter counts"
    require(len(bases) == len(adapted), key, [*entries], expected)


def check_tasks(experts: Mapping[str, Any], batches: Mapping[str, Any]) -> None:
    """Raise BadBatches or BadSetting unless both are dictionaries with the same tasks."""
    check_named(experts, "experts")
    check_named(batches, "batches")
    for task in sorted(experts.keys() | batches.keys()):
        if task not in batches:
            raise BadBatches(task, f"is missing for its expert; {nearest(task, batches)}")
        if task not in experts:
            raise BadBatches(task, f"has no expert of that name; {nearest(task, experts)}")
        of_task = batches[task]
        if isinstance(of_task, Mapping | Tensor | str) or not isinstance(of_task, Iterable):
            wanted = "a list of mappings such as [{'pixel_values': tensor}, ...]"
            raise BadBatches(task, f"is a {type(of_task).__name__}; expected {wanted}")


def check_batch(task: str, number: int, batch: object, model: nn.Module) -> None:
    """Raise BadBatches unless a batch is a mapping with the model's input and finite values."""
    if not isinstance(batch, Mapping):
        wanted = "a mapping such as {'pixel_values': tensor}"
        raise BadBatches(task, f"batch {number} is a {type(batch).__name__}; expected {wanted}")
    main = getattr(model, "main_input_name", None)  # only transformers' models have it
    if main is not None and not isinstance(batch.get(main), Tensor):
        keys = ", ".join(f"{key}, a {type(x).__name__}" for key, x in batch.items()) or "nothing"
        raise BadBatches(task, f"batch {number} has no tensor {main!r} (it holds: {keys})")
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.numel() == 0:
            raise BadBatches(task, f"{name!r} of batch {number} is empty; remove the batch")
        if isinstance(value, Tensor) and not torch.isfinite(value).all():
            problem = f"{name!r} of batch {number} holds NaN or Inf; repair or remove the sample"
            raise BadBatches(task, problem)
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor):
        return
    if ids.is_floating_point() or ids.dim() < 2:
        problem = f"'input_ids' of batch {number} are {ids.dtype} of shape {tuple(ids.shape)}"
        raise BadBatches(task, f"{problem}; expected integers, (samples, tokens)")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int):  # some models have further rows, or another table for texts
        tables = (part for part in model.modules() if isinstance(part, nn.Embedding))
        size = max([size, *(table.num_embeddings for table in tables)])
        if ids.min() < 0 or ids.max() >= size:
            problem = f"'input_ids' of batch {number} go from {ids.min()} to {ids.max()}"
            raise BadBatches(task, f"{problem}, but the model has {size} tokens; use its tokenizer")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != ids.shape[:2]:
        problem = f"'attention_mask' of batch {number} is {tuple(mask.shape)}"
        raise BadBatches(task, f"{problem}, but 'input_ids' {tuple(ids.shape)}")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not (used := mask.bool().any(1)).all():
        problem = f"sample {int(used.int().argmin())} of batch {number} is all padding; remove it"
        raise BadBatches(task, problem)


def lasting(batches: Batches) -> Batches:
    """Return batches that stay as they are: an iterator may fill the same tensors again."""
    if isinstance(batches, Sequence):
        return batches
    copies = (dict(batch) if isinstance(batch, Mapping) else batch for batch in batches)
    return (tree_map_only(Tensor, Tensor.clone, batch) for batch in copies)


def single_samples(batches: Batches) -> list[dict[str, Any]]:
    """Return every sample of the batches as a batch of one."""
    numbered = ((batch, i) for batch in lasting(batches) for i in range(sample_count(batch)))
    return [some_samples(batch, slice(i, i + 1)) for batch, i in numbered]


def sample_count(batch: Batch) -> int:
    """Return the number of samples of a batch: the rows of its main input, if it has one."""
    items = batch.items() if isinstance(batch, Mapping) else ()
    main_first = sorted(items, key=lambda item: not f"{item[0]}".startswith(("input", "pixel")))
    return next((len(x) for _, x in main_first if isinstance(x, Tensor) and x.dim()), 0)


def some_samples(batch: Batch, rows: slice | Tensor) -> dict[str, Any]:
    """Return some samples of a batch; values without one row per sample stay as they are."""
    n = sample_count(batch)
    some = {k: x[rows] for k, x in batch.items() if isinstance(x, Tensor) and x.shape[:1] == (n,)}
    return {**batch, **some}


def naming(task: str, number: int) -> AbstractContextManager[None]:
    """Raise a model's errors about a batch (unknown keyword, wrong image size) as BadBatches."""
    problem = f"batch {number} is refused by the model"
    return refusals(lambda text: BadBatches(task, f"{problem} ({text})"))


def padding_mask(
    batch: Batch, hidden: Tensor, keyword: str = "attention_mask", model: nn.Module | None = None
) -> Tensor | None:
    """Return the padding mask (batch, tokens) of `hidden` (batch, tokens, d), None without padding.

    "labels" masks tokens without a label; a decoder's missing mask comes from its padding tokens.
    """
    mask, labels = batch.get(keyword), batch.get("labels")
    config = getattr(model, "config", None)
    pad = getattr(config, "pad_token_id", None)
    pad = IGNORED if pad is None else pad
    if isinstance(mask, Tensor) and keyword == "labels":
        mask = mask != IGNORED
    elif mask is None and keyword == "decoder_attention_mask":
        if isinstance(inputs := batch.get("decoder_input_ids"), Tensor):
            mask = inputs != pad
            mask[:, 0] = True  # many decoders start with the padding token
        elif isinstance(labels, Tensor) and labels.shape == hidden.shape[:2]:
            mask = (labels != IGNORED) & (labels != pad)
        elif "decoder_inputs_embeds" not in batch:  # a classifier's decoder reads the text again
            mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4:  # of pairs; floats are added to scores
        mask = (mask == 0 if mask.is_floating_point() else mask != 0).flatten(1, 2).any(1)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        count, length = hidden.shape[1], mask.shape[1]
        page = "pixel_values" in batch and "bbox" in batch  # patches follow its text
        if count > length and (page or any(hasattr(config, key) for key in WINDOWS)):
            mask = functional.pad(mask, (0, count - length), value=int(page))
        of_frames = getattr(model, "_get_feature_vector_attention_mask", None)  # of sounds
        if of_frames and model._get_feat_extract_output_lengths(torch.tensor(length)) == count:
            mask = of_frames(count, mask)
    fits = isinstance(mask, Tensor) and mask.shape == hidden.shape[:2]
    return mask.to(hidden.device) if fits else None


def pooled_output(model: nn.Module, output: Any, batch: Batch) -> Tensor | None:
    """Return the pooled features (n, h) of a model's output, or None if nothing is pooled.

    Texts have the mean over tokens, as in Sentence-BERT (Reimers and Gurevych, 2019); all count
    without an attention mask. Text towers such as CLIP's have a pooler that was trained.
    """
    if (embedded := getattr(output, "image_embeds", None)) is not None:
        return embedded
    hidden = getattr(output, "last_hidden_state", None)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(ids := batch.get("input_ids"), Tensor) and not f"{kind}".endswith("_text_model"):
        batch = {"attention_mask": torch.ones_like(ids)} | dict(batch)
    mask = padding_mask(batch, hidden) if isinstance(hidden, Tensor) else None
    if mask is not None and kind != "clip_text_model":
        return token_mean(hidden, mask)
    return getattr(output, "pooler_output", None)


def is_encoder(model: nn.Module) -> bool:
    """Return whether a transformers model gives features of images or texts: it has no head."""
    encodes = getattr(model, "main_input_name", None) in ("pixel_values", "input_ids")
    headed = re.search(r"For[A-Z]", type(model).__name__)  # such as ViTForImageClassification
    return encodes and not headed and output_embeddings(model) is None


def token_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (n, h) of hidden (n, tokens, h) over tokens where mask (n, tokens) is 1."""
    weights = mask.to(hidden)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1)


def unit_length(features: Tensor) -> Tensor:
    """Return the rows divided by their norm."""
    return features / torch.linalg.vector_norm(features, dim=-1, keepdim=True)


def rows_before_head(model: nn.Module, batch: Batch, head: Head) -> tuple[Tensor, Tensor]:
    """Return the rows (rows, d) of one batch without padding, and each sample's count (n,)."""
    language_head = output_embeddings(model)
    if language_head is None:
        features = projected(model, batch, head)
        return features, torch.ones(len(features), dtype=torch.long)
    expected = "must be left out for a model with a language head of its own"
    require(head is None or head is language_head, "head", type(head).__name__, expected)
    name = next(name for name, part in model.named_modules() if part is language_head)
    with module_inputs(model, [name], enough=lambda: True) as inputs:
        model(**model_call(model, batch))
    hidden = inputs[name]  # (n, tokens, d)
    config: Any = model.config
    keyword = "decoder_attention_mask" if config.is_encoder_decoder else "attention_mask"
    mask = padding_mask(batch, hidden, keyword, model)
    used = hidden.new_ones(hidden.shape[:2]).bool() if mask is None else mask.bool()
    return hidden[used], used.sum(1).cpu()


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the language head of a transformers model, if it has one."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


def changes_logits(model: Any) -> bool:
    """Return whether a model scales, caps or shifts the logits of its language head."""
    configs = model.config, model.config.get_text_config(decoder=True)
    values = [getattr(config, key, None) for config in configs for key in AFTER_HEAD]
    shift = getattr(model, "final_logits_bias", torch.zeros(1))
    return any(value not in (None, 0, 1) for value in values) or bool(shift.any())


def projected(model: nn.Module, batch: Batch, head: Head) -> Tensor:
    """Return features (n, p) of one batch by a model without a language head."""
    output: Any = model(**model_call(model, batch))
    vectors = output if isinstance(output, Tensor) else pooled_output(model, output, batch)
    if vectors is None:
        problem = "has neither image_embeds nor pooler_output"
        raise BadPlan(type(output).__name__, problem, "give a model that pools its features")
    weight = head.get("visual_projection") if isinstance(head, Mapping) else head
    if head is None:
        return vectors
    if callable(weight):
        return weight(vectors)
    expected = "must be the weight (p, h) of visual_projection, or a function"
    require(isinstance(weight, Tensor), "head", type(head).__name__, expected)
    fits = weight.dim() == 2 and weight.shape[1] == vectors.shape[1]
    expected = f"must have shape (p, {vectors.shape[1]}), as the weight of visual_projection"
    require(fits, "head", tuple(weight.shape), expected)
    return vectors @ weight.to(vectors).T
