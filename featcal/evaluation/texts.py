"""Accuracy on labelled texts: by a model's class head, by likelihoods, or by sentence vectors.

n texts · K labels · d width of the model · p width of a vector
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from featcal.core.precision import wide
from featcal.data.batches import IGNORED, padded
from featcal.data.texts import Labelled, Reader, Sample, input_of
from featcal.errors import BadData, BadFile, BadSetting, NotFinite
from featcal.models.blocks import model_call
from featcal.models.features import output_embeddings
from featcal.models.load import evaluation_mode
from featcal.models.sentences import MODULES, Texts, modules_of, optional_json

MODES = ("mean", "cls", "max", "lasttoken", "mean_sqrt_len", "weightedmean")
ACTIVATIONS: Any = {"Tanh": torch.tanh, "Identity": nn.Identity(), "ReLU": torch.relu}
USE_LIBRARY = "encode with sentence-transformers itself"


@dataclass(frozen=True)
class Sentences:
    """Settings that turn texts into vectors.

    modes:    of pooling over tokens (MODES); several are concatenated.
    layers:   applied to the pooled vectors, in turn.
    unpooled: number of first tokens, of the prompt, that pooling leaves out.
    given:    True if the folder defines all this; otherwise it is the mean over tokens.
    """

    modes: tuple[str, ...] = ("mean",)
    layers: tuple[Callable[[Tensor], Tensor], ...] = ()
    unpooled: int = 0
    given: bool = False

    @classmethod
    def of_folder(cls, folder: str | Path, tokenizer: Any = None) -> "Sentences":
        """Read modules.json of a SentenceTransformer; without one, use the mean over tokens.

        tokenizer: counts the tokens of a prompt that pooling leaves out.
        Raises: BadFile for a module that is not supported.
        """
        folder = Path(folder)
        if not (folder / MODULES).is_file():
            return cls()
        modes: tuple[str, ...] = ("mean",)
        layers: list[Callable[[Tensor], Tensor]] = []
        unpooled, prompt = 0, Texts.of_folder(folder).prompt
        for path, kind in modules_of(folder).items():
            if kind == "Pooling":
                modes = pooling_modes(folder / path / "config.json")
                whole = optional_json(folder / path / "config.json").get("include_prompt", True)
                if prompt and not whole and tokenizer is not None:
                    ids = tokenizer(prompt)["input_ids"]
                    unpooled = len(ids) - (ids[-1] in tokenizer.all_special_ids)
            elif kind == "Dense":
                layers.append(dense_layer(folder / path))
            elif kind == "Normalize":
                layers.append(lambda vectors: normalize(vectors, dim=-1))
            elif kind != "Dropout":
                problem = f"its module {kind} ({path}) is not supported"
                raise BadFile(folder / MODULES, problem, USE_LIBRARY)
        return cls(modes, tuple(layers), unpooled, True)

    @torch.no_grad()
    def vectors(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the vectors (n, p) of a batch of tokens padded on the right."""
        output = model(**model_call(model, batch))
        hidden = getattr(output, "last_hidden_state", None)
        hidden = output[0] if hidden is None else hidden  # (n, tokens, d)
        mask = batch["attention_mask"].to(hidden.device)
        if self.unpooled:
            mask = mask.clone()
            mask[:, : self.unpooled] = 0
        vectors = pool(hidden, mask, self.modes)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors


def pool(hidden: Tensor, mask: Tensor, modes: Sequence[str]) -> Tensor:
    """Pool features (n, tokens, d) over the tokens where mask (n, tokens) is 1; return
    (n, d · number of modes).
    """
    counted = mask[..., None].to(hidden.dtype)
    rows = torch.arange(len(hidden), device=hidden.device)
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    first, last = mask.argmax(1), (mask * places).argmax(1)
    weights = counted * places[None, :, None]
    pools: Mapping[str, Callable[[], Tensor]] = {
        "cls": lambda: hidden[rows, first],
        "max": lambda: hidden.masked_fill(counted == 0, float("-inf")).amax(1),
        "mean": lambda: (hidden * counted).sum(1) / counted.sum(1).clamp_min(1e-9),
        "lasttoken": lambda: hidden[rows, last],
        "mean_sqrt_len": lambda: (hidden * counted).sum(1) / counted.sum(1).clamp_min(1e-9).sqrt(),
        "weightedmean": lambda: (hidden * weights).sum(1) / weights.sum(1).clamp_min(1e-9),
    }
    return torch.cat([pools[mode]() for mode in modes], dim=-1)


def pooling_modes(file: Path) -> tuple[str, ...]:
    """Return the modes of a Pooling module, in its old or its present form. Raises: BadFile."""
    config = optional_json(file)
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or ())
    modes = [mode.removesuffix("_tokens") for mode in modes]
    modes = modes or [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, on in config.items()
        if key.startswith("pooling_mode_") and on
    ]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        problem = f"pools by {unknown[0] if unknown else 'nothing'}, which is not supported"
        raise BadFile(file, problem, USE_LIBRARY)
    return tuple(modes)


def dense_layer(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return a Dense module: a linear layer and its activation. Raises: BadFile."""
    name = str(optional_json(folder / "config.json").get("activation_function", "Tanh"))
    activation = ACTIVATIONS.get(name.rsplit(".", 1)[-1])
    if not (folder / "model.safetensors").is_file() or activation is None:
        problem = f"a dense layer with {name}, or without safetensors, is not supported"
        raise BadFile(folder, problem, USE_LIBRARY)
    tensors = load_file(folder / "model.safetensors")
    W = tensors["linear.weight"]
    b = tensors.get("linear.bias", torch.zeros(len(W)))
    return lambda vectors: activation(vectors @ W.to(vectors).T + b.to(vectors))


WAYS = {
    "head": "the largest score of the model's own classes",
    "likelihood": "the label whose text is the most likely after the text",
    "vectors": "the label whose text has the nearest vector",
}


def way_of(model: nn.Module) -> str:
    """Return how a model answers, a key of WAYS. Raises: BadSetting for a model with a decoder but
    no language head.
    """
    if type(model).__name__.endswith("ForSequenceClassification"):
        return "head"
    takes = input_of(model)
    if output_embeddings(model) is not None and (takes.continued or takes.kind == "pair"):
        return "likelihood"
    if takes.kind == "pair":
        expected = "must have a language head, such as T5ForConditionalGeneration"
        raise BadSetting("--model", type(model).__name__, expected)
    return "vectors"


@dataclass(frozen=True)
class TextModel:
    """A model, the reader of its texts, the number of texts per batch, and its vectors."""

    model: nn.Module
    reader: Reader
    batch: int
    sentences: Sentences = Sentences()

    def logits(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the model's logits."""
        logits: Tensor = self.model(**model_call(self.model, batch)).logits
        return logits

    def run(
        self, rows: Sequence[list[int]], forward: Callable[[dict[str, Tensor]], Tensor]
    ) -> Tensor:
        """Return forward's results for rows of tokens, in their order; texts of similar length
        share a batch.
        """
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        parts = []
        for start in range(0, len(rows), self.batch):
            chosen = [rows[i] for i in order[start : start + self.batch]]
            ids, mask = padded(chosen, self.reader.pad)
            parts.append(forward({"input_ids": ids, "attention_mask": mask}))
        return torch.cat(parts).float().cpu()[torch.tensor(order).argsort()]


def right_answers(texts: TextModel, data: Labelled, templates: Sequence[str]) -> Tensor:
    """Return True for each text that the model gets right, (n,).

    templates: texts with {} for a label's name; likelihoods use one, vectors are averaged over all.
    Raises: BadData for labels that the model's head does not have; NotFinite.
    """
    way, labels = way_of(texts.model), list(data.labels)
    with evaluation_mode([texts.model]):
        if way == "head":
            rows = [texts.reader.tokens(sample).ids for sample in data.samples]
            scores, labels = texts.run(rows, texts.logits), labels_of_head(texts.model, data)
        elif way == "likelihood":
            scores = likelihoods(texts, data, templates[0])
        else:
            scores = similarities(texts, data, templates)
    if not torch.isfinite(scores).all():
        raise NotFinite("model", "its answers")
    return scores.argmax(-1) == torch.tensor(labels)


def labels_of_head(model: nn.Module, data: Labelled) -> list[int]:
    """Return the labels as indices of the model's head, matched by name if it has names.

    Raises: BadData.
    """
    config: Any = model.config
    known = {str(name).lower(): int(index) for name, index in (config.label2id or {}).items()}
    if all(name.lower() in known for name in data.classes):
        return [known[data.classes[label].lower()] for label in data.labels]
    unnamed = all(name.startswith("label_") or name.isdigit() for name in known)
    if len(data.classes) != config.num_labels or not unnamed:
        ours, theirs = ", ".join(data.classes[:5]), ", ".join(list(known)[:5])
        way_out = "name the classes as the model's config.json does (id2label)"
        raise BadData(data.origin, f"its labels are {ours}, but the model's are {theirs}", way_out)
    return list(data.labels)


def similarities(texts: TextModel, data: Labelled, templates: Sequence[str]) -> Tensor:
    """Return the cosine of every text's vector and every label's, (n, K)."""
    encoder: Any = texts.model
    if output_embeddings(encoder) is not None:
        encoder = encoder.base_model

    def vectors(lines: Sequence[str]) -> Tensor:
        rows = [texts.reader.tokens(Sample("a text", line)).ids for line in lines]
        own = texts.run(rows, lambda batch: texts.sentences.vectors(encoder, batch))
        return normalize(own, dim=-1)

    prompts = [template.replace("{}", name) for name in data.classes for template in templates]
    heads = vectors(prompts).reshape(len(data.classes), len(templates), -1).mean(1)  # (K, p)
    return vectors([sample.text for sample in data.samples]) @ normalize(heads, dim=-1).T


def likelihoods(texts: TextModel, data: Labelled, template: str) -> Tensor:
    """Return log p(label's text | text), summed over the tokens of the label's text, (n, K)."""
    reader = texts.reader
    has_decoder = reader.takes.kind == "pair"
    labels = [template.replace("{}", name) for name in data.classes]
    rows: list[tuple[list[int], list[int], int]] = []  # ids, decoder's ids, first scored position
    for sample in data.samples:
        text = reader.shortened(sample.text, end=not has_decoder)
        context = reader.tokenizer(text)["input_ids"]
        for label in labels:
            if has_decoder:
                rows.append((context[: reader.length], reader.tokenizer(label)["input_ids"], 0))
                continue
            whole = reader.tokenizer(text + label)["input_ids"]
            shared = min(len(whole), len(context))
            first = next((i for i in range(shared) if whole[i] != context[i]), shared)
            cut = max(0, len(whole) - reader.length)
            rows.append((whole[cut:], [], max(1, first - cut)))
    scores = []
    for start in range(0, len(rows), texts.batch):
        inputs, targets, firsts = zip(*rows[start : start + texts.batch], strict=True)
        ids, mask = padded(inputs, reader.pad)
        batch = {"input_ids": ids, "attention_mask": mask}
        if has_decoder:
            expected, counted = padded(targets, reader.pad)
            batch["labels"] = expected.masked_fill(counted == 0, IGNORED)
            logits = texts.logits(batch)
        else:  # the logits at t predict token t + 1
            expected, logits = ids[:, 1:], texts.logits(batch)[:, :-1]
            scored = torch.arange(1, ids.shape[1]) >= torch.tensor(firsts)[:, None]
            counted = scored & (mask[:, 1:] == 1)
        log_p = log_softmax(wide(logits), -1).gather(-1, expected[..., None].to(logits.device))
        scores.append((log_p[..., 0].cpu() * counted).sum(1))
    return torch.cat(scores).reshape(len(data.samples), len(labels))
