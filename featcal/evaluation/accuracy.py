"""Accuracy on labelled images and texts.

Zero-shot: features of images or sentences compared with a head of class vectors. Texts also by a
model's class head, by likelihoods of the labels, or by sentence vectors.

n images, sentences or texts · K labels · h width of the model · p width of a head or vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from featcal.core.precision import wide
from featcal.data.batches import collate, padded
from featcal.data.texts import Labelled, Reader, Sample, TokenizedText, input_of
from featcal.errors import BadData, NotFinite
from featcal.models.batch import Batch, output_embeddings, projected, token_mean, unit_length
from featcal.models.blocks import model_call
from featcal.models.load import evaluation_mode
from featcal.models.sentences import Sentences
from featcal.settings import require

# a model, or a function from inputs to projected features (n, p), such as a model with adapters
Encoder = nn.Module | Callable[[Batch], Tensor]
# images or sentences: labels (n,) in the order of batches(None, size), and names of classes
Samples = Any
# the model whose projected features (n, p) change, and how: ("merged", adapters.apply)
Adapted = tuple[str, Callable[[str, Tensor], Tensor]]
ANSWER_METHODS = {
    "head": "the largest score of the model's own classes",
    "likelihood": "the label most likely to follow the text",
    "vectors": "the label whose text has the nearest vector",
}


@torch.no_grad()
def projected_features(model: Encoder, projection: Tensor | None, inputs: Batch) -> Tensor:
    """Return features of one batch after the projection (p, h), if there is one, (n, p)."""
    if not isinstance(model, nn.Module):
        return model(inputs)
    dtype = next(model.parameters()).dtype
    typed = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    return projected(model, typed, projection)


def require_finite(features: Tensor, label: str) -> None:
    """Raise NotFinite unless all features are finite."""
    if not torch.isfinite(features).all():
        raise NotFinite(label, "its features")


@torch.no_grad()
def zero_shot_head(
    model: Any, tokenizer: Any, classes: Sequence[str], templates: Sequence[str], batch: int = 256
) -> Tensor:
    """Return a unit vector for every class, (K, p): the mean of its normalised prompts, normalised.

    A prompt's vector is a CLIP's text feature, or a sentence encoder's mean over tokens.
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
    vision: nn.Module, projection: Tensor | None, images: Samples, batch: int = 250, task: str = ""
) -> Tensor:
    """Return the mean of the base's unit features of every class, normalised again, (K, p)."""
    labels = torch.as_tensor(images.labels)
    counts = torch.bincount(labels, minlength=len(images.classes))
    if not counts.all():
        problem = f"class {images.classes[int(counts.argmin())]!r} has no image in this split"
        raise BadData(task or "class means", problem, "drop the class or add images of it")
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
    models: Mapping[str, Encoder | Mapping[str, Encoder]],  # {task: model} for experts
    sets: Mapping[str, Samples],
    heads: Mapping[str, Tensor],  # (K, p)
    projection: Tensor | None,  # (p, h)
    batch: int = 250,
    adapted: Mapping[str, Adapted] = {},  # by a name of its own; its model runs once
) -> dict[str, dict[str, Tensor]]:
    """Return True for each image or sentence a model gets right: {model: {task: (n,)}}."""
    correct: dict[str, dict[str, Tensor]] = {name: {} for name in (*models, *adapted)}
    for task, samples in sets.items():
        expected = "must be at least two, else every answer is right"
        require(len(heads[task]) > 1, f"{task}: number of classes", len(heads[task]), expected)
        task_models = {n: m.get(task) if isinstance(m, Mapping) else m for n, m in models.items()}
        encoders = {name: model for name, model in task_models.items() if model is not None}
        names = (*encoders, *(name for name, (model, _) in adapted.items() if model in encoders))
        answers = {name: [torch.zeros(0, dtype=torch.long)] for name in names}
        for inputs in samples.batches(None, batch):
            for key, encoder in encoders.items():
                x = projected_features(encoder, projection, inputs)
                changed = {n: f(task, x) for n, (model, f) in adapted.items() if model == key}
                for name, features in ({key: x} | changed).items():
                    features = unit_length(features)
                    require_finite(features, f"model {name}, task {task}")
                    answers[name].append((features @ heads[task].to(features).T).argmax(-1).cpu())
        for name, parts in answers.items():
            correct[name][task] = torch.cat(parts) == torch.as_tensor(samples.labels)
    return correct


def percent(correct: Tensor) -> float:
    """Return the percentage of right samples, given as (n,) booleans."""
    return 100 * int(correct.sum()) / len(correct)


def answer_method(model: nn.Module) -> str:
    """Return a model's key of ANSWER_METHODS. Raises: BadSetting for a decoder without head."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return "head"
    inputs = input_of(model)
    if output_embeddings(model) is not None and (inputs.continued or inputs.kind == "pair"):
        return "likelihood"
    expected = "must have a language head, such as T5ForConditionalGeneration"
    require(inputs.kind != "pair", "--model", type(model).__name__, expected)
    return "vectors"


@dataclass(frozen=True)
class TextModel:
    """A model, the reader of its texts, texts per batch, and how it makes sentence vectors."""

    model: nn.Module
    reader: Reader
    batch: int
    sentences: Sentences = Sentences()

    def logits(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the model's logits."""
        return self.model(**model_call(self.model, batch)).logits

    def run(self, rows: Sequence[list[int]], forward: Callable[[Batch], Tensor]) -> Tensor:
        """Return forward's results for rows of tokens in order; similar lengths share a batch."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        parts = []
        for start in range(0, len(rows), self.batch):
            chosen = [rows[i] for i in order[start : start + self.batch]]
            ids, mask = padded(chosen, self.reader.pad)
            parts.append(forward({"input_ids": ids, "attention_mask": mask}))
        return torch.cat(parts).float().cpu()[torch.tensor(order).argsort()]


def right_answers(texts: TextModel, data: Labelled, templates: Sequence[str]) -> Tensor:
    """Return True for each text that the model gets right, (n,)."""
    method, labels = answer_method(texts.model), list(data.labels)
    reader, pair = texts.reader, texts.reader.inputs.kind == "pair"
    for sample in data.samples:
        if sample.messages is not None and (pair or method != "head"):
            way_out = 'give its text as "text", or as "input" with the label as "target"'
            raise BadData(sample.origin, "is a chat, for which this model has no head", way_out)
    with evaluation_mode([texts.model]):
        if method == "head":
            rows = [reader.ids(s, s.text) if pair else reader.tokens(s).ids for s in data.samples]
            scores, labels = texts.run(rows, texts.logits), labels_of_head(texts.model, data)
        elif method == "likelihood":
            scores = likelihoods(texts, data, templates[0])
        else:
            prompts = prompts_of(data.classes, templates)
            heads = vectors(texts, prompts).reshape(len(data.classes), len(templates), -1).mean(1)
            lines = [sample.text for sample in data.samples]
            scores = vectors(texts, lines) @ normalize(heads, dim=-1).T
    if not torch.isfinite(scores).all():
        raise NotFinite("model", "its answers")
    return scores.argmax(-1) == torch.tensor(labels)


def labels_of_head(model: nn.Module, data: Labelled) -> list[int]:
    """Return the labels as indices of the model's head, matched by name if it has names."""
    config: Any = model.config
    of_head, more = config.id2label or {}, config.label2id or {}
    pairs = [*more.items(), *zip(of_head.values(), of_head, strict=True)]
    # of one name id2label counts, the later, as in a pipeline
    index_of = {str(name).strip().lower(): int(i) for name, i in pairs}
    classes = [name.strip().lower() for name in data.classes]
    if all(name in index_of for name in classes):
        return [index_of[classes[label]] for label in data.labels]
    unnamed = all(name.startswith("label_") or name.isdigit() for name in index_of)
    if len(data.classes) != config.num_labels or not unnamed:
        data_names, model_names = ", ".join(data.classes[:5]), ", ".join(list(index_of)[:5])
        way_out = "use the model's names (id2label in config.json), or numbers with --classes"
        problem = f"its labels are {data_names}, but the model's are {model_names}"
        raise BadData(data.origin, problem, way_out)
    return list(data.labels)


def vectors(texts: TextModel, lines: Sequence[str]) -> Tensor:
    """Return a unit vector of every text, (n, p)."""
    model: Any = texts.model
    encoder = model if output_embeddings(model) is None else model.base_model

    def encode(batch: dict[str, Tensor]) -> Tensor:
        hidden = encoder(**model_call(encoder, batch))[0]
        return texts.sentences.vectors(hidden, batch["attention_mask"])

    rows = [texts.reader.tokens(Sample("a text", line)).ids for line in lines]
    return normalize(texts.run(rows, encode), dim=-1)


def likelihoods(texts: TextModel, data: Labelled, template: str) -> Tensor:
    """Return log p(label's text | text), summed over the tokens of the label's text, (n, K)."""
    reader, has_decoder = texts.reader, texts.reader.inputs.kind == "pair"
    labels = prompts_of(data.classes, [template])
    rows: list[tuple[TokenizedText, int]] = []  # with the first scored position
    for sample in data.samples:
        text = reader.shortened(sample.text, end=not has_decoder)
        context = reader.tokenizer(text)["input_ids"]
        for label in labels:
            if has_decoder:
                target = reader.tokenizer(label)["input_ids"]
                rows.append((TokenizedText(reader.ids(sample, text), target), 0))
                continue
            ids = reader.tokenizer(text + label)["input_ids"]
            shared = min(len(ids), len(context))
            first = next((i for i in range(shared) if ids[i] != context[i]), shared)
            cut = max(0, len(ids) - reader.length)
            rows.append((TokenizedText(ids[cut:]), max(1, first - cut)))
    scores = []
    for start in range(0, len(rows), texts.batch):
        chosen, firsts = zip(*rows[start : start + texts.batch], strict=True)
        batch = collate(chosen, reader.pad, reader.inputs)
        logits = texts.logits(batch)
        if has_decoder:
            expected, counted = padded([text.target or [] for text in chosen], reader.pad)
        else:  # the logits at t predict token t + 1
            expected, logits = batch["input_ids"][:, 1:], logits[:, :-1]
            scored = torch.arange(1, expected.shape[1] + 1) >= torch.tensor(firsts)[:, None]
            counted = scored & (batch["attention_mask"][:, 1:] == 1)
        log_p = log_softmax(wide(logits), -1).gather(-1, expected[..., None].to(logits.device))
        scores.append((log_p[..., 0].cpu() * counted).sum(1))
    return torch.cat(scores).reshape(len(data.samples), len(labels))
