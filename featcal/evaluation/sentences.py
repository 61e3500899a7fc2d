"""A text as one vector: pooled features of an encoder, as the folder's own modules say where it is
a SentenceTransformer.

n texts · d width of the model · p width of the vector
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from featcal.blocks.capture import model_call
from featcal.errors import BadFile
from featcal.models.save import MODULES
from featcal.storage.jsonfile import read_json

OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Tanh": torch.tanh,
    "Identity": lambda x: x,
    "ReLU": torch.relu,
}
THEIRS = "encode with sentence-transformers itself"


@dataclass(frozen=True)
class Sentences:
    """How texts become vectors.

    modes:  of pooling over tokens: mean, cls, max, lasttoken; several are put side by side.
    behind: what is applied to the pooled vectors, in turn.   prompt: set before every text.
    lower: texts are lowered.
    longest: tokens of a text; None for what the model can.   given: whether the folder tells it, or
    the mean was assumed.
    """

    modes: tuple[str, ...] = ("mean",)
    behind: tuple[Callable[[Tensor], Tensor], ...] = ()
    prompt: str = ""
    lower: bool = False
    longest: int | None = None
    given: bool = False

    @classmethod
    def of_folder(cls, folder: str | Path) -> "Sentences":
        """As modules.json of a folder says; the mean over tokens without one. Raises: BadFile for
        what is not known here.
        """
        folder = Path(folder)
        if not (folder / MODULES).is_file():
            return cls()
        modes: tuple[str, ...] = ()
        behind: list[Callable[[Tensor], Tensor]] = []
        for part in read_json(folder / MODULES)[1:]:
            kind, here = str(part["type"]).rsplit(".", 1)[-1], folder / part["path"]
            if kind == "Pooling":
                modes = pooling_modes(here / "config.json")
            elif kind == "Dense":
                behind.append(dense(here))
            elif kind == "Normalize":
                behind.append(unit)
            else:
                raise BadFile(
                    folder / MODULES, f"its part {part['type']} is not known here", THEIRS
                )
        told = _told(folder / "sentence_bert_config.json")
        prompts = _told(folder / "config_sentence_transformers.json")
        prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name"), "")
        return cls(
            modes or ("mean",),
            tuple(behind),
            prompt,
            bool(told.get("do_lower_case")),
            told.get("max_seq_length"),
            True,
        )

    def prepared(self, text: str) -> str:
        """A text as the tokenizer is given it."""
        return self.prompt + (text.lower() if self.lower else text)

    @torch.no_grad()
    def vectors(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The vectors (n, p) of a batch of tokens padded on the right."""
        out = model(**model_call(model, batch))
        hidden = (
            out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0]
        )  # (n, tokens, d)
        found = pooled(hidden, batch["attention_mask"].to(hidden.device), self.modes)
        for change in self.behind:
            found = change(found)
        return found


def pooled(hidden: Tensor, mask: Tensor, modes: Sequence[str]) -> Tensor:
    """Features (n, tokens, d) over the tokens where mask (n, tokens) is 1, (n, d · number of
    modes).
    """
    wide = mask[..., None].to(hidden.dtype)
    last = mask.sum(1).long() - 1
    ways: Mapping[str, Callable[[], Tensor]] = {
        "cls": lambda: hidden[:, 0],
        "max": lambda: hidden.masked_fill(wide == 0, float("-inf")).amax(1),
        "mean": lambda: (hidden * wide).sum(1) / wide.sum(1).clamp_min(1e-9),
        "lasttoken": lambda: hidden[torch.arange(len(hidden), device=hidden.device), last],
    }
    return torch.cat([ways[mode]() for mode in modes], dim=-1)


def pooling_modes(file: Path) -> tuple[str, ...]:
    """The modes of a Pooling module, in its old or its present form. Raises: BadFile."""
    told = _told(file)
    said = told.get("pooling_mode")
    modes = [said] if isinstance(said, str) else list(said or ())
    modes = modes or [
        OLD_MODES.get(key, key)
        for key, on in told.items()
        if key.startswith("pooling_mode_") and on
    ]
    unknown = [mode for mode in modes if mode not in OLD_MODES.values()]
    if unknown or not modes:
        raise BadFile(
            file,
            f"pools by {unknown[0] if unknown else 'nothing'}, which is not known here",
            THEIRS,
        )
    return tuple(modes)


def dense(folder: Path) -> Callable[[Tensor], Tensor]:
    """A Dense module: a linear layer and what follows it. Raises: BadFile."""
    name = str(
        _told(folder / "config.json").get("activation_function", "torch.nn.modules.activation.Tanh")
    )
    if not (folder / "model.safetensors").is_file() or name.rsplit(".", 1)[-1] not in ACTIVATIONS:
        raise BadFile(
            folder, f"a dense layer with {name}, or without safetensors, is not known here", THEIRS
        )
    state, after = load_file(folder / "model.safetensors"), ACTIVATIONS[name.rsplit(".", 1)[-1]]
    W, b = (
        state["linear.weight"],
        state.get("linear.bias", torch.zeros(len(state["linear.weight"]))),
    )

    def applied(found: Tensor) -> Tensor:
        return after(found @ W.to(found).T + b.to(found))

    return applied


def unit(found: Tensor) -> Tensor:
    return normalize(found, dim=-1)


def _told(file: Path) -> dict[str, Any]:
    """A file's settings; none where it is not there."""
    content = read_json(file) if file.is_file() else {}
    return content if isinstance(content, dict) else {}
