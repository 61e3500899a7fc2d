"""`featcal evaluate`: accuracy of a model on labelled images (CLIP, zero-shot) or labelled
texts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.cli import options
from featcal.cli.models import skeleton
from featcal.cli.options import (
    device_named,
    existing_folder,
    named_folders,
    named_places,
    pairs_by_name,
)
from featcal.cli.publish import Card, result
from featcal.cli.terminal import Json, Quiet, note, say_json, table
from featcal.errors import BadFile, BadSetting, TensorsDiffer
from featcal.settings import require

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from featcal.data.images import ImageSet

EPILOG = """Images need the whole CLIP, for the text tower that makes the zero-shot heads. Texts are answered by what the model
has: a head of classes; without one the likelihood of each label's text (causal models, T5), or the label whose text has the
nearest vector (encoders; of a SentenceTransformer as its own modules say, else the mean over tokens). A row of texts is
{"text": ..., "label": ...}, or {"input": ..., "target": ...} where the targets are the labels.

Examples:

featcal evaluate --model new --clip base --data mnist=images/mnist --template "a photo of the number {}."

featcal evaluate --model new --data reviews=reviews --classes reviews=bad,good --template "This film is {}."
"""
TOKENIZERS = ("tokenizer.json", "vocab.json")


def evaluate(
    model: Annotated[Path, Option(help="Folder of the model to evaluate.")],
    data: Annotated[
        list[str],
        Option(metavar="NAME=PLACE", help="Labelled images or texts of a task; once for each."),
    ],
    clip: Annotated[
        Path | None, Option(help="Images: the whole CLIP, for text tower, projections, processor.")
    ] = None,
    template: Annotated[
        list[str] | None, Option(help="Prompt with {} for the class name; once for each.")
    ] = None,
    classes: Annotated[
        list[str] | None,
        Option(metavar="NAME=A,B,...", help="Texts: names of a task's labels 0, 1, ..."),
    ] = None,
    split: Annotated[str, Option(help="The split of each data folder to evaluate on.")] = "test",
    tokens: Annotated[
        int | None,
        Option(min=1, help="Texts: at most so many; 512, or what the model can, left out."),
    ] = None,
    batch: options.Batch = 64,
    device: options.Device = "auto",
    card: Card = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Accuracy per task, with the names of classes from the data."""
    existing_folder("--model", model)
    for prompt in template or ():
        require("{}" in prompt, "--template", prompt, "must hold {} where the class name goes")
    if clip is None:
        from featcal.data.texts import input_of

        if input_of(skeleton(model)).kind == "pictures":
            raise BadSetting(
                "--clip",
                None,
                "must name the whole CLIP: images are told apart by heads that it makes",
            )
        right = text_answers(
            model, data, template or (), classes or (), split, tokens, batch, device_named(device)
        )
        show(model, {name: (value, None) for name, value in right.items()}, "texts", as_json)
        return tell(model, right, data, split, "text-classification") if card else None
    require(
        not classes and tokens is None,
        "--clip",
        str(clip),
        "is for images, where --classes and --tokens say nothing",
    )
    existing_folder("--clip", clip)
    found = image_answers(
        model, clip, data, template or ["a photo of a {}."], split, batch, device_named(device)
    )
    show(model, found, "images", as_json)
    if card:
        tell(
            model,
            {name: one for name, (one, _) in found.items()},
            data,
            split,
            "zero-shot-image-classification",
        )


def tell(
    model: Path, right: Mapping[str, "Tensor"], data: Sequence[str], split: str, kind: str
) -> None:
    """The accuracies in the model's card. Raises: BadFile for a folder without one."""
    from featcal.card import add_results
    from featcal.evaluation.zero_shot import percent

    places = named_places("--data", data)
    values = {task: round(percent(one) / 100, 4) for task, one in right.items()}
    add_results(
        model,
        [
            result(places[task], task, split, kind, "accuracy", value, "accuracy")
            for task, value in values.items()
        ],
    )


Answered = Mapping[
    str, tuple["Tensor", int | None]
]  # by task which samples are right, and how many classes there are


def image_answers(
    model: Path,
    clip: Path,
    data: Sequence[str],
    templates: list[str],
    split: str,
    batch: int,
    place: "torch.device",
) -> Answered:
    """Zero-shot answers of a vision tower."""
    from featcal.data.images import Preprocess, load_images
    from featcal.evaluation.zero_shot import evaluate_pool, zero_shot_head
    from featcal.models.load import load_clip, load_tokenizer, load_vision

    folders = named_folders("--data", data)
    whole = load_clip(clip).to(place)
    require_fitting(model, clip)
    require_tokenizer(clip)
    tokenizer, preprocess = load_tokenizer(clip), Preprocess.from_folder(clip)
    vision = load_vision(model).to(place)
    tasks = {name: load_images(folder, split, preprocess) for name, folder in folders.items()}
    for name, images in tasks.items():
        require_words(name, clip, tokenizer, images, templates)
    heads = {
        name: zero_shot_head(whole, tokenizer, images.classes, templates)
        for name, images in tasks.items()
    }
    judged = evaluate_pool(
        {"model": vision}, tasks, heads, whole.visual_projection.weight.detach(), batch
    )["model"]
    return {name: (right, len(tasks[name].classes)) for name, right in judged.items()}


def text_answers(
    folder: Path,
    data: Sequence[str],
    templates: Sequence[str],
    classes: Sequence[str],
    split: str,
    tokens: int | None,
    batch: int,
    place: "torch.device",
) -> dict[str, "Tensor"]:
    """Answers on labelled texts, by what the model has."""
    from featcal.data.texts import input_of, load_labelled, reader_for
    from featcal.evaluation.texts import WAYS, Sentences, TextModel, right_answers, way_of
    from featcal.models.load import load_model

    places = named_places("--data", data)
    names = {
        task: told.split(",")
        for task, told in pairs_by_name("--classes", classes, "name=A,B,...").items()
    }
    for task in names:
        require(
            task in places, "--classes", task, f"must name a task of --data: {', '.join(places)}"
        )
    model = load_model(folder).to(place)
    way, sentences = way_of(model), Sentences.of_folder(folder)
    require(
        way != "likelihood" or len(templates) < 2,
        "--template",
        list(templates),
        "must be one for likelihoods",
    )
    require(
        way != "head" or not templates,
        "--template",
        list(templates),
        "is of no use for a model with a head of classes",
    )
    note(
        f"{folder}: {WAYS[way]}"
        + ("" if way != "vectors" or sentences.given else ", the mean over its tokens")
    )
    asked = TextModel(model, reader_for([folder], input_of(model), tokens), batch, sentences)
    found = {}
    for task, where in places.items():
        labelled = load_labelled(where, split, names.get(task))
        named = labelled.samples[0].label is not None and way == "likelihood"
        found[task] = right_answers(asked, labelled, list(templates) or [" {}" if named else "{}"])
    return found


def show(model: Path, answered: Answered, what: str, as_json: bool) -> None:
    """Percent correct of every task and their average."""
    from featcal.evaluation.zero_shot import percent

    found = {name: percent(right) for name, (right, _) in answered.items()}
    if as_json:
        told = {
            name: {"accuracy": value, what: len(answered[name][0])} for name, value in found.items()
        }
        return say_json(
            {"model": str(model), "tasks": told, "average": sum(found.values()) / len(found)}
        )
    several = any(count for _, count in answered.values())
    rows = []
    for name, (right, count) in answered.items():
        rows.append(
            [name, *([str(count)] if several else []), str(len(right)), f"{found[name]:.2f}"]
        )
    rows.append(
        ["average", *([""] if several else []), "", f"{sum(found.values()) / len(found):.2f}"]
    )
    table(
        f"{model}: percent correct",
        ["task", *(["classes"] if several else []), what, "accuracy"],
        rows,
    )


def require_fitting(model: Path, clip: Path) -> None:
    """A model whose pictures fit the text tower's space. Raises: TensorsDiffer."""
    here, there = (skeleton(folder).config.hidden_size for folder in (model, clip))  # type: ignore[union-attr]
    if here != there:
        raise TensorsDiffer("vision width", model, here, clip, there)


def require_tokenizer(clip: Path) -> None:
    """The files of a tokenizer, without which transformers would make one up. Raises: BadFile."""
    if not any((clip / name).is_file() for name in TOKENIZERS):
        raise BadFile(
            clip,
            f"no tokenizer in this folder ({' or '.join(TOKENIZERS)})",
            "copy the tokenizer's files there",
        )


def require_words(
    task: str, clip: Path, tokenizer: Any, images: "ImageSet", templates: list[str]
) -> None:
    """Prompts of which the tokenizer knows every word: an unknown one makes classes look alike and
    the accuracy chance.
    """
    from featcal.evaluation.zero_shot import words_known

    for name in images.classes:
        for template in templates:
            if not words_known(tokenizer, [name], [template]):
                problem = f"holds a word that the tokenizer of {clip} does not know; give other prompts with --template"
                raise BadSetting(f"{task}: prompt", template.replace("{}", name), problem)
