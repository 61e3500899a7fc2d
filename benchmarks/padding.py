"""Texts: tokens that are computed for each one that counts, in batches of like length and in
batches as they were drawn.

python -m benchmarks.padding                 Lengths drawn from a seed. --data and --model: a file
of texts, cut by that model.
python -m benchmarks.padding --most "1.2"    Time of a calibration with batches that end before they
compute more for each token
                                             that counts, against batches of --batch texts, in
                                             turns.
"""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from benchmarks.block import SETTINGS, TOLERANCE
from benchmarks.measure import (
    arguments,
    averaged,
    in_turns,
    largest_difference,
    moved,
    ratio,
    seeded,
)
from featcal.calibration.calibrate import calibrate
from featcal.data.batches import PADDED, collate, cut, draw_indices, token_batches
from featcal.data.places import Location
from featcal.data.texts import ModelInput, TokenizedText, input_of, load_text, reader_for
from featcal.models.stored import skeleton

VOCABULARY = 1000
MEDIAN, SPREAD, LONGEST = (
    24,
    0.6,
    512,
)  # tokens of a text: the logarithm of their number is drawn from a normal distribution


@dataclass(frozen=True)
class LengthReader:
    """A reader whose samples are numbers of tokens; what the tokens are does not matter here."""

    takes: ModelInput = ModelInput("text")
    pad: int = 0

    def tokens(self, length: int) -> TokenizedText:
        """So many tokens."""
        return TokenizedText([1] * length)


def drawn_lengths(count: int, seed: int) -> list[int]:
    """Lengths of texts."""
    lengths = MEDIAN * (SPREAD * torch.randn(count, generator=seeded(seed))).exp()
    return lengths.round().clamp(1, LONGEST).int().tolist()


def counted(batches: Iterable[Mapping[str, Tensor]]) -> tuple[int, int]:
    """Tokens without padding, and tokens that a forward computes."""
    masks = [each["attention_mask"] for each in batches]
    return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


def shares(samples: Any, chosen: Sequence[int], reader: Any, size: int) -> dict[str, float]:
    """Computed tokens for each that counts, as calibration batches texts and in the order of the
    draw.
    """
    drawn = [
        [reader.tokens(samples[i]) for i in chosen[begin : begin + size]]
        for begin in range(0, len(chosen), size)
    ]
    ways = {
        "of like length": counted(token_batches(samples, chosen, reader, size, float("inf"))),
        f"that end before they compute more than {PADDED} for each": counted(
            token_batches(samples, chosen, reader, size)
        ),
        "as drawn": counted(collate(each, reader.pad, reader.takes) for each in drawn),
    }
    assert len({real for real, _ in ways.values()}) == 1, "the results differ"
    return {name: computed / real for name, (real, computed) in ways.items()}


def texts(seed: int, count: int) -> list[TokenizedText]:
    """Texts of drawn lengths, longest first."""
    lengths, g = sorted(drawn_lengths(count, seed), reverse=True), seeded(seed)
    return [
        TokenizedText(torch.randint(1, VOCABULARY, (length,), generator=g).tolist())
        for length in lengths
    ]


def encoder(width: int, layers: int) -> BertModel:
    """A BERT with random weights."""
    shape = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": max(1, width // 64),
    }
    config = BertConfig(**shape, num_hidden_layers=layers, vocab_size=VOCABULARY)
    return moved(BertModel(config, add_pooling_layer=False).eval(), 0, 0.02, keep=0.0)


def timed(args: Namespace, most: float) -> str:
    """How many times as long a calibration takes with the command's batches. Raises: AssertionError
    unless models are alike.
    """
    base, reader, made = encoder(args.width, args.layers), LengthReader(), []
    experts = {f"task{t}": moved(base, 1 + t, 0.002) for t in range(args.tasks)}
    models = {"merged": averaged(list(experts.values())), "base": base, "experts": experts}

    def run(most: float) -> None:
        parts = {
            task: cut(texts(t, args.samples), args.batch, most) for t, task in enumerate(experts)
        }
        batches = {
            task: [collate(part, reader.pad, reader.takes) for part in own]
            for task, own in parts.items()
        }
        made.append(calibrate(**models, batches=batches, settings=SETTINGS).model)

    pairs = in_turns(partial(run, float("inf")), partial(run, most), 1 + args.repeats)[1:]
    difference = largest_difference(*made[:2])
    assert difference < TOLERANCE, f"the results differ by {difference:.1e}"
    return f"{ratio(pairs)}; same model within {difference:.1e}"


def given(args: Namespace) -> tuple[Any, list[int], Any]:
    """Samples, which of them, and who reads them: as `featcal calibrate` would, or of drawn
    lengths.
    """
    if not args.data:
        return drawn_lengths(args.samples, 1), list(range(args.samples)), LengthReader()
    samples = load_text(Location(Path(args.data)), args.split)
    reader = reader_for([Path(args.model)], input_of(skeleton(args.model)), None)
    return (
        samples,
        draw_indices("", len(samples), min(args.samples, len(samples)), 42).tolist(),
        reader,
    )


def main() -> None:
    shape = {"width": 384, "layers": 3, "tasks": 2, "repeats": 3}
    args = arguments(
        __doc__, samples=256, batch=32, data="", model="", split="train", most="", **shape
    ).parse_args()
    torch.set_num_threads(args.threads)
    samples, chosen, reader = given(args)
    lengths = [len(reader.tokens(samples[i]).ids) for i in chosen]
    print(
        f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} together; batches of {args.batch}"
    )
    for name, share in shares(samples, chosen, reader, args.batch).items():
        print(f"batches {name}: {share:.3f} tokens computed for each that counts")
    for most in map(float, args.most.split()):
        print(
            f"time, batches of {args.batch} / batches that compute at most {most} for each: {timed(args, most)}"
        )


if __name__ == "__main__":
    main()
