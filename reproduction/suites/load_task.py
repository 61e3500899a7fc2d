"""The images or sentences of one task of a suite, prepared for one model.

Images are decoded once for all stages: they lie in .featcal/decoded of the project that holds the
data. Data outside of a project are decoded into memory every time.
"""

from pathlib import Path

from featcal.data.images import ImageSet, Preprocess
from featcal.errors import MissingPath
from featcal.settings import project_root
from reproduction.data.decoded import Split, mapped_images
from reproduction.data.sentences import SentenceSet, load_sentences
from reproduction.experiments.runs import require_known
from reproduction.suites.sources import SOURCES, read_sources


def load_task(data: Path, task: str, split: str, model_folder: Path) -> ImageSet | SentenceSet:
    """One split of one task: images resized as the model's preprocessor_config.json and the suite's
    processor say, their pixels read-only; or sentences in the tokens of the model's tokenizer.

    data: the suite's data folder with sources.json, or a folder with one of sentences for every
    task.
    split: train, validation or test; of sentences also stream, what adapters may see without
    labels.
    Raises: UnknownKey for a task or split that is not there; whatever reading the rows raises.
    """
    if not (data / SOURCES).is_file() and (data / task).is_dir():
        return load_sentences(data / task, split, model_folder)
    sources = read_sources(data)
    require_known(f"{data}: task", task, sources)
    source = sources[task]
    require_known(f"{task}: split", split, source.splits)
    hub = (
        {"revision": source.revision, "config": source.config, "columns": source.columns}
        if source.kind == "hub"
        else {}
    )
    location = source.location if hub else data / source.location
    preprocess = Preprocess.from_folder(model_folder, source.processor)
    # models are scored on all of a split, but see a few hundred of its training images
    whole = split != "train"
    asked = Split(location, source.splits[split], preprocess, whole, source.classes, **hub)  # type: ignore[arg-type]
    folder = decoded_folder(data)
    return mapped_images(folder, asked) if folder else asked.load()


def decoded_folder(data: Path) -> Path | None:
    """Where decoded images are kept: beside the parts of unfinished stages, not among the outputs,
    which DVC removes.

    None for data that lie in no project.
    """
    try:
        return project_root(data) / ".featcal" / "decoded"
    except MissingPath:
        return None
