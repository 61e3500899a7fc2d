"""The calibrated model as a Hugging Face folder, with featcal.json and a model card beside the
weights.

It appears complete or not at all.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from featcal.blocks.plan import blocks_of
from featcal.calibration.models import Models
from featcal.calibration.record import BlockRecord, DriftRecord
from featcal.calibration.run_folder import RunFolder, block_name
from featcal.errors import BadFile
from featcal.models.save import copy_beside, save_model
from featcal.models.streamed import Streamed
from featcal.settings import Calibration
from featcal.storage.atomic import atomic_folder
from featcal.storage.checkpoint import LazyCheckpoint
from featcal.storage.model_card import write_card
from featcal.storage.writer import ShardWriter


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
    Raises: DiskFull; BadFile as copy_beside.
    """
    record: dict[str, Any] = {
        "settings": settings.stated,
        "blocks": [block.told for block in blocks],
    }
    if drift:
        record["drift"] = [asdict(one) for one in drift]
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    with atomic_folder(out) as place:
        if isinstance(models.student, Streamed):
            copy_with(models.student, place, solved_tensors(models, folder))
        else:
            save_model(
                models.student.module,
                place,
                like=models.base.folder if isinstance(models.base, Streamed) else None,
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


def copy_with(student: Streamed, folder: Path, solved: Iterable[tuple[str, Tensor]]) -> None:
    """A copy of the student's folder with solved parameters in the place of its own: same names,
    kinds and configuration.
    """
    whole, written = LazyCheckpoint(student.folder), set()  # of a whole CLIP both towers
    with ShardWriter(folder, needed=sum(whole.bytes(name) for name in whole.names)) as writer:
        shutil.copyfile(whole.folder / "config.json", writer.folder / "config.json")
        copy_beside(whole.folder, writer.folder)
        for name, tensor in solved:
            for stored, part in student.parameters.apart(
                name, tensor.to(student.parameters.stored_dtype(name))
            ).items():
                writer.write(stored, part)
            written.update(student.parameters.sources(name))
        for name in whole.names:
            if whole.stored_name(name) not in written:
                writer.write(whole.stored_name(name), whole.tensor(name))
