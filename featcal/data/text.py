"""Text samples of one task: lines of a .txt file, objects of a .jsonl file, rows of parquet files
or of a hub data set.

A sample is a plain text, a prompt with what follows it, or a chat. Read one by one, when asked for;
knows nothing of tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from featcal.data.place import Place, require_split
from featcal.data.splits import LABEL, open_table, parquet_files
from featcal.errors import BadData, BadFile, MissingPath

LINES = (".jsonl", ".txt")
# what a row may be, by its keys; the first that fits counts
FORMS = (("messages",), ("prompt", "completion"), ("input", "target"), ("text",))
WANTED = 'give "text", or "messages" (each with "role" and "content"), or "prompt" and "completion", or "input" and "target"'


@dataclass(frozen=True)
class Sample:
    """A text, with a target where something follows from it; or a chat. `place` names it in
    messages.
    """

    place: str
    text: str = ""
    target: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    label: int | str | None = None


class Samples(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Sample: ...


def load_text(place: Place, split: str, labelled: bool = False) -> Samples:
    """The samples of a file, of one split of a folder (<split>.parquet, .jsonl or .txt), or of a
    hub data set.

    labelled: with their labels, where a table has a column of them.
    Raises: MissingPath, BadFile, BadData, TruncatedFile, HubUnreachable.
    """
    require_split(split)
    if place.on_hub:
        return Rows(open_table(place, split), f"{place.source} ({split})", labelled)
    path = Path(place.source)
    if path.is_dir():
        path = split_file(path, split)
    if path.suffix in LINES:
        return Lines(path)
    if path.suffix == ".parquet":
        return Rows(open_table(place, split), str(place.source), labelled)
    raise BadFile(
        path,
        "is no file of text that can be read",
        "give a .txt, .jsonl or .parquet file, or a folder that holds one",
    )


def split_file(folder: Path, split: str) -> Path:
    """The file of a split, the first one where parquet comes in several. Raises: MissingPath
    telling what is there.
    """
    found = [*parquet_files(folder, split), *(folder / f"{split}{suffix}" for suffix in LINES)]
    present = [path for path in found if path.is_file()]
    if not present:
        there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        way_out = f"put {split}.parquet, {split}.jsonl or {split}.txt there, or name another split (the folder has: {there})"
        raise MissingPath(folder / f"{split}.jsonl", f"the split {split!r}", way_out)
    return present[0]


@dataclass(frozen=True)
class Labelled:
    """Texts with the number of each one's class."""

    place: str
    samples: Sequence[Sample]
    labels: Sequence[int]
    classes: Sequence[str]


def load_labelled(place: Place, split: str, classes: Sequence[str] | None = None) -> Labelled:
    """The samples of one split with their labels: the key "label" of each row, a name or a number,
    else its target.

    classes: names by number; left out, those of the data set, else the labels that occur, sorted,
    or their numbers.
    Raises: as load_text; BadData for a row without a label, or with one that has no name.
    """
    samples = load_text(place, split, labelled=True)
    read = [samples[i] for i in range(len(samples))]
    told = f"{place.source} ({split})"
    known = classes or getattr(samples, "classes", None)
    values = [sample.label if sample.label is not None else sample.target for sample in read]
    for sample, value in zip(read, values, strict=True):
        if value is None:
            raise BadData(
                sample.place,
                "has no label",
                'give "label" (a name or a number from 0) beside the text, or a target',
            )
    if all(isinstance(value, int) for value in values):
        known = known or [
            str(number)
            for number in range(max(int(value) for value in values if value is not None) + 1)
        ]
        numbers = [int(value) for value in values if value is not None]
    else:
        known = known or sorted({str(value) for value in values})
        numbers = [known.index(str(value)) if str(value) in known else -1 for value in values]
    wrong = next((i for i, number in enumerate(numbers) if not 0 <= number < len(known)), None)
    if wrong is not None:
        problem = f"its label {values[wrong]!r} is none of the classes {', '.join(known[:5])}"
        raise BadData(read[wrong].place, problem, "check the names of the classes")
    if len(known) < 2:
        raise BadData(told, f"holds the one label {known[0]!r}", "accuracy needs two classes")
    return Labelled(told, read, numbers, known)


class Lines:
    """The lines of a .txt or .jsonl file that hold more than blanks; only where each begins is kept
    in memory.
    """

    def __init__(self, path: Path):
        self.path = path
        self.places: list[tuple[int, int]] = []  # (number of the line, its first byte)
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self.places.append((number, offset))
                offset += len(line)
        if not self.places:
            raise BadData(path, "holds no text", "put at least one sample there, one a line")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int, /) -> Sample:
        number, offset = self.places[index]
        place = f"{self.path}, line {number}"
        with self.path.open("rb") as file:
            file.seek(offset)
            line = file.readline()
        try:
            text = line.decode("utf-8-sig" if offset == 0 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise BadData(
                place, f"not text in UTF-8 ({error.reason})", "save the file as UTF-8"
            ) from None
        if self.path.suffix == ".txt":
            return Sample(place, text)
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadData(place, f"not JSON ({error})", "put one object on each line") from None
        return sample_of(place, row)


class Rows:
    """The rows of a table."""

    def __init__(self, table: Any, place: str, labelled: bool = False):
        self.place = place
        form = [
            *form_of(place, table.column_names),
            *([LABEL] if labelled and LABEL in table.column_names else []),
        ]
        self.classes: Sequence[str] | None = (
            getattr(table.features[LABEL], "names", None) if LABEL in form else None
        )
        self.table = table.select_columns(
            form
        )  # a row without the columns that are not asked for, such as pictures

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int, /) -> Sample:
        return sample_of(f"{self.place}, row {index}", self.table[index])


def form_of(place: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The keys of a row that make the sample. Raises: BadData naming those that are there."""
    form = next((form for form in FORMS if set(form) <= set(keys)), None)
    if form is None:
        raise BadData(
            place, f"holds {', '.join(keys) or 'nothing'}, which makes no text sample", WANTED
        )
    return form


def sample_of(place: str, row: object) -> Sample:
    """One row as a sample. Raises: BadData naming the place and the key."""
    if not isinstance(row, Mapping):
        raise BadData(place, f"is a {type(row).__name__}, not an object", WANTED)
    form = form_of(place, list(row))
    label = row.get(LABEL)
    label = label if isinstance(label, int | str) and not isinstance(label, bool) else None
    if form == ("messages",):
        return Sample(place, messages=chat(place, row["messages"]), label=label)
    for key in form:
        if not isinstance(row[key], str):
            raise BadData(place, f"{key!r} is {type(row[key]).__name__}, not text", WANTED)
    return Sample(place, row[form[0]], row[form[1]] if len(form) == 2 else None, label=label)


def chat(place: str, messages: object) -> list[dict[str, str]]:
    """The messages of a chat. Raises: BadData."""
    given = messages if isinstance(messages, list) else []
    found = [
        {key: m[key] for key in ("role", "content")}
        for m in given
        if isinstance(m, Mapping) and _speaks(m)
    ]
    if not found or len(found) < len(given):
        raise BadData(
            place,
            "'messages' is no list of messages",
            'each message is {"role": "user", "content": "..."}',
        )
    return found


def _speaks(message: Mapping[str, Any]) -> bool:
    return all(isinstance(message.get(key), str) for key in ("role", "content"))
