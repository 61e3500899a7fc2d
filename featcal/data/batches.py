"""Draw samples of every task and make batches of them for one model's forward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcal.data.images import Pictures, Preprocess, load_pictures
from featcal.data.places import Place, open_images, place_of
from featcal.data.texts import Input, Reader, Sample, Tokens, input_of, load_text, reader_for
from featcal.models.load import skeleton
from featcal.settings import require

Batch = dict[str, Tensor]
HELD_OUT, LEAST_HELD_OUT = 64, 16  # samples of a task on which a calibration is measured
# computed tokens per token that counts, at most: below, more batches cost more than padding
PADDED = 1.2
IGNORED = -100  # transformers' label of a token without a target


@dataclass(frozen=True)
class DrawnBatches:
    """Keyword dictionaries for a model's forward, the same ones in every iteration.

    longest: tokens of the longest text, prompt or target; 0 where there is no text.
    """

    samples: int
    longest: int
    make: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.make()


def draw_indices(task: str, count: int, samples: int, seed: int) -> NDArray[np.int64]:
    """Draw `samples` of `count` samples without repetition; no label is used.

    The first entries of a permutation by a generator keyed with (seed, crc32(task),
    crc32("calibration")): a larger draw of the same seed begins with the smaller one, and no draw
    depends on another task.
    Raises: BadSetting when there are fewer than `samples`.
    """
    expected = f"must be at most {count}, the number of samples of {task}"
    require(samples <= count, "samples", samples, expected)
    generator = np.random.default_rng([seed, crc32(task.encode()), crc32(b"calibration")])
    return generator.permutation(count)[:samples].astype(np.int64)


def batch_indices(task: str, count: int, batch: int, step: int, seed: int) -> NDArray[np.int64]:
    """Return the samples of one training step, (batch,): each at most once per epoch, the
    incomplete batch at its end left out.
    """
    batch = min(batch, count)
    epoch, place = divmod(step, count // batch)
    order = np.random.default_rng([seed, crc32(task.encode()), epoch]).permutation(count)
    return order[place * batch : (place + 1) * batch].astype(np.int64)


@dataclass(frozen=True)
class Draw:
    """Which samples of each task are drawn, and in which batches.

    samples: of each task, drawn by `seed`.   batch: samples in memory at a time.
    split: of the data to draw from.   tokens: maximum per text; None for the default.
    dtype: of floating-point inputs.   skip: so many of the drawn order are left out first.
    """

    samples: int
    seed: int
    batch: int
    split: str = "train"
    tokens: int | None = None
    dtype: torch.dtype = torch.float32
    skip: int = 0

    def of(self, task: str, place: Place, count: int) -> list[int]:
        """Return the drawn samples of a task that has `count`. Raises: BadSetting for too few."""
        wanted = self.skip + self.samples
        expected = f"must be at most {count}, the number of samples of {task} ({place.source})"
        require(wanted <= count, "samples", wanted, expected)
        return draw_indices(task, count, wanted, self.seed)[self.skip :].tolist()


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
) -> dict[str, DrawnBatches]:
    """Draw samples of every task and prepare them for one model, as `featcal calibrate` does.

    Args:
        data: by task a folder or file of pictures or texts, or a data set of the hub,
            owner/name[@revision][:configuration].
        model: folder of the base model, with its processor or tokenizer.
        samples: number of samples per task; no label is used.
        seed: which samples are drawn.
        batch: samples per batch.
        split: split to draw from.
        tokens: maximum tokens per text. Default: 512, or the model's limit.
        dtype: of pixel values.
    Returns: per task an iterable of keyword dictionaries for the model's forward, the same ones
        in every iteration.
    Raises: MissingPath; BadSetting for fewer samples than asked for; BadData, BadFile;
        HubUnreachable, NotOnHub.
    """
    expected = "must be a dictionary of places by task"
    require(isinstance(data, Mapping), "load_batches", type(data).__name__, expected)
    for name, number, least in (("samples", samples, 1), ("batch", batch, 1), ("seed", seed, 0)):
        require(number >= least, f"load_batches.{name}", number, f"must be at least {least}")
    places = {task: place_of("load_batches", str(place)) for task, place in data.items()}
    draw = Draw(samples, seed, batch, split, tokens, dtype)
    return drawn(skeleton(model)[0], [Path(model)], places, draw)


def drawn(
    model: nn.Module, folders: Sequence[Path], places: Mapping[str, Place], draw: Draw
) -> dict[str, DrawnBatches]:
    """Return the batches of every task, sorted by name; drawn samples are read and checked now.

    model: decides what is read; its weights may be on meta.
    folders: the first that has a processor or tokenizer counts.
    Raises: BadData; BadSetting for fewer samples than asked for; as load_pictures and load_text.
    """
    takes = input_of(model)
    if takes.kind != "pictures":
        reader, batches = reader_for(folders, takes, draw.tokens), {}
        for task, place in sorted(places.items()):
            samples = load_text(place, draw.split)
            chosen = draw.of(task, place, len(samples))
            batches[task] = token_batches(samples, chosen, reader, draw.batch)
        return batches
    names = ("preprocessor_config.json", "processor_config.json")
    having = (f for f in folders if any((f / name).is_file() for name in names))
    preprocess = Preprocess.from_folder(next(having, folders[0]))
    return {
        task: _picture_batches(task, place, preprocess, draw)
        for task, place in sorted(places.items())
    }


def held_out(
    model: nn.Module, folders: Sequence[Path], places: Mapping[str, Place], draw: Draw
) -> dict[str, DrawnBatches]:
    """Return batches of the next samples of the same draw, at most HELD_OUT per task.

    Tasks with fewer than LEAST_HELD_OUT left are skipped. Raises: as drawn.
    """
    pictures, held = input_of(model).kind == "pictures", {}
    for task, place in sorted(places.items()):
        read = open_images(place, draw.split, False) if pictures else load_text(place, draw.split)
        left = min(HELD_OUT, len(read) - draw.samples)
        if left >= LEAST_HELD_OUT:
            held |= drawn(
                model, folders, {task: place}, replace(draw, samples=left, skip=draw.samples)
            )
    return held


def _picture_batches(task: str, place: Place, preprocess: Preprocess, draw: Draw) -> DrawnBatches:
    """Decode the drawn pictures of one task now; normalise them batch by batch."""
    pictures = load_pictures(place, draw.split, preprocess)
    chosen: Pictures = pictures.take(draw.of(task, place, len(pictures)))

    def made() -> Iterator[Batch]:
        for batch in chosen.batches(None, draw.batch):
            yield {name: value.to(draw.dtype) for name, value in batch.items()}

    return DrawnBatches(len(chosen), 0, made)


def token_batches(
    samples: Sequence[Sample],
    chosen: Sequence[int],
    reader: Reader,
    size: int,
    most: float = PADDED,
) -> DrawnBatches:
    """Tokenise the chosen samples; batch them longest first, so that memory runs out at once.

    size: samples per batch, at most.   most: computed tokens per token that counts, at most.
    """
    read = [reader.tokens(samples[i]) for i in chosen]
    # stable: ties keep the order of the draw
    ordered = sorted(read, key=lambda tokens: (-len(tokens.ids), -len(tokens.target or ())))
    parts = cut(ordered, size, most)

    def made() -> Iterator[Batch]:
        for part in parts:
            yield batch(part, reader.pad, reader.takes)

    return DrawnBatches(
        len(ordered), max(max(len(t.ids), len(t.target or ())) for t in ordered), made
    )


def cut(ordered: Sequence[Tokens], size: int, most: float) -> list[list[Tokens]]:
    """Cut samples in their order into batches of at most `size` and `most` computed tokens per
    token that counts.
    """
    parts: list[list[Tokens]] = []
    for each in ordered:
        together = [*parts[-1], each] if parts else [each]
        longest = max(len(t.ids) for t in together) + max(len(t.target or ()) for t in together)
        computed, real = len(together) * longest, sum(t.count for t in together)
        if parts and len(together) <= size and computed <= most * real:
            parts[-1] = together
        else:
            parts.append([each])
    return parts


def batch(tokens: Sequence[Tokens], pad: int, takes: Input) -> Batch:
    """Return samples as one batch: (samples, longest) ids and masks; labels are -100 at padding."""
    ids, mask = padded([t.ids for t in tokens], pad)
    made = {"input_ids": ids, "attention_mask": mask}
    if takes.kind != "pair":
        return made
    targets = [t.target or [] for t in tokens]
    if takes.labels:
        labels, known = padded(targets, pad)
        return made | {"labels": labels.masked_fill(known == 0, IGNORED)}
    shifted, known = padded([[takes.start or 0, *target[:-1]] for target in targets], pad)
    return made | {"decoder_input_ids": shifted, "decoder_attention_mask": known}


def padded(rows: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return token ids as one (rows, longest) tensor, filled on the right, and its mask."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask
