"""From where the data of every task lie to the batches a calibration reads: opened, drawn, checked,
prepared for one model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from featcal.data.batches import Batch, Batches
from featcal.data.images import Pictures, Preprocess
from featcal.data.inputs import input_of
from featcal.data.load import load_pictures
from featcal.data.place import Place, place_of
from featcal.data.sampling import draw_indices
from featcal.data.splits import open_pictures
from featcal.data.text import load_text
from featcal.data.tokens import reader_for, token_batches
from featcal.models.skeleton import skeleton
from featcal.settings import require

HELD_OUT, LEAST_HELD_OUT = 64, 16  # samples of a task on which a calibration is measured


@dataclass(frozen=True)
class Draw:
    """Which samples of each task, in which batches.

    samples: how many of each task, drawn by `seed`.   batch: how many in memory at a time.   split:
    of the data to draw from.
    behind:  so many come before them in the order drawn and are left out.
    tokens:  at most so many of a text; None for the usual number.   dtype: of what the model is
             given as numbers.
    """

    samples: int
    seed: int
    batch: int
    split: str = "train"
    tokens: int | None = None
    dtype: torch.dtype = torch.float32
    behind: int = 0

    def of(self, task: str, place: Place, count: int) -> list[int]:
        """The samples of one task that has `count` of them at a place. Raises: BadSetting for too
        few.
        """
        enough = f"must be at most {count}, the number of samples of {task} ({place.source})"
        require(self.behind + self.samples <= count, "samples", self.behind + self.samples, enough)
        return draw_indices(task, count, self.behind + self.samples, self.seed)[
            self.behind :
        ].tolist()


def load_batches(
    data: Mapping[str, str | Path],
    model: str | Path,
    samples: int = 256,
    seed: int = 42,
    *,
    batch: int = 32,
    split: str = "train",
    tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Batches]:
    """What `calibrate`, `merge`, `tune` and `surgery` take as `batches`: drawn samples of every
    task, prepared for one model.

    data:    by task a folder or file of pictures or texts, or a data set of the hub,
             owner/name[@revision][:configuration].
    model:   the folder of the base model, which says what its family is given, and holds its
             processor or tokenizer.
    samples: of each task, drawn by `seed` as `featcal calibrate` draws them; no label is used.
    batch: how many at a time.
    split:   of the data to draw from.   tokens: at most so many of a text; 512, or what the model
             can, where left out.
    dtype:   of pictures.
    Returns: per task what yields keyword dictionaries for the model's forward, the same ones
    whenever it is iterated.
    Raises:  MissingPath; BadSetting for fewer samples than asked for; BadData, BadFile;
             HubUnreachable, NotOnHub.
    """
    require(
        isinstance(data, Mapping),
        "load_batches",
        type(data).__name__,
        "must be a dictionary of places by task",
    )
    for name, number, least in (("samples", samples, 1), ("batch", batch, 1), ("seed", seed, 0)):
        require(number >= least, f"load_batches.{name}", number, f"must be at least {least}")
    places = {task: place_of("load_batches", str(place)) for task, place in data.items()}
    return drawn(
        skeleton(model)[0], [Path(model)], places, Draw(samples, seed, batch, split, tokens, dtype)
    )


def drawn(
    model: nn.Module, folders: Sequence[Path], places: Mapping[str, Place], draw: Draw
) -> dict[str, Batches]:
    """The batches of every task, in the order of names; drawn samples are read here, so that a bad
    one is found at once.

    model:    as it is calibrated; its numbers may be on meta.
    folders:  where its processor or tokenizer may lie, the first that has one counts.
    Raises:   BadData; BadSetting for fewer samples than asked for; whatever reading the data
              raises.
    """
    takes = input_of(model)
    if takes.kind == "pictures":
        preprocess = Preprocess.from_folder(processor_folder(folders))
        return {
            task: picture_batches(task, place, preprocess, draw)
            for task, place in sorted(places.items())
        }
    reader = reader_for(folders, takes, draw.tokens)
    batches = {}
    for task, place in sorted(places.items()):
        samples = load_text(place, draw.split)
        batches[task] = token_batches(
            samples, draw.of(task, place, len(samples)), reader, draw.batch
        )
    return batches


def held_out(
    model: nn.Module, folders: Sequence[Path], places: Mapping[str, Place], draw: Draw
) -> dict[str, Batches]:
    """Batches of samples that `drawn` does not take: the next ones of the same draw, at most
    HELD_OUT.

    A task that has fewer than LEAST_HELD_OUT left is left out. Raises: as drawn.
    """
    pictures, found = input_of(model).kind == "pictures", {}
    for task, place in sorted(places.items()):
        count = len(open_pictures(place, draw.split) if pictures else load_text(place, draw.split))
        left = min(HELD_OUT, count - draw.samples)
        if left >= LEAST_HELD_OUT:
            found |= drawn(
                model, folders, {task: place}, replace(draw, samples=left, behind=draw.samples)
            )
    return found


def processor_folder(folders: Sequence[Path]) -> Path:
    """The first folder that says how pictures are prepared, else the first."""
    names = ("preprocessor_config.json", "processor_config.json")
    return next(
        (folder for folder in folders if any((folder / name).is_file() for name in names)),
        folders[0],
    )


def picture_batches(task: str, place: Place, preprocess: Preprocess, draw: Draw) -> Batches:
    """The drawn pictures of one task, decoded now and normalised batch by batch."""
    pictures = load_pictures(place, draw.split, preprocess)
    held = Pictures(pictures.pixels[np.array(draw.of(task, place, len(pictures)))], preprocess)

    def made() -> Iterator[Batch]:
        for batch in held.batches(None, draw.batch):
            yield {name: value.to(draw.dtype) for name, value in batch.items()}

    return Batches(len(held), 0, made)
