"""`featcal calibrate`: a merged CLIP vision model, its base, its experts and some images of each task to a calibrated model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.commands.arguments import device_named, existing_folder, named_folders, new_folder
from featcal.commands.model_folders import skeleton
from featcal.commands.terminal import counted, say, table

if TYPE_CHECKING:
    from featcal.calibration.record import BlockRecord


@dataclass(frozen=True)
class Draw:
    """Which calibration images: n of each task, by a seed, in batches."""

    samples: int
    seed: int
    batch: int


def calibrate(
    merged: Annotated[Path, Option(help="Folder of the merged model.")],
    base: Annotated[Path, Option(help="Folder of the model all experts were fine-tuned from, with its processor.")],
    expert: Annotated[list[str], Option(metavar="NAME=FOLDER", help="An expert; once for each.")],
    data: Annotated[list[str], Option(metavar="NAME=FOLDER", help="Images of an expert's task; their labels are not used.")],
    out: Annotated[Path, Option(help="Folder to write.")],
    ridge: Annotated[float, Option(help="λ: how strongly the weights stay near the anchor (paper: 0.05 for CLIP).")] = 0.05,
    anchor_blend: Annotated[float, Option(help="ρ: 1 is the merged weight, above 1 away from the base (paper: 2).")] = 2.0,
    interpolation: Annotated[float, Option(help="α: 1 aims at the experts' features alone (paper: 0.3).")] = 0.3,
    samples: Annotated[int, Option(min=1, help="Images of each task (paper: 256).")] = 256,
    seed: Annotated[int, Option(min=0, help="Which images are drawn.")] = 42,
    batch: Annotated[int, Option(min=1, help="Images in memory at a time.")] = 32,
    split: Annotated[str, Option(help="The split of each data folder to draw from.")] = "train",
    device: Annotated[str, Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    force: Annotated[bool, Option("--force", help="Replace the model folder that --out names.")] = False,
) -> None:
    """Calibrate a merged model to its experts' features, block by block, and write it as a folder of the same form."""
    from featcal.settings import Calibration

    settings = Calibration(ridge=ridge, anchor_blend=anchor_blend, interpolation=interpolation)
    models = {"--merged": existing_folder("--merged", merged), "--base": existing_folder("--base", base)}
    experts, folders = named_folders("--expert", expert), named_folders("--data", data)
    new_folder(out, force, [*models.values(), *experts.values(), *folders.values()])
    from featcal.calibration.calibrate import calibrate as calibrated
    from featcal.calibration.checks import check_tasks
    from featcal.calibration.ranks import current
    from featcal.calibration.torchrun import own_device

    place = own_device(device_named(device))
    check_tasks(experts, {name: [folder] for name, folder in folders.items()})  # before images are decoded
    for folder in (*models.values(), *experts.values()):
        skeleton(folder)
    batches = {name: drawn(name, folder, split, base, Draw(samples, seed, batch)) for name, folder in folders.items()}
    with counted(block_count(merged), "calibrating") as progress:
        result = calibrated(
            merged,
            base=base,
            experts=experts,
            batches=batches,
            settings=settings,
            out=out,
            device=place,
            progress=progress,
        )
    if not current().first:
        return
    show_blocks(result.blocks)
    say(f"calibrated model: {out}")


def drawn(name: str, folder: Path, split: str, base: Path, draw: Draw) -> Iterator[dict[str, Any]]:
    """The calibration batches of one task, read when they are asked for: of several processes each reads its own tasks."""
    from featcal.data.images import Preprocess
    from featcal.data.load import load_images
    from featcal.data.sampling import draw_indices

    images = load_images(folder, split, Preprocess.from_folder(base))
    yield from images.batches(draw_indices(name, len(images), draw.samples, draw.seed), draw.batch)


def block_count(folder: Path) -> int:
    """How many blocks config.json announces, for the progress bar."""
    return int(getattr(skeleton(folder).config, "num_hidden_layers", 0))  # type: ignore[arg-type]


def show_blocks(blocks: list["BlockRecord"]) -> None:
    """How far each block's features were from the experts', with its merged weights and with the calibrated ones."""
    rows = [
        [
            block.name,
            f"{block.relative_drift_before:.3f}",
            f"{block.relative_drift_after:.3f}",
            f"{block.cosine_before:.3f}",
            f"{block.cosine_after:.3f}",
        ]
        for block in blocks
    ]
    table("drift from the experts", ["block", "before", "after", "cosine before", "after"], rows)
