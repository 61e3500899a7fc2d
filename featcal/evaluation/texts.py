"""A text as one vector: pooled features of an encoder, as the folder's own modules say where it is
a SentenceTransformer.

n texts · d width of the model · p width of the vector"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from featcal.baselines.features import output_embeddings
from featcal.core.precision import wide
from featcal.data.batches import IGNORED, padded
from featcal.data.texts import Labelled, Reader, input_of
from featcal.errors import BadData, BadFile, BadSetting, NotFinite
from featcal.files import read_json
from featcal.models.capture import model_call
from featcal.models.load import evaluation_mode
from featcal.models.save import MODULES

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


WAYS = {
    "head": "the largest score of the model's own classes",
    "likelihood": "the label whose text is likeliest after the text",
    "vectors": "the label whose text has the nearest vector",
}


def way_of(model: nn.Module) -> str:
    """How a model's answers are told, a key of WAYS. Raises: BadSetting for a model with a decoder
    that has no language head.
    """
    if type(model).__name__.endswith("ForSequenceClassification"):
        return "head"
    takes = input_of(model)
    language = output_embeddings(model) is not None
    if language and (takes.continued or takes.kind == "pair"):
        return "likelihood"
    if takes.kind == "pair":
        raise BadSetting(
            "--model",
            type(model).__name__,
            "must have a language head, such as T5ForConditionalGeneration",
        )
    return "vectors"


@dataclass(frozen=True)
class Asked:
    """A model with what reads texts for it, and how many texts it is given at a time."""

    model: nn.Module
    reader: Reader
    batch: int
    sentences: Sentences = Sentences()


def right_answers(asked: Asked, data: Labelled, templates: Sequence[str]) -> Tensor:
    """Which texts a model gets right, (n,) bool.

    templates: texts with {} for a label's name; likelihoods need just one, vectors are averaged
    over all of them.
    Raises: BadData for labels that the model's head does not have; NotFinite.
    """
    way = way_of(asked.model)
    with evaluation_mode([asked.model]):
        if way == "head":
            scores, labels = classified(asked, data), labels_of_head(asked.model, data)
        else:
            ask = likelihoods if way == "likelihood" else similarities
            scores, labels = ask(asked, data, templates), list(data.labels)
    if not torch.isfinite(scores).all():
        raise NotFinite("model", "its answers")
    return scores.argmax(-1) == torch.tensor(labels)


def classified(asked: Asked, data: Labelled) -> Tensor:
    """Scores of the model's own classes, (n, K)."""
    return in_batches(
        asked,
        [asked.reader.tokens(sample).ids for sample in data.samples],
        lambda batch: _logits(asked.model, batch),
    )


def labels_of_head(model: nn.Module, data: Labelled) -> list[int]:
    """The labels by the numbers of the model's head: by its names for them where it has these.
    Raises: BadData.
    """
    config: Any = model.config
    known = {str(name).lower(): int(number) for name, number in (config.label2id or {}).items()}
    if all(name.lower() in known for name in data.classes):
        return [known[data.classes[label].lower()] for label in data.labels]
    if len(data.classes) != config.num_labels or not all(
        name.startswith("label_") or name.isdigit() for name in known
    ):
        problem = f"its labels are {', '.join(data.classes[:5])}, but the model's are {', '.join(list(known)[:5])}"
        raise BadData(
            data.place, problem, "name the classes as the model's config.json does (id2label)"
        )
    return list(data.labels)


def similarities(asked: Asked, data: Labelled, templates: Sequence[str]) -> Tensor:
    """Cosines of every text's vector and every label's, (n, K)."""
    encoder: Any = (
        asked.model.base_model if output_embeddings(asked.model) is not None else asked.model
    )
    prepared, reader = asked.sentences.prepared, asked.reader

    def vectors(texts: Sequence[str]) -> Tensor:
        rows = [reader.plain_ids(prepared(text), asked.sentences.longest) for text in texts]
        return normalize(
            in_batches(asked, rows, lambda batch: asked.sentences.vectors(encoder, batch)), dim=-1
        )

    prompts = [template.replace("{}", name) for name in data.classes for template in templates]
    heads = vectors(prompts).reshape(len(data.classes), len(templates), -1).mean(1)  # (K, p)
    return vectors([sample.text for sample in data.samples]) @ normalize(heads, dim=-1).T


def likelihoods(asked: Asked, data: Labelled, templates: Sequence[str]) -> Tensor:
    """log p(label's text | text), summed over the tokens of the label's text, (n, K)."""
    takes, reader, rows, firsts = asked.reader.takes, asked.reader, [], []
    targets = [templates[0].replace("{}", name) for name in data.classes]
    for sample in data.samples:
        context = reader.plain_ids(sample.text)
        for target in targets:
            if takes.kind == "pair":
                rows.append((context[: reader.length], reader.plain_ids(target)))
                continue
            whole = reader.plain_ids(sample.text + target)
            alike = next(
                (i for i, (a, b) in enumerate(zip(whole, context, strict=False)) if a != b),
                min(len(whole), len(context)),
            )
            cut = max(0, len(whole) - reader.length)
            rows.append((whole[cut:], []))
            firsts.append(max(1, alike - cut))
    scores = []
    for begin in range(0, len(rows), asked.batch):
        part = rows[begin : begin + asked.batch]
        if takes.kind == "pair":
            scores.append(_of_targets(asked.model, part, reader.pad))
        else:
            scores.append(
                _of_ends(
                    asked.model,
                    [ids for ids, _ in part],
                    firsts[begin : begin + asked.batch],
                    reader.pad,
                )
            )
    return torch.cat(scores).reshape(len(data.samples), len(targets))


def in_batches(
    asked: Asked, rows: Sequence[list[int]], run: Callable[[dict[str, Tensor]], Tensor]
) -> Tensor:
    """What a model makes of rows of tokens, in their order; texts of like length share a batch."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    found = (
        torch.cat(
            [
                run(batch)
                for batch in _batches([rows[i] for i in order], asked.batch, asked.reader.pad)
            ]
        )
        .float()
        .cpu()
    )
    return found[torch.tensor(order).argsort()]


def _batches(rows: Sequence[list[int]], size: int, pad: int) -> Iterator[dict[str, Tensor]]:
    for begin in range(0, len(rows), size):
        ids, mask = padded(rows[begin : begin + size], pad)
        yield {"input_ids": ids, "attention_mask": mask}


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**model_call(model, batch)).logits
    return found


def _of_ends(
    model: nn.Module, rows: Sequence[list[int]], firsts: Sequence[int], pad: int
) -> Tensor:
    """log p of every text's tokens from `first` on, of a model that continues texts, (rows,)."""
    ids, mask = padded(list(rows), pad)
    logits = _logits(model, {"input_ids": ids, "attention_mask": mask})[:, :-1]
    each = (
        log_softmax(wide(logits), -1).gather(-1, ids[:, 1:, None].to(logits.device))[..., 0].cpu()
    )  # of token t + 1 at t
    place = torch.arange(1, ids.shape[1])
    counted = (place >= torch.tensor(firsts)[:, None]) & (mask[:, 1:] == 1)
    return (each * counted).sum(1)


def _of_targets(model: nn.Module, rows: Sequence[tuple[list[int], list[int]]], pad: int) -> Tensor:
    """log p of every target, of a model with a decoder, (rows,)."""
    ids, mask = padded([ids for ids, _ in rows], pad)
    targets, counted = padded([target for _, target in rows], pad)
    labels = targets.masked_fill(counted == 0, IGNORED)
    logits = _logits(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    each = (
        log_softmax(wide(logits), -1).gather(-1, targets[..., None].to(logits.device))[..., 0].cpu()
    )
    return (each * counted).sum(1)
