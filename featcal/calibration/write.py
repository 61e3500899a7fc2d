"""The model card of a calibrated folder: what was merged, how it was calibrated, and how far it is
from its experts."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from featcal.calibration.models import Models
from featcal.calibration.report import BlockRecord, DriftRecord
from featcal.calibration.resume import RunFolder, block_name
from featcal.card import UNTOLD, card, front_matter, name_of, shown, table, use, write_card
from featcal.errors import BadFile
from featcal.files import atomic_folder
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.plan import blocks_of
from featcal.models.save import ShardWriter, copy_other_files, save_model
from featcal.models.streamed import StreamedModel
from featcal.settings import Calibration
from featcal.version import __version__

SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α", "residual": "β", "prior": "κ"}
RECIPE = "mergekit_config.yml"
DRIFT_COLUMNS = ["expert", "merged", "calibrated", "cosine merged", "cosine calibrated", "samples"]
MEASURE = """Relative drift ‖H − H_exp‖ / ‖H_exp‖ of the features H from the expert's, and their cosine."""
LAST = """Behind the last block, of the merged model as it was and of this one, on the same samples of each expert's task; *held
out*: on samples that it was not calibrated on."""
BLOCKS = """Behind every block of this model, as means over the experts, on the samples that it was calibrated on."""


@dataclass(frozen=True)
class Drawn:
    """Where the samples came from, for those who know: of each task its place, and how they were
    drawn.
    """

    places: Mapping[str, str]
    how: Mapping[str, object]  # such as samples of each task, split, seed
    datasets: Sequence[str] = field(default_factory=tuple)  # those of the hub


def calibration_card(
    merged: object,
    base: object,
    experts: Mapping[str, Any],
    settings: Calibration,
    blocks: Sequence[BlockRecord],
    drawn: Drawn | None = None,
    drift: Sequence[DriftRecord] = (),
) -> str:
    """The card's text; it holds nothing that varies between two runs, and no number that was not
    measured.
    """
    models = {"base": base, "merged model": merged} | {
        f"expert {task}": experts[task] for task in sorted(experts)
    }
    how = merge_method(merged)
    rows = [
        [role, name_of(model) + (f", merged by {how}" if how and model is merged else "")]
        for role, model in models.items()
    ]
    far = [LAST, table(DRIFT_COLUMNS, drift_rows(drift)), *worse(drift)] if drift else []
    far += (
        [BLOCKS, block_table(blocks)]
        if all(block.relative_drift is not None for block in blocks)
        else []
    )
    sections = [
        f"{len(experts)} fine-tuned models merged into one, whose weights were then calibrated to the experts' features with "
        f"[FeatCal](https://arxiv.org/abs/2605.13030) (featcal {__version__}): in closed form, without training.",
        "## What was merged",
        table(["role", "model"], rows),
        "## How it was calibrated",
        table(["setting", "value"], setting_rows(settings, drawn)),
        *(["## How far it is from its experts", MEASURE, *far] if far else ()),
        UNTOLD,
        "## Use",
        use(class_name(merged)),
    ]
    more = {"datasets": sorted(set(drawn.datasets))} if drawn and drawn.datasets else {}
    return card(
        f"{name_of(base)}: {len(experts)} experts merged and calibrated",
        models,
        ("merge", "featcal"),
        more,
        sections,
    )


def setting_rows(settings: Calibration, drawn: Drawn | None) -> list[list[str]]:
    """Every setting, then where the samples came from."""
    best = settings == Calibration.preset("best")
    rows = [["preset", "best, beyond the paper"]] if best else []
    rows += [
        [f"{SYMBOLS[key]}, {key}" if key in SYMBOLS else key, shown(value)]
        for key, value in settings.stated.items()
    ]
    if drawn:
        rows += [[key, shown(value)] for key, value in drawn.how.items()]
        rows += [[f"samples of {task}", place] for task, place in sorted(drawn.places.items())]
    return rows


def drift_rows(drift: Sequence[DriftRecord]) -> list[list[str]]:
    """The cells of `DRIFT_COLUMNS`, a row for each expert and stack."""
    several = len({one.stack for one in drift}) > 1
    rows = []
    for one in drift:
        numbers = (one.merged, one.calibrated, one.cosine_merged, one.cosine_calibrated)
        name = f"{one.expert}, {one.stack}" if several else one.expert
        rows.append(
            [
                name,
                *(f"{value:.3f}" for value in numbers),
                f"{one.samples}{', held out' * one.held_out}",
            ]
        )
    return rows


def worse(drift: Sequence[DriftRecord]) -> list[str]:
    """A sentence that names the experts from which calibration has led away; none where there are
    none.
    """
    names = list(dict.fromkeys(one.expert for one in drift if one.worse))
    if not names:
        return []
    return [
        f"Farther from its expert than the merged model is: {', '.join(names)}. More samples or a larger λ may help."
    ]


def block_table(blocks: Sequence[BlockRecord]) -> str:
    """A row for each block and their mean."""
    keys = ("relative_drift", "cosine")
    rows = [
        [block.name, *(f"{getattr(block, key):.3f}" for key in keys), f"{block.tokens:,}"]
        for block in blocks
    ]
    if len(blocks) > 1:
        rows.append(
            [
                "mean",
                *(
                    f"{sum(getattr(block, key) for block in blocks) / len(blocks):.3f}"
                    for key in keys
                ),
                "",
            ]
        )
    return table(["block", "drift", "cosine", "tokens"], rows)


def merge_method(merged: object) -> str | None:
    """How a merged folder says it was merged: mergekit's recipe in it, or the card that featcal
    wrote.
    """
    if not isinstance(merged, str | Path):
        return None
    try:
        recipe = yaml.safe_load((Path(merged) / RECIPE).read_text("utf-8"))
    except (
        OSError,
        UnicodeDecodeError,
        yaml.YAMLError,
    ):  # nothing is told, which is no fault of the merged model
        recipe = None
    if isinstance(recipe, dict) and isinstance(recipe.get("merge_method"), str):
        return f"mergekit's {recipe['merge_method']}"
    method = front_matter(Path(merged)).get("merge_method")
    return f"featcal's {method}" if isinstance(method, str) else None


def class_name(merged: object) -> str:
    """The class of transformers that loads the result."""
    if not isinstance(merged, str | Path):
        return type(merged).__name__
    return str(json.loads((Path(merged) / "config.json").read_text("utf-8"))["architectures"][0])


def write_calibrated(
    models: Models,
    out: str | Path,
    settings: Calibration,
    blocks: Sequence[BlockRecord],
    drift: Sequence[DriftRecord],
    folder: RunFolder,
    card: str,
) -> Path:
    """The folder of a student that is in memory, or of one that was streamed: the merged folder
    with the solved numbers in it.

    What lies beside the weights, such as the tokenizer, is the merged folder's; the base folder's
    where the merged model came as a module, and nothing where both did.
    Raises: DiskFull; BadFile as copy_other_files.
    """
    record: dict[str, Any] = {
        "settings": settings.stated,
        "blocks": [block.told for block in blocks],
    }
    if drift:
        record["drift"] = [asdict(one) for one in drift]
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    with atomic_folder(out) as place:
        if isinstance(models.student, StreamedModel):
            copy_with(models.student, place, solved_tensors(models, folder))
        else:
            save_model(
                models.student.module,
                place,
                like=models.base.folder if isinstance(models.base, StreamedModel) else None,
            )
        (place / "featcal.json").write_text(text, encoding="utf-8")
        write_card(place, card)
    return Path(out)


def solved_tensors(models: Models, folder: RunFolder) -> Iterator[tuple[str, Tensor]]:
    """Every solved parameter by its name in the model, one block in memory at a time. Raises:
    BadFile for one that is gone.
    """
    for stack in models.plan.stacks:
        for index in range(len(blocks_of(models.student.module, stack))):
            solved = folder.solved(block_name(stack, index))
            if solved is None:
                raise BadFile(
                    folder.path,
                    f"lost block {stack.name}.{index:02d} to something else",
                    "start the same run again",
                )
            for name, tensor in solved.parameters.items():
                yield f"{stack.blocks}.{index}.{name}", tensor


def copy_with(student: StreamedModel, folder: Path, solved: Iterable[tuple[str, Tensor]]) -> None:
    """A copy of the student's folder with solved parameters in the place of its own: same names,
    kinds and configuration.
    """
    whole, written = LazyCheckpoint(student.folder), set()  # of a whole CLIP both towers
    with ShardWriter(folder, needed=sum(whole.bytes(name) for name in whole.names)) as writer:
        shutil.copyfile(whole.folder / "config.json", writer.folder / "config.json")
        copy_other_files(whole.folder, writer.folder)
        for name, tensor in solved:
            for stored, part in student.parameters.to_sources(
                name, tensor.to(student.parameters.stored_dtype(name))
            ).items():
                writer.write(stored, part)
            written.update(student.parameters.sources(name))
        for name in whole.names:
            if whole.stored_name(name) not in written:
                writer.write(whole.stored_name(name), whole.tensor(name))
