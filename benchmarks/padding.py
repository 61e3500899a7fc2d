"""Texts: tokens that are computed for each one that counts, in batches of like length and in batches as they were drawn.

python -m benchmarks.padding                 Lengths drawn from a seed. --data and --model: a file of texts, cut by that model.
"""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import arguments, seeded
from featcal.data.inputs import Input, input_of
from featcal.data.place import Place
from featcal.data.sampling import draw_indices
from featcal.data.text import load_text
from featcal.data.tokens import Tokens, batch, reader_for, token_batches
from featcal.models.skeleton import skeleton

MEDIAN, SPREAD, LONGEST = 24, 0.6, 512  # tokens of a text: the logarithm of their number is drawn from a normal distribution


@dataclass(frozen=True)
class LengthReader:
    """A reader whose samples are numbers of tokens; what the tokens are does not matter here."""

    takes: Input = Input("text")
    pad: int = 0

    def tokens(self, length: int) -> Tokens:
        """So many tokens."""
        return Tokens([1] * length)


def drawn_lengths(count: int, seed: int) -> list[int]:
    """Lengths of texts."""
    lengths = MEDIAN * (SPREAD * torch.randn(count, generator=seeded(seed))).exp()
    return lengths.round().clamp(1, LONGEST).int().tolist()


def counted(batches: Iterable[Mapping[str, Tensor]]) -> tuple[int, int]:
    """Tokens without padding, and tokens that a forward computes."""
    masks = [each["attention_mask"] for each in batches]
    return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


def shares(samples: Any, chosen: Sequence[int], reader: Any, size: int) -> dict[str, float]:
    """Computed tokens for each that counts, as calibration batches texts and in the order of the draw."""
    drawn = [[reader.tokens(samples[i]) for i in chosen[begin : begin + size]] for begin in range(0, len(chosen), size)]
    ways = {
        "of like length": counted(token_batches(samples, chosen, reader, size)),
        "as drawn": counted(batch(each, reader.pad, reader.takes) for each in drawn),
    }
    assert len({real for real, _ in ways.values()}) == 1, "the results differ"
    return {name: computed / real for name, (real, computed) in ways.items()}


def given(args: Namespace) -> tuple[Any, list[int], Any]:
    """Samples, which of them, and who reads them: as `featcal calibrate` would, or of drawn lengths."""
    if not args.data:
        return drawn_lengths(args.samples, 1), list(range(args.samples)), LengthReader()
    samples = load_text(Place(Path(args.data)), args.split)
    reader = reader_for([Path(args.model)], input_of(skeleton(args.model)[0]), None)
    return samples, draw_indices("", len(samples), min(args.samples, len(samples)), 42).tolist(), reader


def main() -> None:
    args = arguments(__doc__, samples=256, batch=32, data="", model="", split="train").parse_args()
    samples, chosen, reader = given(args)
    lengths = [len(reader.tokens(samples[i]).ids) for i in chosen]
    print(f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} together; batches of {args.batch}")
    for name, share in shares(samples, chosen, reader, args.batch).items():
        print(f"batches {name}: {share:.3f} tokens computed for each that counts")


if __name__ == "__main__":
    main()
