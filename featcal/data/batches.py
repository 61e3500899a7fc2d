"""Draw samples of every task and make batches of them for one model's forward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from featcal.data import texts as text_data
from featcal.data.images import PROCESSORS, EncodedRows, ImageSet, Indices, Preprocess
from featcal.data.places import Columns, Location, location_of, open_images
from featcal.data.texts import ModelInput, Reader, Sample, TokenizedText, input_of
from featcal.errors import LOG, BadData, counted
from featcal.models.batch import IGNORED, Batch
from featcal.models.stored import skeleton
from featcal.settings import require

# computed tokens per token that counts, at most: below, more batches cost more than padding
PADDED = 1.2


@dataclass(frozen=True)
class DrawnBatches:
    """Keyword dictionaries for a model's forward; `longest` counts tokens of a text or target."""

    samples: int
    longest: int
    make: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.make()


def draw_indices(task: str, count: int, samples: int, seed: int) -> NDArray[np.int64]:
    """Draw `samples` of `count` samples without repetition. Raises: BadSetting for too few.

    The generator is keyed with (seed, crc32(task), crc32("calibration")): a larger draw of the same
    seed begins with the smaller one, and no draw depends on another task.
    """
    expected = f"must be at most {count}, the number of samples of {task}"
    require(samples <= count, "samples", samples, expected)
    generator = np.random.default_rng([seed, crc32(task.encode()), crc32(b"calibration")])
    return generator.permutation(count)[:samples].astype(np.int64)


@dataclass(frozen=True)
class Draw:
    """Which samples of each task are drawn, and in which batches."""

    samples: int  # of each task
    seed: int
    batch: int  # samples in memory at a time
    split: str = "train"
    tokens: int | None = None  # maximum per text; None for the default
    dtype: torch.dtype = torch.float32  # of floating-point inputs
    skip: int | None = None  # drawn samples to leave out, and all that equal others; None: neither
    columns: Columns = None
    expert: Path | None = None  # says how texts are prepared if no other folder does


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
    columns: Mapping[str, str] | None = None,
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
        columns: the column of a key, where its name differs, such as {"text": "question"}.
    Returns: per task an iterable of keyword dictionaries for the model's forward, the same ones
        in every iteration.
    Raises: MissingPath; BadSetting for fewer samples than asked for; BadData, BadFile;
        HubUnreachable, NotOnHub.
    """
    expected = "must be a dictionary of paths by task"
    require(isinstance(data, Mapping), "load_batches", type(data).__name__, expected)
    limits = ("samples", samples, 1), ("batch", batch, 1), ("seed", seed, 0), ("tokens", tokens, 1)
    for name, number, least in limits:
        fits = name == "tokens" if number is None else number >= least
        require(fits, f"load_batches.{name}", number, f"must be at least {least}")
    wrong = [type(path).__name__ for path in data.values() if not isinstance(path, str | Path)]
    require(not wrong, "load_batches", ", ".join(wrong), "must be paths or names of data sets")
    locations = {task: location_of("load_batches", str(path)) for task, path in data.items()}
    draw = Draw(samples, seed, batch, split, tokens, dtype, columns=columns)
    return draw_batches(skeleton(model), [Path(model)], locations, draw)


def draw_batches(
    model: nn.Module, folders: Sequence[Path], locations: Mapping[str, Location], draw: Draw
) -> dict[str, DrawnBatches]:
    """Draw every task's batches, prepared by the first folder with a processor or tokenizer."""
    inputs, batches = input_of(model, draw.tokens), {}
    if inputs.kind == "pictures":
        with_processor = (f for f in folders if any((f / name).is_file() for name in PROCESSORS))
        preprocess = Preprocess.from_folder(next(with_processor, folders[0]))
    else:
        reader = text_data.reader_for(folders, inputs, draw.tokens, draw.expert)
    for task, location in sorted(locations.items()):
        samples = samples_at(location, inputs, draw)
        drawn = draw_indices(task, len(samples), (draw.skip or 0) + draw.samples, draw.seed)
        if inputs.kind == "pictures":
            pixels = EncodedRows(location, draw.split, samples, preprocess)[drawn]
            chosen = unseen(task, (picture.tobytes() for picture in pixels), draw.skip)
            images = ImageSet(pixels[chosen], preprocess, dtype=draw.dtype)
            make = partial(images.batches, None, draw.batch)  # normalises when it is asked for
            batches[task] = DrawnBatches(len(images), 0, make)
        else:
            chosen = unseen(task, (str(reader.tokens(samples[r])) for r in drawn), draw.skip)
            batches[task] = token_batches(samples, drawn[chosen], reader, draw.batch)
    return batches


def unseen(task: str, contents: Iterable[object], skip: int | None) -> list[int] | slice:
    """Return the positions of samples after the first `skip` that equal none before them."""
    if skip is None:
        return slice(None)
    numbered = [*enumerate(map(hash, contents))]
    first = {content: number for number, content in reversed(numbered)}
    chosen, count = sorted(n for n in first.values() if n >= skip), len(numbered) - skip
    if len(chosen) < min(2, count):
        problem = f"only {len(chosen)} of {count} samples differ from all others"
        raise BadData(f"--data {task}", problem, "give more samples, of which at least 2 differ")
    if equal := count - len(chosen):
        LOG.warning(f"{task}: {counted(equal, 'sample')} left out, equal to others")
    return chosen


def samples_at(location: Location, inputs: ModelInput, draw: Draw) -> Any:
    """Return all samples of a task. Raises: as open_images and load_text."""
    if inputs.kind == "pictures":
        return open_images(location, draw.split, False, draw.columns)
    return text_data.load_text(location, draw.split, draw.columns)


def token_batches(
    samples: Sequence[Sample], rows: Indices, reader: Reader, size: int, most: float = PADDED
) -> DrawnBatches:
    """Tokenise the samples in these rows; batch the longest first, to show lack of memory at once.

    size: samples per batch, at most.   most: computed tokens per token that counts, at most.
    """
    texts, pad, inputs = [reader.tokens(samples[row]) for row in rows], reader.pad, reader.inputs
    texts.sort(key=lambda text: (-len(text.ids), -len(text.target or ())))  # ties stay as drawn
    parts = cut(texts, 1 if inputs.alone else size, most)
    longest = max(max(len(text.ids), len(text.target or ())) for text in texts)
    return DrawnBatches(len(texts), longest, lambda: (collate(p, pad, inputs) for p in parts))


def cut(ordered: Sequence[TokenizedText], size: int, most: float) -> list[list[TokenizedText]]:
    """Cut texts in order into batches of at most `size` texts, padded to at most `most` times."""
    parts: list[list[TokenizedText]] = []
    for text in ordered:
        together = [*parts[-1], text] if parts else [text]
        sizes = [(len(t.ids), len(t.target or ())) for t in together]
        computed = len(together) * sum(map(max, zip(*sizes, strict=True)))
        if parts and len(together) <= size and computed <= most * sum(map(sum, sizes)):
            parts[-1] = together
        else:
            parts.append([text])
    return parts


def collate(texts: Sequence[TokenizedText], pad: int, inputs: ModelInput) -> dict[str, Tensor]:
    """Return texts as one batch: (texts, longest) ids and masks; labels are -100 at padding."""
    ids, mask = padded([text.ids for text in texts], pad)
    batch = {"input_ids": ids, "attention_mask": mask}
    if inputs.kind != "pair":
        return batch
    targets = [text.target or [] for text in texts]
    if inputs.labels:
        return batch | {"labels": padded(targets, IGNORED)[0]}
    ids, mask = padded([[inputs.start or 0, *target[:-1]] for target in targets], pad)
    return batch | {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def padded(rows: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return token ids as one (rows, longest) tensor, filled on the right, and its mask."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return pad_sequence(ids, batch_first=True, padding_value=pad), mask
