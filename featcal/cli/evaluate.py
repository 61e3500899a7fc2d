"""`featcal evaluate`: accuracy of a CLIP vision model on image folders, with zero-shot heads made from class names."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.cli.arguments import device_named, existing_folder, named_folders
from featcal.cli.model_folders import skeleton
from featcal.cli.terminal import Json, Quiet, say_json, table
from featcal.errors import BadFile, BadSetting, TensorsDiffer
from featcal.settings import require

if TYPE_CHECKING:
    from featcal.data.images import ImageSet

EPILOG = """Example:

featcal evaluate --model new --clip base --data mnist=images/mnist --template "a photo of the number {}." """
TOKENIZERS = ("tokenizer.json", "vocab.json")


def evaluate(
    model: Annotated[Path, Option(help="Folder of the model to evaluate.")],
    clip: Annotated[Path, Option(help="Folder of the whole CLIP model: text tower, projections, tokenizer, processor.")],
    data: Annotated[list[str], Option(metavar="NAME=FOLDER", help="Labelled images of a task; once for each.")],
    template: Annotated[list[str] | None, Option(help="Prompt with {} for the class name; once for each.")] = None,
    split: Annotated[str, Option(help="The split of each data folder to evaluate on.")] = "test",
    batch: Annotated[int, Option(min=1, help="Images in memory at a time.")] = 64,
    device: Annotated[str, Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
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
    from featcal.evaluation.accuracy import evaluate_pool, percent
    from featcal.evaluation.zero_shot import zero_shot_head
    from featcal.models.load import load_clip, load_tokenizer, load_vision
    from featcal.models.products import onednn_products

    place = device_named(device)
    whole = load_clip(clip).to(place)
    require_fitting(model, clip)
    require_tokenizer(clip)
    tokenizer, preprocess = load_tokenizer(clip), Preprocess.from_folder(clip)
    vision = load_vision(model).to(place)
    tasks = {name: load_images(folder, split, preprocess) for name, folder in folders.items()}
    for name, images in tasks.items():
        require_words(name, clip, tokenizer, images, templates)
    heads = {name: zero_shot_head(whole, tokenizer, images.classes, templates) for name, images in tasks.items()}
    with onednn_products():
        judged = evaluate_pool({"model": vision}, tasks, heads, whole.visual_projection.weight.detach(), batch)["model"]
    found = {name: percent(right) for name, right in judged.items()}
    if as_json:
        told = {name: {"accuracy": value, "images": len(tasks[name])} for name, value in found.items()}
        return say_json({"model": str(model), "tasks": told, "average": sum(found.values()) / len(found)})
    rows = [[name, str(len(tasks[name].classes)), str(len(tasks[name])), f"{value:.2f}"] for name, value in found.items()]
    rows.append(["average", "", "", f"{sum(found.values()) / len(found):.2f}"])
    table(f"{model}: percent correct", ["task", "classes", "images", "accuracy"], rows)


def require_fitting(model: Path, clip: Path) -> None:
    """A model whose pictures fit the text tower's space. Raises: TensorsDiffer."""
    here, there = (skeleton(folder).config.hidden_size for folder in (model, clip))  # type: ignore[union-attr]
    if here != there:
        raise TensorsDiffer("vision width", model, here, clip, there)


def require_tokenizer(clip: Path) -> None:
    """The files of a tokenizer, without which transformers would make one up. Raises: BadFile."""
    if not any((clip / name).is_file() for name in TOKENIZERS):
        raise BadFile(clip, f"no tokenizer in this folder ({' or '.join(TOKENIZERS)})", "copy the tokenizer's files there")


def require_words(task: str, clip: Path, tokenizer: Any, images: "ImageSet", templates: list[str]) -> None:
    """Prompts of which the tokenizer knows every word: an unknown one makes classes look alike and the accuracy chance."""
    from featcal.evaluation.zero_shot import words_known

    for name in images.classes:
        for template in templates:
            if not words_known(tokenizer, [name], [template]):
                problem = f"holds a word that the tokenizer of {clip} does not know; give other prompts with --template"
                raise BadSetting(f"{task}: prompt", template.replace("{}", name), problem)
