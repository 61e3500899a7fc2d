"""Read and write sources.json, which names the texts of every task, and turn texts into batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal.data.batches import IGNORED, Batch, draw_indices, padded, token_batches
from featcal.data.places import Location, open_table
from featcal.data.texts import Reader, Sample, input_of, reader_for
from featcal.errors import BadData
from featcal.files import read_json, write_json
from featcal.models.plan import BlockPlan, plan_for
from featcal.models.stored import skeleton
from featcal.settings import Settings
from reproduction.experiments import Reading, require_known
from reproduction.prepare.tasks import GLUE, domain_text, prompted

SOURCES = "sources.json"
COUNTED = "labels"  # keyword of a batch whose labels say which tokens count


class TextSource(Settings):
    """The texts of one task.

    location: a folder below the texts, or a hub id with revision and configuration.   splits: the
    source's name of train, validation, test.   description: for drawn tasks only.
    """

    location: str
    kind: str  # "folder" | "hub"
    paper_name: str
    splits: Mapping[str, str]
    revision: str | None = None
    config: str | None = None
    description: str = ""


@dataclass(frozen=True)
class PromptRows:
    """Rows of one split as prompts with their answers, made on access."""

    task: str
    table: Any
    location: str

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> Sample:
        return Sample(f"{self.location}, row {index}", *_text(self.task, self.table[index]))


def _text(task: str, row: Mapping[str, Any]) -> tuple[str, str]:
    return (prompted if task in GLUE else domain_text)(task, row)


def write_text_sources(texts: Path, sources: Mapping[str, TextSource]) -> None:
    """Write sources.json into the folder of texts."""
    write_json(texts / SOURCES, {task: source.model_dump() for task, source in sources.items()})


def read_text_sources(texts: Path) -> dict[str, TextSource]:
    """Return every task of the folder of texts. Raises: MissingPath before they are prepared."""
    raw: dict[str, dict[str, Any]] = read_json(texts / SOURCES)
    return {task: TextSource.from_mapping(entry, task) for task, entry in raw.items()}


def load_texts(texts: Path, task: str, split: str) -> PromptRows:
    """Return one split of a task. Raises: UnknownKey; whatever opening the table raises."""
    return PromptRows(task, *open_rows(texts, task, split))


def open_rows(texts: Path, task: str, split: str) -> tuple[Any, str]:
    """Return the rows of one split, and their name in messages."""
    sources = read_text_sources(texts)
    require_known(f"{texts}: task", task, sources)
    source = sources[task]
    require_known(f"{task}: split", split, source.splits)
    source_split = source.splits[split]
    if source.kind == "folder":
        location = Location(texts / source.location)
    else:
        location = Location(source.location, source.revision, source.config)
    return open_table(location, source_split), f"{task} ({source_split})"


def described_task(texts: Path, task: str, source: TextSource) -> dict[str, Any]:
    """Return a task's entry in the report: source, rows per split, the first prompt and answer.

    For texts on the hub only the source: nothing is fetched for the report.
    """
    if source.kind != "folder":
        return source.model_dump()
    tables = {split: open_rows(texts, task, split)[0] for split in source.splits}
    row = next(iter(tables.values()))[0]
    prompt, answer = (row["prompt"], row["target"]) if "target" in row else _text(task, row)
    counts = {split: len(table) for split, table in tables.items()}
    example = {"prompt": prompt, "answer": answer.strip()}
    return source.model_dump() | {"rows": counts, "example": example}


@dataclass(frozen=True)
class TokenizedExample:
    """Token ids of the input, and the token to learn at each output position, or IGNORED."""

    ids: list[int]
    labels: list[int]


def tokenized_example(sample: Sample, reader: Reader) -> TokenizedExample:
    """Tokenize a sample. Raises: BadData for one without a target, or cut before it."""
    if sample.target is None or sample.messages is not None:
        way_out = 'give "input" and "target", or "prompt" and "completion"'
        raise BadData(sample.origin, "has no target", way_out)
    if reader.inputs.kind == "pair":
        tokens = reader.tokens(sample)
        return TokenizedExample(tokens.ids, tokens.target or [])
    # one text: a token that reaches over the border belongs to the completion
    text = sample.text + sample.target
    cut = {"truncation": True, "max_length": reader.length}
    encoded: Any = reader.tokenizer(text, return_offsets_mapping=True, **cut)
    ids: list[int] = reader.ids(sample, text)
    ends = [end for _, end in encoded["offset_mapping"]]
    first = next((index for index, end in enumerate(ends) if end > len(sample.text)), None)
    if first is None:
        problem = f"is cut before its completion, at {reader.length} tokens"
        raise BadData(sample.origin, problem, "raise fine_tune.tokens")
    return TokenizedExample(ids, [IGNORED] * first + ids[first:])


def example_batch(examples: Sequence[TokenizedExample], pad: int) -> dict[str, Tensor]:
    """Return ids, masks and labels (samples, longest), padded on the right."""
    ids, attention_mask = padded([example.ids for example in examples], pad)
    labels, mask = padded([example.labels for example in examples], pad)
    labels = labels.masked_fill(mask == 0, IGNORED)
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def text_batches(
    base: Path, texts: Path, task: str, samples: int, seed: int, size: int, reading: Reading
) -> list[Batch]:
    """Return drawn texts of a task as batches for calibration or adapters.

    samples: at most all of the split.   Raises: BadData for a text cut before its answer.
    """
    takes = input_of(skeleton(base))
    reader = reader_for([base], takes, reading.tokens)
    prompts = load_texts(texts, task, reading.split)
    indices = draw_indices(task, len(prompts), min(samples, len(prompts)), seed).tolist()
    # batches of `size` however much is padded: others would change the last bits of the scores
    unlimited = float("inf")
    if takes.kind == "pair":
        batches = list(token_batches(prompts, indices, reader, size, unlimited))
        if reading.decoder == "start":
            # decoders read their start token alone
            for batch in batches:
                ones = torch.ones(len(batch["input_ids"]), 1, dtype=torch.long)
                batch.pop(COUNTED, None)
                batch["decoder_input_ids"] = ones * (takes.start or 0)
                batch["decoder_attention_mask"] = ones
        return batches
    if reading.counted == "all":
        return list(token_batches(prompts, indices, reader, size, unlimited))
    return list(_marked([prompts[i] for i in indices], reader, size, reading.counted))


def plan_of_reading(base: Path, reading: Reading) -> BlockPlan | None:
    """Return the plan that counts the tokens of `reading`; None for the model's own."""
    if reading.counted == "all":
        return None
    plan = plan_for(skeleton(base))
    stacks = (replace(stack, mask=COUNTED) for stack in plan.stacks)
    return BlockPlan(*stacks, token_rule=plan.token_rule)


def _marked(samples: Sequence[Sample], reader: Reader, size: int, counted: str) -> Iterator[Batch]:
    """Yield prompts with answers as one text, with labels where tokens count, longest first."""
    examples = [tokenized_example(sample, reader) for sample in samples]
    examples.sort(key=lambda example: -len(example.ids))
    for begin in range(0, len(examples), size):
        batch = example_batch(examples[begin : begin + size], reader.pad)
        if counted == "prompt":
            unread = (batch["attention_mask"] == 0) | (batch["labels"] != IGNORED)
            batch["labels"] = batch["input_ids"].masked_fill(unread, IGNORED)
        yield batch
