"""Where the texts of language tasks are: one file, outputs/<suite>/texts/sources.json, and their
rows as samples for a model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.data.places import Location, open_table
from featcal.data.texts import Sample
from featcal.files import read_json, write_json
from featcal.settings import Settings
from reproduction.data.domains import domain_text
from reproduction.data.glue import GLUE, prompted
from reproduction.experiments.runs import require_known

SOURCES = "sources.json"


class TextSource(Settings):
    """One task. `location`: a folder below the texts, or a hub id with its pinned revision and
    configuration.

    description: what a drawn task is about, for readers; empty for public texts and the user's.
    """

    location: str
    kind: str  # "folder" | "hub"
    paper_name: str
    splits: Mapping[str, str]  # train, validation, test -> the split's own name
    revision: str | None = None
    config: str | None = None
    description: str = ""


@dataclass(frozen=True)
class Prompts:
    """Rows of one split as prompts with what should follow them, made when asked for."""

    task: str
    table: Any
    place: str

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> Sample:
        return Sample(f"{self.place}, row {index}", *_text(self.task, self.table[index]))


def _text(task: str, row: Mapping[str, Any]) -> tuple[str, str]:
    made = prompted if task in GLUE else domain_text
    return made(task, row)


def write_text_sources(texts: Path, sources: Mapping[str, TextSource]) -> None:
    """Write sources.json into the folder of texts."""
    write_json(texts / SOURCES, {task: source.model_dump() for task, source in sources.items()})


def read_text_sources(texts: Path) -> dict[str, TextSource]:
    """Every task of the folder of texts. Raises: MissingPath when they are not prepared."""
    raw: dict[str, dict[str, Any]] = read_json(texts / SOURCES)
    return {task: TextSource.from_mapping(entry, task) for task, entry in raw.items()}


def load_texts(texts: Path, task: str, split: str) -> Prompts:
    """One split of one task. Raises: UnknownKey for a task or split that is not there; whatever
    opening the table raises.
    """
    table, place = open_rows(texts, task, split)
    return Prompts(task, table, place)


def open_rows(texts: Path, task: str, split: str) -> tuple[Any, str]:
    """The rows of one split, and how messages call it."""
    sources = read_text_sources(texts)
    require_known(f"{texts}: task", task, sources)
    source = sources[task]
    require_known(f"{task}: split", split, source.splits)
    own = source.splits[split]
    lies = (
        Location(texts / source.location)
        if source.kind == "folder"
        else Location(source.location, source.revision, source.config)
    )
    return open_table(lies, own), f"{task} ({own})"


def told(texts: Path, task: str, source: TextSource) -> dict[str, Any]:
    """What the report says of one task: its source, rows of every split, the first prompt with its
    answer.

    Of texts on the hub the source alone: nothing is fetched for the report's sake.
    """
    if source.kind != "folder":
        return source.model_dump()
    tables = {split: open_rows(texts, task, split)[0] for split in source.splits}
    row = next(iter(tables.values()))[0]
    prompt, answer = (row["prompt"], row["target"]) if "target" in row else _text(task, row)
    counts = {split: len(table) for split, table in tables.items()}
    return source.model_dump() | {
        "rows": counts,
        "example": {"prompt": prompt, "answer": answer.strip()},
    }
