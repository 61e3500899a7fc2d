"""The model card of a calibrated folder: what was merged, how it was calibrated, and how far it is
from its experts."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from featcal import __version__
from featcal.calibration.models import Models
from featcal.calibration.report import BlockRecord, DriftRecord, Result
from featcal.calibration.resume import RunFolder
from featcal.card import SENTENCE_CLASS, front_matter, name_of, render_card, write_card
from featcal.files import atomic_folder
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.save import copy_other_files, save_model, shard_writer
from featcal.models.sentences import modules_of
from featcal.models.streamed import Override, StreamedModel

SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α", "residual": "β", "prior": "κ"}
RECIPE = "mergekit_config.yml"
DRIFT_COLUMNS = ["expert", "merged", "calibrated", "cosine merged", "cosine calibrated", "samples"]


def calibration_card(
    merged: object,
    base: object,
    experts: Mapping[str, Any],
    result: Result,
    samples: Mapping[str, object] | None = None,
    datasets: Sequence[str] = (),
) -> str:
    """Return the text of the model card; two equal runs give the same text.

    samples: rows of the section on samples, such as their number, seed and location.
    datasets: names of data sets on the hub, for the front matter.
    """
    models = {"base": base, "merged model": merged}
    models |= {f"expert {task}": experts[task] for task in sorted(experts)}
    method, choice = merge_method(merged), result.choice
    stated = result.settings.stated if result.settings else {}
    names = {key: f"{symbol}, {key}" for key, symbol in SYMBOLS.items()}
    measured = all(block.relative_drift is not None for block in result.blocks)
    summary = (
        f"{len(experts)} fine-tuned models merged into one{f' by {method}' if method else ''}. "
    )
    if result.settings:
        summary += (
            "Its weights were then calibrated to the experts' features with"
            f" [FeatCal](https://arxiv.org/abs/2605.13030) (featcal {__version__}):"
            " in closed form, without training."
        )
    else:
        summary += f"It was not calibrated (featcal {__version__})."
    return render_card(
        f"{name_of(base)}: {len(experts)} experts merged and calibrated",
        summary + (f" {choice.sentence}" if choice else ""),
        models,
        [[names.get(key, key), value] for key, value in stated.items()],
        {"datasets": sorted(set(datasets))} if datasets else {},
        samples=list((samples or {}).items()),
        drift_columns=DRIFT_COLUMNS,
        drift=drift_rows(result.drift),
        warnings=worse(result.drift),
        blocks=block_rows(result.blocks) if measured else [],
        class_name=class_name(merged),
    )


def drift_rows(drift: Sequence[DriftRecord]) -> list[list[str]]:
    """Return the cells of `DRIFT_COLUMNS`, one row per expert and stack."""
    several = len({one.stack for one in drift}) > 1
    rows = []
    for one in drift:
        values = (one.merged, one.calibrated, one.cosine_merged, one.cosine_calibrated)
        name = f"{one.expert}, {one.stack}" if several else one.expert
        samples = f"{one.samples}{', held out' * one.held_out}"
        rows.append([name, *(f"{value:.3f}" for value in values), samples])
    return rows


def worse(drift: Sequence[DriftRecord]) -> list[str]:
    """Return a sentence naming the experts whose drift calibration increased; [] if there are
    none.
    """
    names = list(dict.fromkeys(one.expert for one in drift if one.calibrated > one.merged))
    sentence = (
        f"Calibration increased the drift from these experts: {', '.join(names)}."
        " featcal compare shows whether their answers are worse too."
    )
    return [sentence] if names else []


def block_rows(blocks: Sequence[BlockRecord]) -> list[list[str]]:
    """Return a row of drift, cosine and tokens for each block, and their means."""
    rows = [
        [block.name, f"{block.relative_drift:.3f}", f"{block.cosine:.3f}", f"{block.tokens:,}"]
        for block in blocks
    ]
    if len(blocks) > 1:
        pairs = [(block.relative_drift or 0.0, block.cosine or 0.0) for block in blocks]
        means = [f"{sum(values) / len(blocks):.3f}" for values in zip(*pairs, strict=True)]
        rows.append(["mean", *means, ""])
    return rows


def merge_method(merged: object) -> str | None:
    """Return the merge method that a folder's mergekit recipe or card states, or None."""
    if not isinstance(merged, str | Path):
        return None
    try:
        recipe = yaml.safe_load((Path(merged) / RECIPE).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # the folder states no method
        recipe = None
    if isinstance(recipe, dict) and isinstance(recipe.get("merge_method"), str):
        return f"mergekit's {recipe['merge_method']}"
    method = front_matter(Path(merged)).get("merge_method")
    return f"featcal's {method}" if isinstance(method, str) else None


def class_name(merged: object) -> str:
    """Return the class that loads the result."""
    if not isinstance(merged, str | Path):
        return type(merged).__name__
    if modules_of(Path(merged)):
        return SENTENCE_CLASS
    return str(json.loads((Path(merged) / "config.json").read_text("utf-8"))["architectures"][0])


def write_calibrated(
    models: Models, out: str | Path, result: Result, folder: RunFolder, card: str
) -> None:
    """Write the calibrated model as a folder with the merged one's tensor names and precision, with
    its records (featcal.json) and card (README.md).

    Other files, such as the tokenizer, are copied from the merged folder, or from the base folder
    if the merged model is a module. Raises: DiskFull; BadFile if a solved block is gone.
    """
    text = json.dumps(result.stated, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    student, base = models.student, models.base
    with atomic_folder(out) as path:
        if isinstance(student, StreamedModel):
            solved = folder.solved_values(models.plan) if result.settings else lambda _: None
            copy_with(student, path, solved)
        else:
            like = base.folder if isinstance(base, StreamedModel) else None
            save_model(student.module, path, like=like)
        (path / "featcal.json").write_text(text, encoding="utf-8")
        write_card(path, card)


def copy_with(student: StreamedModel, folder: Path, solved: Override) -> None:
    """Copy the student's folder with solved parameters in place of its own; names, precision and
    configuration stay.
    """
    whole, written = LazyCheckpoint(student.folder), set[str]()  # of a whole CLIP both towers
    prefix = student.files.prefix

    def rounded() -> Iterator[tuple[str, Tensor]]:
        for name, _ in student.module.named_parameters():
            tensor = solved(name)
            if tensor is not None:
                written.update(prefix + source for source in student.sources(name))
                yield name, tensor.to(student.stored[name].dtype)

    with shard_writer(folder, needed=sum(each.nbytes for each in whole.values())) as writer:
        shutil.copyfile(whole.folder / "config.json", writer.folder / "config.json")
        copy_other_files(whole.folder, writer.folder)
        for name, tensor in student.to_files(rounded()):
            writer.write(prefix + name, tensor)
        for name, each in whole.items():
            if name not in written:
                writer.write(name, each.read())
