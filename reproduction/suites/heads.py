"""The zero-shot head of a task: from prompts where the text tower knows every word, else from class
means.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from featcal.evaluation.zero_shot import class_mean_head, words_known, zero_shot_head
from reproduction.suites.load_task import load_task
from reproduction.suites.sources import read_sources


def head_of(
    clip: Any, vision: Any, tokenizer: Any, data: Path, base: Path, task: str, kind: str
) -> Tensor:
    """The head of one task, (classes, p), rows of unit length. `kind`: prompts, class_means, or
    auto: whichever it can be.
    """
    source = read_sources(data)[task]
    if kind == "prompts" or (
        kind == "auto" and words_known(tokenizer, source.classes, source.templates)
    ):
        return zero_shot_head(clip, tokenizer, source.classes, source.templates)
    return class_mean_head(
        vision, clip.visual_projection.weight.detach(), load_task(data, task, "train", base)
    )
