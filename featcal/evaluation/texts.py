"""Accuracy on labelled texts: by a model's class head, by likelihoods, or by sentence vectors.

n texts · K labels · d width of the model · p width of a vector
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from featcal.core.precision import wide
from featcal.data.batches import IGNORED, padded
from featcal.data.texts import Labelled, Reader, Sample, input_of
from featcal.errors import BadData, BadSetting, NotFinite
from featcal.evaluation.zero_shot import prompts_of
from featcal.models.batch import output_embeddings
from featcal.models.blocks import model_call
from featcal.models.load import evaluation_mode
from featcal.models.sentences import Sentences

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

    def encode(batch: dict[str, Tensor]) -> Tensor:
        hidden = encoder(**model_call(encoder, batch))[0]
        return texts.sentences.vectors(hidden, batch["attention_mask"])

    def vectors(lines: Sequence[str]) -> Tensor:
        rows = [texts.reader.tokens(Sample("a text", line)).ids for line in lines]
        return normalize(texts.run(rows, encode), dim=-1)

    heads = (
        vectors(prompts_of(data.classes, templates))
        .reshape(len(data.classes), len(templates), -1)
        .mean(1)
    )  # (K, p)
    return vectors([sample.text for sample in data.samples]) @ normalize(heads, dim=-1).T


def likelihoods(texts: TextModel, data: Labelled, template: str) -> Tensor:
    """Return log p(label's text | text), summed over the tokens of the label's text, (n, K)."""
    reader = texts.reader
    has_decoder = reader.takes.kind == "pair"
    labels = prompts_of(data.classes, [template])
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
