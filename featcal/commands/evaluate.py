"""`featcal evaluate`: accuracy of a CLIP vision model on image folders, with zero-shot heads made from class names."""

from pathlib import Path
from typing import Annotated

from typer import Option

from featcal.commands.arguments import existing_folder, named_folders
from featcal.commands.terminal import table
from featcal.settings import require


def evaluate(
    model: Annotated[Path, Option(help="Folder of the model to evaluate.")],
    clip: Annotated[Path, Option(help="Folder of the whole CLIP model: text tower, projections, tokenizer, processor.")],
    data: Annotated[list[str], Option(metavar="NAME=FOLDER", help="Labelled images of a task; once for each.")],
    template: Annotated[list[str] | None, Option(help="Prompt with {} for the class name; once for each.")] = None,
    split: Annotated[str, Option(help="The split of each data folder to evaluate on.")] = "test",
    batch: Annotated[int, Option(min=1, help="Images in memory at a time.")] = 64,
    device: Annotated[str, Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
) -> None:
    """Zero-shot accuracy per task. Class names come from the data folder."""
    existing_folder("--model", model)
    existing_folder("--clip", clip)
    folders = named_folders("--data", data)
    templates = template or ["a photo of a {}."]
    for prompt in templates:
        require("{}" in prompt, "--template", prompt, "must hold {} where the class name goes")
    from featcal.data.images import Preprocess
    from featcal.data.load import load_images
    from featcal.evaluation.accuracy import evaluate_pool
    from featcal.evaluation.zero_shot import zero_shot_head
    from featcal.models.device import torch_device
    from featcal.models.load import load_clip, load_tokenizer, load_vision

    place = torch_device(device)
    whole, tokenizer, preprocess = load_clip(clip).to(place), load_tokenizer(clip), Preprocess.from_folder(clip)
    vision = load_vision(model).to(place)
    tasks = {name: load_images(folder, split, preprocess) for name, folder in folders.items()}
    heads = {name: zero_shot_head(whole, tokenizer, images.classes, templates) for name, images in tasks.items()}
    counted = evaluate_pool({"model": vision}, tasks, heads, whole.visual_projection.weight.detach(), batch)["model"]
    percent = {name: 100 * right / count for name, (right, count) in counted.items()}
    rows = [[name, str(len(tasks[name].classes)), str(len(tasks[name])), f"{value:.2f}"] for name, value in percent.items()]
    rows.append(["average", "", "", f"{sum(percent.values()) / len(percent):.2f}"])
    table(f"{model}: percent correct", ["task", "classes", "images", "accuracy"], rows)
