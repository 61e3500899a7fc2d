"""The zero-shot head of a task: from prompts where the text tower knows every word, else from class means."""

from pathlib import Path
from typing import Any

from torch import Tensor

from featcal.evaluation.zero_shot import class_mean_head, words_known, zero_shot_head
from reproduction.suites.load_task import load_task
from reproduction.suites.sources import Source, read_sources


def head_kind(tokenizer: Any, source: Source, kind: str) -> str:
    """ "prompts" or "class_means": what `auto` comes to for one task."""
    if kind != "auto":
        return kind
    return "prompts" if words_known(tokenizer, source.classes, source.templates) else "class_means"


def head_of(clip: Any, vision: Any, tokenizer: Any, data: Path, base: Path, task: str, kind: str) -> Tensor:
    """The head of one task, (classes, p), rows of unit length. `kind`: prompts, class_means or auto."""
    source = read_sources(data)[task]
    if head_kind(tokenizer, source, kind) == "prompts":
        return zero_shot_head(clip, tokenizer, source.classes, source.templates)
    return class_mean_head(vision, clip.visual_projection.weight.detach(), load_task(data, task, "train", base))
