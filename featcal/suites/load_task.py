"""The images of one task of a suite, prepared for one model."""

from pathlib import Path

from featcal.data.images import ImageSet, Preprocess
from featcal.data.load import load_images
from featcal.errors import UnknownKey
from featcal.suites.sources import read_sources


def load_task(data: Path, task: str, split: str, model_folder: Path) -> ImageSet:
    """One split of one task, resized as the model's preprocessor_config.json says.

    data: the suite's data folder with sources.json.   split: train, validation or test.
    Raises: UnknownKey for a task or split that is not there; whatever reading the images raises.
    """
    sources = read_sources(data)
    if task not in sources:
        raise UnknownKey(f"{data}: task", task, list(sources))
    source = sources[task]
    if split not in source.splits:
        raise UnknownKey(f"{task}: split", split, list(source.splits))
    preprocess = Preprocess.from_folder(model_folder)
    if source.kind == "folder":
        return load_images(data / source.location, source.splits[split], preprocess, classes=source.classes)
    return load_images(
        source.location,
        source.splits[split],
        preprocess,
        classes=source.classes,
        revision=source.revision,
        config=source.config,
        columns=source.columns,
    )
