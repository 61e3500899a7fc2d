"""What a model is given, told from its class: pictures, text, or text with what follows from it.

Reads the signature of the class's own forward. Knows nothing of tokenizers and files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from featcal.errors import BadData


@dataclass(frozen=True)
class Input:
    """What one model is given.

    kind:       "pictures": pixel_values. "text": input_ids and attention_mask. "pair": these and a
                target for the decoder.
    continued:  a causal model, which reads a prompt and its completion as one text.
    labels:     of a pair: the target is given as labels; else as decoder_input_ids, which begin
                with `start`.
    vocabulary: how many token ids the model has.    positions: the longest text it has positions
    for; None without a limit.
    """

    kind: Literal["pictures", "text", "pair"]
    continued: bool = False
    labels: bool = True
    vocabulary: int | None = None
    positions: int | None = None
    start: int | None = None


def input_of(model: nn.Module) -> Input:
    """What a model of transformers is given; its numbers may be on meta. One that talks about
    pictures is given text alone.

    Raises: BadData for sound, video or two inputs that both have to be there.
    """
    name, taken = type(model).__name__, set(signature(model.forward).parameters)
    talks = name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    pictures, text = "pixel_values" in taken and not talks, "input_ids" in taken
    if pictures == text or (pictures and _modalities(model) != {"image"}):
        takes = (
            "pictures and text together"
            if pictures and text
            else getattr(model, "main_input_name", "nothing known")
        )
        raise BadData(
            name,
            f"it takes {takes}; what is read from files is pictures for a vision model or text for a language model",
            "give one of its towers as a model of its own, or",
            "call featcal.calibrate from Python, where batches are whatever the model's forward takes",
        )
    if pictures:
        return Input("pictures")
    own: Any = model.config
    config = own.get_text_config() if talks else own
    vocabulary = getattr(config, "vocab_size", None)
    if "decoder_input_ids" in taken:
        start = getattr(config, "decoder_start_token_id", None)
        return Input(
            "pair", False, "labels" in taken, vocabulary, positions_of(model, config), start
        )
    return Input(
        "text",
        talks or is_causal(name, config.model_type),
        True,
        vocabulary,
        positions_of(model, config),
    )


def is_causal(name: str, kind: str) -> bool:
    """Whether a class continues text: it is one of transformers' causal models, or the bare model
    of one that only does that.
    """
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return name in causal.values() or (
        kind in causal and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def positions_of(model: nn.Module, config: Any) -> int | None:
    """How many tokens a model has positions for, by its configuration of text; RoBERTa's table has
    more rows, up to padding's.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    for module in model.modules():
        if (
            isinstance(module, nn.Embedding)
            and module.num_embeddings == limit
            and module.padding_idx is not None
        ):
            return limit - module.padding_idx - 1
    return limit


def _modalities(model: nn.Module) -> set[str]:
    found: str | Iterable[str] = getattr(model, "input_modalities", "image")
    return {found} if isinstance(found, str) else set(found)
