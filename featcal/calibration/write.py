"""The model card of a calibrated folder: what was merged, how it was calibrated, and how far it is
from its experts."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from featcal import __version__
from featcal.calibration.models import Models
from featcal.calibration.report import BlockRecord, DriftRecord, Result
from featcal.calibration.resume import RunFolder, block_name
from featcal.card import SENTENCE_CLASS, front_matter, name_of, render_card, write_card
from featcal.errors import BadFile
from featcal.files import atomic_folder
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.plan import blocks_of
from featcal.models.save import copy_other_files, save_model, shard_writer
from featcal.models.sentences import modules_of
from featcal.models.streamed import StreamedModel

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
    rows = [
        [f"{SYMBOLS[key]}, {key}" if key in SYMBOLS else key, value]
        for key, value in stated.items()
    ]
    measured = all(block.relative_drift is not None for block in result.blocks)
    calibrated = (
        ". Its weights were then calibrated to the experts' features with"
        f" [FeatCal](https://arxiv.org/abs/2605.13030) (featcal {__version__}):"
        " in closed form, without training."
    )
    if not result.settings:
        calibrated = f". It was not calibrated (featcal {__version__})."
    return render_card(
        f"{name_of(base)}: {len(experts)} experts merged and calibrated",
        f"{len(experts)} fine-tuned models merged into one"
        + (f" by {method}" if method else "")
        + calibrated
        + (f" {choice.sentence}" if choice else ""),
        models,
        rows,
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
    names = list(dict.fromkeys(one.expert for one in drift if one.worse))
    if not names:
        return []
    return [
        f"Calibration increased the drift from these experts: {', '.join(names)}."
        " featcal compare shows whether their answers are worse too."
    ]


def block_rows(blocks: Sequence[BlockRecord]) -> list[list[str]]:
    """Return a row of drift, cosine and tokens for each block, and their means."""
    rows = [
        [block.name, f"{block.relative_drift:.3f}", f"{block.cosine:.3f}", f"{block.tokens:,}"]
        for block in blocks
    ]
    if len(blocks) > 1:
        means = (
            sum(getattr(block, key) for block in blocks) / len(blocks)
            for key in ("relative_drift", "cosine")
        )
        rows.append(["mean", *(f"{mean:.3f}" for mean in means), ""])
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
) -> Path:
    """Write the calibrated model as a folder with the merged one's tensor names and precision, with
    its records (featcal.json) and card (README.md).

    Other files, such as the tokenizer, are copied from the merged folder, or from the base folder
    if the merged model is a module. Raises: DiskFull; BadFile if a solved block is gone.
    """
    record: dict[str, Any] = {
        "settings": result.settings.stated if result.settings else None,
        "blocks": [block.stated for block in result.blocks],
    }
    if result.drift:
        record["drift"] = [asdict(one) for one in result.drift]
    if result.choice:
        record["choice"] = result.choice.stated
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    student, base = models.student, models.base
    with atomic_folder(out) as path:
        if isinstance(student, StreamedModel):
            copy_with(student, path, solved_tensors(models, folder) if result.settings else ())
        else:
            like = base.folder if isinstance(base, StreamedModel) else None
            save_model(student.module, path, like=like)
        (path / "featcal.json").write_text(text, encoding="utf-8")
        write_card(path, card)
    return Path(out)


def solved_tensors(models: Models, folder: RunFolder) -> Iterator[tuple[str, Tensor]]:
    """Yield every solved parameter by its name in the model, one block in memory at a time. Raises:
    BadFile for a block that is gone.
    """
    for stack in models.plan.stacks:
        for index in range(len(blocks_of(models.student.module, stack))):
            name = block_name(stack, index)
            solved = folder.solved(name)
            if solved is None:
                problem = f"lost block {name}, removed or changed by another program"
                raise BadFile(folder.path, problem, "start the same run again")
            for parameter, tensor in solved[0].items():
                yield f"{stack.blocks}.{index}.{parameter}", tensor


def copy_with(student: StreamedModel, folder: Path, solved: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the student's folder with solved parameters in place of its own; names, precision and
    configuration stay.
    """
    whole, written = LazyCheckpoint(student.folder), set[str]()  # of a whole CLIP both towers
    stored_name = student.files.stored_name

    def rounded() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in solved:
            written.update(map(stored_name, student.stored[name].sources))
            yield name, tensor.to(student.dtype(name))

    with shard_writer(folder, needed=sum(whole.bytes(name) for name in whole.names)) as writer:
        shutil.copyfile(whole.folder / "config.json", writer.folder / "config.json")
        copy_other_files(whole.folder, writer.folder)
        for name, tensor in student.to_files(rounded()):
            writer.write(stored_name(name), tensor)
        for name in whole.names:
            if name not in written:
                writer.write(name, whole.tensor(name))
