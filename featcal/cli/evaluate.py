"""`featcal evaluate`: accuracy on labelled images (CLIP, zero-shot) or labelled texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.card import read_card
from featcal.cli import inputs, options
from featcal.cli.output import add_to_card, note, say_json, table
from featcal.errors import TensorsDiffer, list_of
from featcal.settings import require

if TYPE_CHECKING:
    from torch import Tensor

    from featcal.data.places import Location

How = tuple[Mapping[str, list[str]], options.Sampling, Any, Mapping[str, str]]  # Any: a device
SETTINGS = (options.Sampling(batch=64, split="test"),)
CLIP = "Whole CLIP, for images. Default: the model, or the base that its folder records."
CLASS_MEANS = "Vision model whose class means on train serve as heads. Default: CLIP's text tower."
WHOLE = "must be the whole CLIP, which makes the heads for images; or give --class-means"
LABELLED = "Labelled images or texts of a task. Repeatable."
TEMPLATE = "Prompt with {} for the class. Repeatable."
CLASSES = "All classes of a task; labels 0, 1, ... are numbered in this order. Repeatable."
FOUND = "{0}: classes found in this split: {1}; to add or to name some: --classes {0}=A,B,..."
EPILOG = """Images need the whole CLIP, whose text tower makes the zero-shot heads, or --class-means with the base.

Texts are classified by the model's own head. Without one, a causal model or T5 chooses the label
with the highest likelihood, and an encoder the label with the nearest vector (a SentenceTransformer
by its own modules, others by the mean over tokens). A row of texts is
{"text": ..., "label": ...}, or {"input": ..., "target": ...} where targets are labels.

Examples:

featcal evaluate --model new --data mnist=images/mnist --template "a photo of the number {}."

featcal evaluate --model new --data reviews=reviews --classes reviews=bad,good --template "This film is {}."
"""


def evaluate(
    model: Annotated[str, Option(**options.MODEL, help="Model to evaluate.")],
    data: Annotated[list[str], Option(metavar="NAME=PATH", help=LABELLED)],
    clip: Annotated[str | None, Option(**options.MODEL, help=CLIP)] = None,
    class_means: Annotated[str | None, Option(**options.MODEL, help=CLASS_MEANS)] = None,
    template: Annotated[list[str] | None, Option(metavar="PROMPT", help=TEMPLATE)] = None,
    classes: Annotated[list[str] | None, Option(metavar="NAME=A,B,...", help=CLASSES)] = None,
    column: options.Column = None,
    setting: Annotated[list[str] | None, options.set_option(*SETTINGS)] = None,
    device: options.Device = "auto",
    card: options.Card = False,
    as_json: options.Json = False,
) -> None:
    """Measure the accuracy of a model on labelled images or texts, task by task."""
    (sampling,) = options.read_set(setting, "evaluate", *SETTINGS)
    prompts, columns = template or [], options.columns_named(column)
    for prompt in prompts:
        require("{}" in prompt, "--template", prompt, "must hold {} where the class name goes")
    collect = inputs.MistakeCollector()
    folder = collect(inputs.model_folder, "--model", model)
    whole = clip and collect(inputs.model_folder, "--clip", clip)
    base = class_means and collect(inputs.model_folder, "--class-means", class_means)
    datasets = inputs.named_data(data, collect)
    if folder:
        collect(inputs.check_config, folder)
    if folder and card:
        collect(read_card, folder)
    collect.report()
    from featcal.data.texts import input_of
    from featcal.evaluation.accuracy import percent
    from featcal.models.load import torch_device
    from featcal.models.stored import skeleton

    model_input = input_of(skeleton(folder), sampling.tokens)
    how = options.classes_named(classes, datasets), sampling, torch_device(device), columns
    if base is not None:
        expected = "stands alone, without --clip and --template"
        require(not (whole or prompts), "--class-means", str(base), expected)
        expected = "must be a folder with pictures of a split train, whose means are the heads"
        for name, location in datasets.items():
            require(location.has_splits, f"--data {name}", str(location.source), expected)
        for checked in (folder, base):
            pictures = input_of(skeleton(checked)).kind == "pictures"
            require(pictures, "--class-means", str(checked), "is for models of images")
        kind, unit = "image-classification", "images"
        answers = image_answers(folder, base, datasets, None, how)
    elif whole is None and model_input.kind != "pictures":
        kind, unit = "text-classification", "texts"
        answers = text_answers(folder, datasets, prompts, how)
    else:
        kind, unit = "zero-shot-image-classification", "images"
        prompts = prompts or inputs.PROMPT
        if whole is None:  # the model itself, or the base that its folder records
            recorded, folders = inputs.names_in(folder), [folder]
            if recorded and recorded.base:
                near = recorded.file.parent
                folders.append(inputs.model_folder(str(recorded.file), recorded.base, near))
            whole = inputs.whole_clip(folders, "--clip", None, WHOLE)
        answers = image_answers(folder, whole, datasets, prompts, how)
    tasks, rows, results = {}, [], []
    for task, (correct, class_count) in answers.items():
        value = percent(correct)
        tasks[task] = {"accuracy": value, unit: len(correct), "classes": class_count}
        rows.append([task, str(class_count), str(len(correct)), f"{value:.2f}"])
        results.append((task, "accuracy", "accuracy", round(value / 100, 4)))
    average = sum(task["accuracy"] for task in tasks.values()) / len(tasks)
    if as_json:
        say_json({"model": str(folder), "tasks": tasks, "average": average})
    else:
        rows.append(["average", "", "", f"{average:.2f}"])
        table(f"{folder}: percent correct", ["task", "classes", unit, "accuracy"], rows)
    if card:
        add_to_card(folder, datasets, sampling.split, kind, results)


def image_answers(
    model: Path, base: Path, data: "Mapping[str, Location]", templates: list[str] | None, how: How
) -> "Mapping[str, tuple[Tensor, int]]":
    """Return by task which images are right, and the number of classes; `base` makes the heads."""
    from featcal.data.images import Preprocess, load_images
    from featcal.evaluation import accuracy
    from featcal.models.load import load_as_calibrated, load_clip, load_tokenizer, load_vision
    from featcal.models.stored import skeleton

    classes, sampling, device, columns = how
    head_model: Any = (load_as_calibrated if templates is None else load_clip)(base).to(device)
    configs = (skeleton(folder).config for folder in (model, base))
    widths = [getattr(getattr(c, "vision_config", c), "hidden_size", None) for c in configs]
    if widths[0] != widths[1]:
        raise TensorsDiffer("vision width", model, widths[0], base, widths[1])

    def read(split: str) -> dict[str, Any]:
        more: Any = {"split": split, "preprocess": Preprocess.from_folder(base), "columns": columns}
        return {n: load_images(classes=classes.get(n), **vars(d), **more) for n, d in data.items()}

    tasks, heads, projection = read(sampling.split), {}, None
    if templates is None:
        for task, images in read("train").items():
            expected = f"must be the classes of its split train: {', '.join(images.classes)}"
            expected += "; or name all with --classes" * tasks[task].occurring
            same = images.classes == tasks[task].classes
            require(same, f"{task}: classes", ", ".join(tasks[task].classes), expected)
            heads[task] = accuracy.class_mean_head(head_model, None, images, sampling.batch, task)
    else:
        tokenizer = load_tokenizer(base)
        expected = f"must hold only words that the tokenizer of {base} knows; use --template"
        for task, images in tasks.items():
            if images.occurring:
                note(FOUND.format(task, list_of(images.classes)))
            for prompt in accuracy.prompts_of(images.classes, templates):
                in_vocabulary = accuracy.words_known(tokenizer, [prompt], ["{}"])
                require(in_vocabulary, f"{task}: prompt", prompt, expected)
            heads[task] = accuracy.zero_shot_head(head_model, tokenizer, images.classes, templates)
        projection = head_model.visual_projection.weight.detach()
    vision: Any = (load_as_calibrated if templates is None else load_vision)(model).to(device)
    pool = accuracy.evaluate_pool({"model": vision}, tasks, heads, projection, sampling.batch)
    return {name: (right, len(tasks[name].classes)) for name, right in pool["model"].items()}


def text_answers(
    folder: Path, data: "Mapping[str, Location]", templates: list[str], how: How
) -> "Mapping[str, tuple[Tensor, int]]":
    """Return by task which texts are right, and the number of classes."""
    from featcal.data.texts import input_of, load_labelled, reader_for
    from featcal.evaluation.accuracy import ANSWER_METHODS, TextModel, answer_method, right_answers
    from featcal.models.load import load_model
    from featcal.models.sentences import Sentences

    classes, sampling, device, columns = how
    model = load_model(folder).to(device)
    method, reader = answer_method(model), reader_for([folder], input_of(model), sampling.tokens)
    sentences, answers = Sentences.of_folder(folder), {}
    expected = "must be a single prompt, as this model scores answers by likelihood"
    require(method != "likelihood" or len(templates) < 2, "--template", templates, expected)
    expected = "is not used by a model with a head of classes"
    require(method != "head" or not templates, "--template", templates, expected)
    mean = ", the mean over its tokens" if method == "vectors" and not sentences.given else ""
    note(f"{folder}: {ANSWER_METHODS[method]}{mean}")
    text_model = TextModel(model, reader, 1 if reader.inputs.alone else sampling.batch, sentences)
    for task, location in data.items():
        labelled = load_labelled(location, sampling.split, classes.get(task), columns)
        if method != "head" and labelled.occurring:
            note(FOUND.format(task, list_of(labelled.classes)))
        named = labelled.samples[0].label is not None and method == "likelihood"
        prompts = templates or [" {}" if named else "{}"]
        answers[task] = right_answers(text_model, labelled, prompts), len(labelled.classes)
    return answers
