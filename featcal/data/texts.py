"""Read text samples, find out what a model is given, and tokenise samples for it.

A sample is a plain text, a prompt with its completion, or a chat. A causal model reads a prompt
and its completion as one text, an encoder the prompt alone; a model with a decoder needs both.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from featcal.data.places import LABEL, Place, open_table, split_files
from featcal.errors import BadData, BadFile, BadSetting
from featcal.models.load import load_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

# keys of a row that make a sample; the first form that fits counts
FORMS = (("messages",), ("prompt", "completion"), ("input", "target"), ("text",))
WANTED = 'give "text", or "messages" (each with "role" and "content"), or "prompt" and "completion", or "input" and "target"'
USUAL = 512  # tokens; BERT and T5 were trained on no longer texts
CHARACTERS = 64  # per token that is kept: of a longer text only the beginning is tokenised
VOCABULARIES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A text, with a target where something follows it; or a chat. `place` names it in messages."""

    place: str
    text: str = ""
    target: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    label: int | str | None = None


class Samples(Sequence[Sample]):
    """The rows of a table as samples, each checked when it is asked for."""

    def __init__(self, table: "Dataset", at: str, lines: bool, labelled: bool):
        self._at, self._lines, self._labelled = at, lines, labelled
        self.classes: Sequence[str] | None = None
        if lines:
            texts = table["text"]
            self._rows: Sequence[int] = [i for i, text in enumerate(texts) if text.strip()]
            if not self._rows:
                raise BadData(at, "holds no text", "put at least one sample there, one per line")
        else:
            keys = [*_form(at, table.column_names)]
            if labelled and LABEL in table.column_names:
                keys.append(LABEL)
                self.classes = getattr(table.features[LABEL], "names", None)
            table, self._rows = table.select_columns(keys), range(len(table))
        self._table = table

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any, /) -> Any:
        number = self._rows[index]
        row: object = self._table[number]
        if not self._lines:
            return _sample(f"{self._at}, row {number}", row)
        at, line = f"{self._at}, line {number + 1}", self._table[number]["text"].rstrip("\r")
        if self._at.endswith(".txt"):
            return Sample(at, line)
        try:
            return _sample(at, json.loads(line))
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadData(at, f"not JSON ({error})", "put one object on each line") from None


def load_text(place: Place, split: str, labelled: bool = False) -> Samples:
    """Read the samples of a file, of one split of a folder, or of a data set of the hub.

    labelled: with their labels, where a table has a column of them.
    Raises: as open_table; BadData for columns that make no sample.
    """
    table, path = open_table(place, split), Path(place.source)
    if not place.on_hub and path.is_dir():
        path = split_files(path, split)[0]
    lines = not place.on_hub and path.suffix != ".parquet"
    return Samples(
        table, f"{place.source} ({split})" if place.on_hub else str(path), lines, labelled
    )


@dataclass(frozen=True)
class Labelled:
    """Texts with the number of each one's class."""

    place: str
    samples: Sequence[Sample]
    labels: Sequence[int]
    classes: Sequence[str]


def load_labelled(place: Place, split: str, classes: Sequence[str] | None = None) -> Labelled:
    """Read the samples of one split with labels: a row's "label" (name or number) or its target.

    classes: names by number. Default: those of the data set, else the labels that occur, sorted.
    Raises: as load_text; BadData for a row without a label, or whose label is no class.
    """
    samples = load_text(place, split, labelled=True)
    read, at = list(samples), f"{place.source} ({split})"
    values = [sample.target if sample.label is None else sample.label for sample in read]
    if None in values:
        way_out = 'give "label" (a name or a number from 0) next to the text, or a target'
        raise BadData(read[values.index(None)].place, "has no label", way_out)
    numeric = all(isinstance(value, int) for value in values)
    known = classes or samples.classes
    if not known and numeric:
        known = [str(number) for number in range(max(map(int, values)) + 1)]  # type: ignore[arg-type]
    known = known or sorted({str(value) for value in values})
    names = {name: number for number, name in reversed([*enumerate(known)])}
    numbers = values if numeric else [names.get(str(value), -1) for value in values]
    for sample, value, number in zip(read, values, numbers, strict=True):
        if not 0 <= int(number or 0) < len(known):
            problem = f"its label {value!r} is none of the classes {', '.join(known[:5])}"
            raise BadData(sample.place, problem, "check the names of the classes")
    if len(known) < 2:
        raise BadData(at, f"holds the one label {known[0]!r}", "accuracy needs two classes")
    return Labelled(at, read, [int(number or 0) for number in numbers], known)


def _form(at: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of a row that make the sample. Raises: BadData naming those it has."""
    form = next((form for form in FORMS if set(form) <= set(keys)), None)
    if form is None:
        problem = f"holds {', '.join(keys) or 'nothing'}, which makes no text sample"
        raise BadData(at, problem, WANTED)
    return form


def _sample(at: str, row: object) -> Sample:
    """Return one row as a sample. Raises: BadData naming the row and the key."""
    if not isinstance(row, Mapping):
        raise BadData(at, f"is a {type(row).__name__}, not an object", WANTED)
    form, label = _form(at, list(row)), row.get(LABEL)
    label = label if isinstance(label, int | str) and not isinstance(label, bool) else None
    texts = {key: row[key] for key in form}
    if form == ("messages",):
        told = row["messages"] if isinstance(row["messages"], list) else [None]
        keys = ("role", "content")
        if not told or not all(isinstance(m, Mapping) and {*keys} <= {*m} for m in told):
            way_out = 'each message is {"role": "user", "content": "..."}'
            raise BadData(at, "'messages' is no list of messages", way_out)
        messages = [{key: message[key] for key in keys} for message in told]
        texts = {f"{key} of message {i}": m[key] for i, m in enumerate(messages) for key in keys}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise BadData(at, f"{key!r} is {type(text).__name__}, not text", WANTED)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"{key!r} has half of a surrogate pair at character {error.start}"
            raise BadData(at, problem, "remove it, or write the whole character") from None
    if form == ("messages",):
        return Sample(at, messages=messages, label=label)
    return Sample(at, row[form[0]], row[form[1]] if len(form) == 2 else None, label=label)


@dataclass(frozen=True)
class Input:
    """What one model is given.

    kind: "pictures": pixel_values. "text": input_ids and attention_mask. "pair": these and a
        target for the decoder.
    continued: a causal model, which reads a prompt and its completion as one text.
    labels: of a pair: the target is given as labels; else as decoder_input_ids that begin with
        `start`.
    vocabulary: number of token ids.
    positions: the longest text it has positions for; None without a limit.
    """

    kind: Literal["pictures", "text", "pair"]
    continued: bool = False
    labels: bool = True
    vocabulary: int | None = None
    positions: int | None = None
    start: int | None = None


def input_of(model: nn.Module) -> Input:
    """Return what a transformers model is given, read from its class; weights may be on meta.

    A vision-language model is given text alone.
    Raises: BadData for audio, video or two inputs that are both required.
    """
    name, taken = type(model).__name__, set(signature(model.forward).parameters)
    talks = name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    pictures, text = "pixel_values" in taken and not talks, "input_ids" in taken
    modalities: Any = getattr(model, "input_modalities", "image")
    modalities = {modalities} if isinstance(modalities, str) else set(modalities)
    if pictures == text or (pictures and modalities != {"image"}):
        main = getattr(model, "main_input_name", "nothing known")
        takes = "pictures and text together" if pictures and text else main
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
    size, limit = getattr(config, "vocab_size", None), _positions(model, config)
    if "decoder_input_ids" in taken:
        start = getattr(config, "decoder_start_token_id", None)
        return Input("pair", False, "labels" in taken, size, limit, start)
    causal, kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, config.model_type
    only_causal = kind in causal and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return Input("text", talks or name in causal.values() or only_causal, True, size, limit)


def _positions(model: nn.Module, config: Any) -> int | None:
    """Return for how many tokens a model has positions; RoBERTa's table has rows for padding."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
    padded = (t.padding_idx for t in tables if t.num_embeddings == limit)
    padding = next((index for index in padded if index is not None), None)
    return limit if padding is None else limit - padding - 1


@dataclass(frozen=True)
class Tokens:
    """Token ids of one sample, and of its target where the model has a decoder."""

    ids: list[int]
    target: list[int] | None = None

    @property
    def count(self) -> int:
        return len(self.ids) + len(self.target or ())


@dataclass(frozen=True)
class Reader:
    """A tokenizer of a folder, the model's input, and the maximum number of tokens per text."""

    tokenizer: Any
    takes: Input
    length: int
    folder: Path

    @property
    def pad(self) -> int:
        """The token that pads; Llama has none, and the mask hides any other just as well."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)

    def tokens(self, sample: Sample) -> Tokens:
        """Tokenise one sample. Raises: BadData naming it; BadFile for another model's tokenizer."""
        if self.takes.kind == "pair":
            if sample.target is None or sample.messages is not None:
                way_out = 'give "input" and "target", or "prompt" and "completion"; the decoder reads the target'
                raise BadData(sample.place, "has no target", way_out)
            target = self.ids(sample, sample.target, target=True)
            return Tokens(self.ids(sample, sample.text), target)
        if sample.messages is not None:
            return Tokens(self.ids(sample, self._rendered(sample), add_special_tokens=False))
        follows = sample.target if self.takes.continued else None
        return Tokens(self.ids(sample, sample.text + (follows or "")))

    def _rendered(self, sample: Sample) -> str:
        """Return a chat as the text that the tokenizer's own template makes of it."""
        if not self.tokenizer.chat_template:
            problem = f"its tokenizer has no chat template, but {sample.place} is a chat"
            way_out = 'put chat_template.jinja there, or give the samples as "text"'
            raise BadFile(self.folder, problem, way_out)
        try:
            text: str = self.tokenizer.apply_chat_template(sample.messages, tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            problem = f"the chat template refuses it ({error})"
            raise BadData(sample.place, problem, "correct the roles or their order") from None
        return text

    def ids(self, sample: Sample, text: str, target: bool = False, **more: bool) -> list[int]:
        """Return the first `length` token ids of one text. Raises: BadData if it has none; BadFile."""
        key = "text_target" if target else "text"
        more |= {"truncation": True}
        most = CHARACTERS * self.length
        begun = text[:most] if getattr(self.tokenizer, "truncation_side", "") == "right" else text
        found: list[int] = self.tokenizer(**{key: begun}, max_length=self.length, **more)[
            "input_ids"
        ]
        if len(begun) < len(text) and len(found) < self.length:
            found = self.tokenizer(**{key: text}, max_length=self.length, **more)["input_ids"]
        if not found:
            raise BadData(sample.place, "holds no text", "leave it out, or fill it")
        largest, known = max(found), self.takes.vocabulary
        if known is not None and largest >= known:
            problem = f"its tokenizer gives token {largest} ({sample.place}), but the model has {known} tokens"
            raise BadFile(self.folder, problem, "give the tokenizer that belongs to this model")
        return found

    def plain_ids(self, text: str, length: int | None = None) -> list[int]:
        """Return the token ids of one text, cut to `length` where it is given."""
        how = {} if length is None else {"truncation": True, "max_length": min(length, self.length)}
        found: list[int] = self.tokenizer(text, **how)["input_ids"]
        return found


def reader_for(folders: Sequence[Path], takes: Input, tokens: int | None) -> Reader:
    """Load the tokenizer of the first folder that has one.

    tokens: maximum per text. Default: 512, or the model's limit.
    Raises: BadFile where no folder has a tokenizer; BadSetting for more tokens than positions.
    """
    having = (f for f in folders if any((f / name).is_file() for name in VOCABULARIES))
    folder = next(having, None)
    if folder is None:
        problem = f"no tokenizer in this folder ({', '.join(VOCABULARIES[:3])}, ...)"
        raise BadFile(folders[0], problem, "copy the tokenizer's files of the base model there")
    tokenizer, limit = load_tokenizer(folder), takes.positions
    if limit is not None:
        limit = min(limit, tokenizer.model_max_length)
        if tokens is not None and tokens > limit:
            expected = f"must be at most {limit}, the positions that the model has"
            raise BadSetting("tokens", tokens, expected)
    return Reader(tokenizer, takes, tokens or min(USUAL, limit or USUAL), folder)
