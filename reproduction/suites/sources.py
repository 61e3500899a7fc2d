"""Where a task's images are and what its classes are called: one file,
outputs/<suite>/data/sources.json, for every suite.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from featcal.files import read_json, write_json
from featcal.settings import Settings

SOURCES = "sources.json"
Processor = Literal["pil", "torchvision"]  # what resizes pictures


class Source(Settings):
    """One task. `location`: a folder below the data folder, or a hub id with its pinned revision
    and configuration.
    """

    location: str
    kind: str  # "folder" | "hub"
    paper_name: str
    description: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    splits: Mapping[str, str]  # train, validation, test -> the split's own name
    revision: str | None = None
    config: str | None = None
    columns: Mapping[str, str] | None = None  # the source's own column -> image, label
    processor: Processor = "pil"  # what resizes its pictures

    def told(self) -> dict[str, Any]:
        """Its entry in a file: the processor is written where it is not the usual one."""
        entry = self.model_dump()
        return (
            entry
            if self.processor != "pil"
            else {name: value for name, value in entry.items() if name != "processor"}
        )


def write_sources(data: Path, sources: Mapping[str, Source]) -> None:
    """Write sources.json into the data folder."""
    write_json(data / SOURCES, {task: source.told() for task, source in sources.items()})


def read_sources(data: Path) -> dict[str, Source]:
    """Every task of the data folder. Raises: MissingPath when the images are not prepared."""
    raw: dict[str, dict[str, Any]] = read_json(data / SOURCES)
    return {
        task: Source.from_mapping(entry, f"{data / SOURCES}: {task}") for task, entry in raw.items()
    }
