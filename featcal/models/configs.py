"""Compare the configurations of models that are to have one architecture.

Two models with the same tensors can still compute differently: another rotary base, number of heads
or activation leaves every shape as it is.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from featcal.errors import FeatCalError, TensorsDiffer

# keys that change no feature: training, labels and heads, special tokens, and what shapes show
HARMLESS = re.compile(
    r"_.*|.*(drop|initiali[sz]er|init_|jitter|_loss|loss_|label|classifier|summary_).*"
    r"|.*(_token_ids?|_token_index|_cache|vocab_size|_range|_std|_flash_attn)"
    r"|max_position_embeddings|n_positions|image_size|projection_dim|encoder_stride|layerscale_value"
    r"|tie_word_embeddings|pretraining_tp|gradient_checkpointing|output_.*|mask_.*|use_mask_token"
    r"|stage_names|out_features|out_indices|reshape_hidden_states|apply_layernorm|reduction"
    r"|slow_but_exact|sparse_pred.*|(hidden|intermediate|patch)_size|num_(hidden_|decoder_)?layers"
    r"|d_model|d_ff|n_embd|n_layer|ffn_dim|num_channels"
)
DERIVED = ("head_dim", "n_inner")  # where they are None, shapes and other keys give them

# names of one activation
SAME = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}


def require_one_family(kinds: Mapping[str, type]) -> None:
    """Raise TensorsDiffer unless the classes, by label, have their configs in one module.

    Same tensor names and shapes do not make one family: RoBERTa's are BERT's with another meaning.
    """
    modules = {
        n: getattr(getattr(k, "config_class", None), "__module__", None) for n, k in kinds.items()
    }
    here, *others = kinds
    for there in others:
        if modules[there] != modules[here]:
            way_out = (
                "all models must be of one family; if one computes as the other does, write its "
                "class into config.json"
            )
            this, that = kinds[here].__name__, kinds[there].__name__
            raise TensorsDiffer("the architecture", here, this, there, that, way_out)


def require_same_configs(configs: Mapping[str, Any]) -> None:
    """Raise FeatCalError, naming keys, values and models, unless all models compute alike.

    configs: by label in errors, the first one's is the reference; None for a model without.
    """
    (here, reference), *others = configs.items()
    for there, config in others:
        if not all(isinstance(each, PretrainedConfig) for each in (reference, config)):
            continue
        pairs = [(reference, config)]  # as given, and a tower of the one with the whole other
        pairs += [(getattr(reference, name, None), config) for name in reference.sub_configs]
        pairs += [(reference, getattr(config, name, None)) for name in config.sub_configs]
        pair = next(((this, that) for this, that in pairs if type(this) is type(that)), None)
        if pair is None:
            continue
        ours, theirs = (dict(_computing(each)) for each in pair)
        values = {key: (ours.get(key), theirs.get(key)) for key in {**ours, **theirs}}
        differ = "; ".join(
            f"{key}: {that!r} and {this!r}"
            for key, (this, that) in values.items()
            if this != that and not (key.split(".")[-1] in DERIVED and None in (this, that))
        )
        if differ:
            raise FeatCalError(
                f"{there} and {here}",
                f"their config.json make models that compute differently ({differ})",
                "give experts that were fine-tuned from this base, or,",
                "where a config.json is wrong, correct it there",
            )


def _computing(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a class that its blocks compute with, those of towers by path."""
    known = type(config)().to_dict().keys() - PretrainedConfig().to_dict().keys()
    for key, value in config.to_dict().items():
        tower = getattr(config, key, None)
        if isinstance(tower, PretrainedConfig):
            yield from _computing(tower, f"{prefix}{key}.")
        elif key in known and HARMLESS.fullmatch(key) is None:
            if isinstance(value, Mapping):
                yield from ((f"{prefix}{key}.{name}", each) for name, each in value.items())
            else:
                value = list(value) if isinstance(value, tuple) else value
                yield prefix + key, SAME.get(value, value) if isinstance(value, str) else value
