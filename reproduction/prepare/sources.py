"""Read and write sources.json, which names the images and classes of every task, and load splits.

Decoded images are kept in .featcal/decoded of the project that holds the data. Data outside of a
project are decoded into memory every time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.errors import MissingPath
from featcal.files import read_json, write_json
from featcal.settings import Settings
from reproduction.experiments import require_known
from reproduction.prepare.suite import Processor
from reproduction.results import project_root

if TYPE_CHECKING:
    from featcal.data.images import ImageSet
    from reproduction.prepare.sentences import SentenceSet

SOURCES = "sources.json"


class Source(Settings):
    """The images of one task.

    location: a folder below the data folder, or a hub id with revision and configuration.   splits:
    the source's name of train, validation, test.   columns: the source's names of image and label.
    """

    location: str
    kind: str  # "folder" | "hub"
    paper_name: str
    description: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    splits: Mapping[str, str]
    revision: str | None = None
    config: str | None = None
    columns: Mapping[str, str] | None = None
    processor: Processor = "pil"

    def told(self) -> dict[str, Any]:
        """Return its entry in a file, with the processor where it is not the usual one."""
        return self.model_dump(exclude={"processor"} if self.processor == "pil" else set())


def write_sources(data: Path, sources: Mapping[str, Source]) -> None:
    """Write sources.json into the data folder."""
    write_json(data / SOURCES, {task: source.told() for task, source in sources.items()})


def read_sources(data: Path) -> dict[str, Source]:
    """Return every task of the data folder. Raises: MissingPath before the images are prepared."""
    raw: dict[str, dict[str, Any]] = read_json(data / SOURCES)
    return {
        task: Source.from_mapping(entry, f"{data / SOURCES}: {task}") for task, entry in raw.items()
    }


def load_task(data: Path, task: str, split: str, model: Path) -> "ImageSet | SentenceSet":
    """Return one split of a task: images preprocessed for the model, or sentences in its tokens.

    data: a folder with sources.json, or with one folder of sentences for every task.   split:
    train, validation or test; of sentences also stream.   model: the folder of the model.
    Raises: UnknownKey for a task or split; whatever reading the rows raises.
    """
    from featcal.data.images import Preprocess
    from reproduction.prepare.decoded import Split, mapped_images
    from reproduction.prepare.sentences import load_sentences

    if not (data / SOURCES).is_file() and (data / task).is_dir():
        return load_sentences(data / task, split, model)
    sources = read_sources(data)
    require_known(f"{data}: task", task, sources)
    source = sources[task]
    require_known(f"{task}: split", split, source.splits)
    hub: dict[str, Any] = {}
    if source.kind == "hub":
        hub = {name: getattr(source, name) for name in ("revision", "config", "columns")}
    location = source.location if hub else data / source.location
    preprocess = Preprocess.from_folder(model, source.processor)
    # models are scored on all of a split, but see a few hundred of its training images
    whole = split != "train"
    asked = Split(location, source.splits[split], preprocess, whole, source.classes, **hub)
    folder = decoded_folder(data)
    return mapped_images(folder, asked) if folder else asked.load()


def decoded_folder(data: Path) -> Path | None:
    """Return where decoded images are kept, apart from the outputs, which DVC removes.

    None for data in no project.
    """
    try:
        return project_root(data) / ".featcal" / "decoded"
    except MissingPath:
        return None
