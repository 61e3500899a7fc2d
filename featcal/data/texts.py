"""Read text samples, determine a model's inputs, and tokenise samples for it.

A sample is a plain text, a prompt with its completion, or a chat. A causal model reads a prompt
and its completion as one text, an encoder the prompt alone; a model with a decoder needs both.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from filecmp import cmp
from inspect import signature
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError
from torch import nn
from transformers.models.auto import modeling_auto as auto

from featcal.data import places
from featcal.data.places import LABEL, Columns, Location, open_table, split_files
from featcal.errors import BadData, BadFile, FeatCalError, list_of, one_line, warn_once
from featcal.models.checkpoint import MODULES
from featcal.models.load import TOKENIZER, load_tokenizer
from featcal.models.sentences import Texts
from featcal.settings import require

if TYPE_CHECKING:
    from datasets import Dataset

# keys of a row that make a sample; the first form that fits counts
FORMS = (("messages",), ("prompt", "completion"), ("input", "target"), ("text",))
WANTED = (
    'give "text", or "messages" (a list of {"role": "user", "content": "..."}), or "prompt" and '
    '"completion", or "input" and "target"'
)
CHARACTERS = 64  # per token that is kept; more of a text is tokenised where that is too few
DEFAULT_TOKENS = 512  # BERT and T5 were trained on no longer texts
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "spm.model")
VOCABULARIES += ("tokenizer.model", "sentencepiece.bpe.model")
LINES = "put one object on each line, or name a file with a list of them .json"
TURN, HEAD = ("role", "content"), "ForSequenceClassification"
MOST_CLASSES = 1000  # of numbers without names, or one per row: a larger label is an id or a date


@dataclass(frozen=True)
class Sample:
    """A text, with a target where something follows it; or a chat. `origin`: its file and row."""

    origin: str
    text: str = ""
    target: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    label: int | str | None = None
    tools: Any = None  # of a chat: a list of JSON schemas, or its text


class TextRows(Sequence[Sample]):
    """Rows of a table as samples, checked when read; those of .txt and .jsonl files are lines."""

    def __init__(self, table: "Dataset", origin: str, suffix: str, columns: Columns = None):
        self._table, self._origin, self._suffix = table, origin, suffix
        self._columns = columns = columns or {}
        self._rows: Sequence[int] = range(len(table))
        label = columns.get(LABEL, LABEL)
        self.classes: Sequence[str] | None = getattr(table.features.get(label), "names", None)
        if suffix in (".txt", ".jsonl"):  # empty lines are no samples
            self._rows = [i for i, text in enumerate(table["text"]) if text.strip()]
            if not self._rows:
                raise BadData(origin, "holds no text", "put one sample per line there")
            return
        _form(origin, table.column_names, columns)  # a row with null there may hold another
        used = {columns.get(key, key) for key in (*chain(*FORMS), label, "tools")}
        of_csv = table.info.builder_name == "csv"  # where pandas calls a second text text.1
        if twice := [name for name in used if of_csv and f"{name}.1" in table.column_names]:
            raise BadData(origin, f"has two columns {twice[0]!r}", "give one of them another name")
        self._table = table.select_columns([name for name in table.column_names if name in used])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any, /) -> Any:
        number = self._rows[index]
        row: Mapping[str, Any] = self._table[number]
        if self._suffix not in (".txt", ".jsonl"):
            row = {key: _without_nulls(value) for key, value in row.items()}
            return _sample(f"{self._origin}, row {number}", row, self._columns)
        origin, line = f"{self._origin}, line {number + 1}", row["text"].rstrip("\r")
        if self._suffix == ".txt":
            return Sample(origin, line)
        try:
            return _sample(origin, json.loads(line), self._columns)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
            problem = f"not JSON ({one_line(error)})"
            raise BadData(origin, problem, LINES) from None


def load_text(location: Location, split: str, columns: Columns = None) -> TextRows:
    """Read the samples of a file, of one split of a folder, or of a data set of the hub."""
    table, path = open_table(location, split), Path(location.source)
    if location.on_hub:
        return TextRows(table, f"{location.source} ({split})", ".parquet", columns)
    path = split_files(path, split)[0] if path.is_dir() else path
    return TextRows(table, str(path), path.suffix.lower(), columns)


@dataclass(frozen=True)
class Labelled:
    """Texts with the numbers of their classes."""

    origin: str
    samples: Sequence[Sample]
    labels: Sequence[int]
    classes: Sequence[str]
    occurring: bool  # the classes are those of these samples, and there may be others


def load_labelled(
    location: Location, split: str, classes: Sequence[str] | None = None, columns: Columns = None
) -> Labelled:
    """Read the samples of one split, labelled by "label" or target; `classes` are the names."""
    rows, origin = load_text(location, split, columns), f"{location.source} ({split})"
    samples, columns = list(rows), columns or {}
    if {"target", "completion"} & columns.keys() and LABEL not in columns:  # "label" is another
        rows.classes, samples = None, [replace(sample, label=None) for sample in samples]
    stated = [s.target if s.label is None else s.label for s in samples]
    values: list[Any] = [value if f"{value}".strip() else None for value in stated]
    samples = [s if s.label is not None else replace(s, target=None) for s in samples]
    if all(str(value).startswith(" ") for value in values):  # of completions, blanks count
        classes = [f" {name}" for name in classes or ()]
    seen, names = {*values} - {None}, places.given_or_stored(origin, classes, rows.classes, values)
    if not names and all(isinstance(value, int) for value in seen):
        names = [*map(str, range(min(max(seen or {0}) + 1, max(MOST_CLASSES, len(rows)))))]
    elif not names:
        names = places.in_order(map(str, seen))
        values = [value if value is None else str(value) for value in values]
    labels = places.class_numbers((sample.origin for sample in samples), values, names)
    if len(names) < 2:
        raise BadData(origin, f"holds the one label {names[0]!r}", "accuracy needs two classes")
    return Labelled(origin, samples, labels, names, not (classes or rows.classes))


def _form(
    origin: str, keys: Collection[str], columns: Mapping[str, str], filled: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the keys that make a sample, `filled` ones if possible. Raises: BadData."""
    absent = [column for column in columns.values() if column not in keys]
    named = set(columns) - {LABEL}
    for present, form in product(({*filled}, {*keys}), FORMS):
        if not absent and named <= set(form) and {columns.get(k, k) for k in form} <= present:
            return form
    problem = f"holds {list_of(keys)}, which makes no text sample"
    problem = f"has no column {absent[0]!r}; it holds {list_of(keys)}" if absent else problem
    raise BadData(origin, problem, WANTED, "name others, for all tasks, with --column text=COLUMN")


def _sample(origin: str, row: object, columns: Mapping[str, str]) -> Sample:
    """Return one row as a sample. Raises: BadData naming the row and the key."""
    if not isinstance(row, Mapping):
        raise BadData(origin, f"is a {type(row).__name__}, not an object", LINES)
    filled = [key for key, value in row.items() if value is not None]
    form, messages, tools = _form(origin, row, columns, filled), None, row.get("tools")
    label, texts = row.get(columns.get(LABEL, LABEL)), {k: row[columns.get(k, k)] for k in form}
    if form == ("messages",):
        try:
            present = [{k: v for k, v in m.items() if v is not None} for m in texts["messages"]]
            messages = [{"content": None} | m if m.get("tool_calls") else m for m in present]
            pairs = [(f"{k} of message {i}", m[k]) for i, m in enumerate(messages) for k in TURN]
        except (TypeError, KeyError, AttributeError):
            messages = []
        if not messages:
            raise BadData(origin, "'messages' is no list of messages with role and content", WANTED)
        texts = {key: text for key, text in pairs if text is not None}  # null next to tool calls
        texts["messages"] = json.dumps([messages, tools], ensure_ascii=False, default=str)
    for key, text in texts.items():
        if not isinstance(text, str):
            way_out = "fill it, or leave the row out; quote numbers and dates, in a .jsonl file"
            raise BadData(origin, f"{key!r} is {type(text).__name__}, not text", way_out, WANTED)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"{key!r} has half of a surrogate pair at character {error.start}"
            raise BadData(origin, problem, "remove it, or write the whole character") from None
    values, label = texts.values() if messages is None else (), places.label_of(label)
    return Sample(origin, *values, messages=messages, label=label, tools=tools)


def _without_nulls(value: Any) -> Any:
    """Return a table's value without the nulls that stand for keys of other rows."""
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class ModelInput:
    """The inputs that one model takes; a "pair" is a text and a target for the decoder."""

    kind: Literal["pictures", "text", "pair"]
    continued: bool = False  # a causal model reads a prompt and its completion as one text
    labels: bool = True  # a pair's target is given as labels, else as decoder_input_ids
    vocabulary: int | None = None  # number of token ids
    positions: int | None = None  # of the longest text; None without a limit
    start: int | None = None  # first of the decoder_input_ids
    pad: int | None = None  # the padding before which a causal classifier reads its answer
    alone: bool = False  # it has no such padding, so every text is a batch


def input_of(model: nn.Module, tokens: int | None = None) -> ModelInput:
    """Return a model's inputs, pictures or text. Raises: BadData; BadSetting: tokens of pictures."""
    name, parameters = type(model).__name__, signature(model.forward).parameters
    multimodal = name in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    pictures, text = "pixel_values" in parameters and not multimodal, "input_ids" in parameters
    only_images = getattr(model, "input_modalities", "image") in ("image", ["image"], ("image",))
    if pictures == text or (pictures and not only_images):
        reads = getattr(model, "main_input_name", "nothing known")
        reads = "pictures and text together" if pictures and text else reads
        files = "files give pictures to a vision model or text to a language model"
        tower = "give one of its towers as a model of its own, or"
        python = "call featcal.calibrate from Python with batches of whatever its forward takes"
        raise BadData(name, f"it takes {reads}; {files}", tower, python)
    if pictures:
        require(tokens is None, "tokens", tokens, f"is for texts, but {name} reads images")
        return ModelInput("pictures")
    config: Any = model.config.get_text_config() if multimodal else model.config
    size, limit = getattr(config, "vocab_size", None), _positions(model, config)
    if "decoder_input_ids" in parameters and not name.endswith(HEAD):  # Bart's make their own
        start = getattr(config, "decoder_start_token_id", None)
        return ModelInput("pair", False, "labels" in parameters, size, limit, start)
    causal, kind = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, config.model_type
    only_causal = kind in causal and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    continued = multimodal or name in causal.values() or only_causal
    pad, classifies = getattr(config, "pad_token_id", None), only_causal and name.endswith(HEAD)
    pad = pad if classifies and pad in range(size or 0) else None
    return ModelInput("text", continued, True, size, limit, None, pad, classifies and pad is None)


def _positions(model: nn.Module, config: Any) -> int | None:
    """Return the number of a model's positions; RoBERTa's table has rows for padding."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:  # XLNet has -1
        return None
    for table in (m for m in model.modules() if isinstance(m, nn.Embedding)):
        if table.num_embeddings == limit and table.padding_idx is not None:
            return limit - table.padding_idx - 1
    return limit


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of one sample, and of its target where the model has a decoder."""

    ids: list[int]
    target: list[int] | None = None


@dataclass(frozen=True)
class Reader:
    """A folder's tokenizer, the model's inputs, and the maximum number of tokens per text."""

    tokenizer: Any
    inputs: ModelInput
    length: int
    folder: Path
    texts: Texts = Texts()
    moved: Mapping[int, str] = field(default_factory=dict)  # by id, how another model's differs

    @property
    def pad(self) -> int:
        """Return the padding token; Llama has none, and the mask hides any other just as well."""
        tokens = (self.inputs.pad, self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in tokens if token is not None)

    def tokens(self, sample: Sample) -> TokenizedText:
        """Tokenise one sample. Raises: BadData naming it; BadFile for another model's tokenizer."""
        if self.inputs.kind == "pair":
            if sample.target is None or sample.messages is not None:
                way_out = 'give "input" and "target", or --column input=NAME --column target=NAME'
                raise BadData(sample.origin, "has no target for the decoder to read", way_out)
            target = self.ids(sample, sample.target, target=True)
            return TokenizedText(self.ids(sample, sample.text), target)
        if sample.messages is None:
            completion = (sample.target if self.inputs.continued else None) or ""
            return TokenizedText(self.ids(sample, self.texts.prepared(sample.text + completion)))
        if not self.tokenizer.chat_template:
            problem = f"its tokenizer has no chat template, but {sample.origin} is a chat"
            way_out = 'copy chat_template.jinja of an expert there, or give the samples as "text"'
            raise BadFile(self.folder, problem, way_out)
        chat, tools = sample.messages, sample.tools or None
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
            text: str = self.tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            problem = f"the chat template refuses it ({one_line(error)})"
            raise BadData(sample.origin, problem, "correct the roles or their order") from None
        return TokenizedText(self.ids(sample, text, add_special_tokens=False))

    def ids(self, sample: Sample, text: str, target: bool = False, **more: bool) -> list[int]:
        """Return the first `length` token ids of a text. Raises: BadData for no token; BadFile."""
        arguments: Any = {"text_target" if target else "text": self.shortened(text), **more}
        ids = self.tokenizer(**arguments, truncation=True, max_length=self.length)["input_ids"]
        if not ids:
            raise BadData(sample.origin, "holds no text", "leave it out, or fill it")
        size = self.inputs.vocabulary
        if size is not None and max(ids) >= size:
            token = f"token {max(ids)} ({sample.origin})"
            problem = f"its tokenizer gives {token}, but the model has {size} tokens"
            raise BadFile(self.folder, problem, "give the tokenizer that belongs to this model")
        if moved := self.moved.keys() & ids:
            problem = f"its tokenizer {self.moved[min(moved)]} ({sample.origin})"
            command = "featcal merge average --base BASE --expert NAME=MODEL --out NEW"
            way_out = f"give NEW, with the base's tokens, for it: {command}"
            raise BadFile(self.folder, problem, way_out)
        return ids

    def shortened(self, text: str, end: bool | None = None) -> str:
        """Return a text, or the beginning of a very long one: its end if truncated on the left."""
        size = CHARACTERS * self.length
        end = getattr(self.tokenizer, "truncation_side", "right") == "left" if end is None else end
        while size < len(text):
            part = text[-size:] if end else text[:size]
            if len(self.tokenizer(part, add_special_tokens=False)["input_ids"]) > 2 * self.length:
                return part
            size *= 2
        return text


def reader_for(
    folders: Sequence[Path], inputs: ModelInput, tokens: int | None, expert: Path | None = None
) -> Reader:
    """Load the first folder's tokenizer and compare others with it. Raises: BadFile, BadSetting.

    tokens: maximum per text. Default: what a sentence encoder's folder says, or 512, and at most
        the model's limit.   expert: says how texts are prepared if none of the folders does.
    """
    kinds = (VOCABULARIES, (TOKENIZER,))  # a tokenizer of bytes has settings alone
    usable = (f for names in kinds for f in folders if any((f / n).is_file() for n in names))
    if (folder := next(usable, None)) is None:
        problem = f"no tokenizer in this folder ({', '.join(VOCABULARIES[:3])}, ...)"
        raise BadFile(folders[0], problem, "copy the tokenizer's files of the base model there")
    tokenizer, limit = load_tokenizer(folder), inputs.positions
    if limit is not None:
        limit = min(limit, tokenizer.model_max_length)
        expected = f"must be at most {limit}, the limit of the model or its tokenizer"
        require(tokens is None or tokens <= limit, "tokens", tokens, expected)
    candidates = (*folders, expert or folder)
    texts = Texts.of_folder(next((f for f in candidates if (f / MODULES).is_file()), folder))
    default = texts.longest or DEFAULT_TOKENS
    moved, reason = dict[int, str](), "has the id {} for {!r}, but that of {} has {}"
    for other in dict.fromkeys(candidates):
        files = [(folder / name, other / name) for name in VOCABULARIES if (other / name).is_file()]
        if not all(ours.is_file() and cmp(ours, theirs, shallow=False) for ours, theirs in files):
            try:
                ids, vocabulary = tokenizer.get_vocab(), load_tokenizer(other).get_vocab()
                rows = ((token, ids.get(token, new), new) for token, new in vocabulary.items())
                moved |= {i: reason.format(i, t, other, new) for t, i, new in rows if i != new}
            except FeatCalError as error:
                warn_once(f"{str(error).splitlines()[0]} Its tokens are not compared to others.")
    return Reader(tokenizer, inputs, tokens or min(default, limit or default), folder, texts, moved)
