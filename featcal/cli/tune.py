"""`featcal tune`: λ, ρ and α for a merged model, chosen without labels, and the command that
calibrates with them.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.cli import options
from featcal.cli.calibrate import PICTURES, TEXT
from featcal.cli.models import alike_student, named_models, whole_experts
from featcal.cli.options import (
    block_count,
    device_named,
    dtype_named,
    existing_folder,
    named_places,
    stacks_named,
)
from featcal.cli.process import give_back_large_blocks
from featcal.cli.terminal import Json, Quiet, bytes_of, counted, note, say, say_json, table
from featcal.settings import require

if TYPE_CHECKING:
    from featcal.data.places import Place
    from featcal.tuning.search import Tuned

CLIP = "Folder of the whole CLIP: then answers are compared, zero-shot over the class names of the data. Features left out."
WRITTEN = (".json", ".yaml", ".yml")
EPILOG = f"""Pictures, for CLIP, ViT, DINOv2 and SigLIP: {PICTURES}, or a data set of the hub.

Text, for Llama, T5, BERT and others: {TEXT}, a folder that holds train.jsonl, or a data set of the hub.

Examples:

featcal tune --base base --merged merged --expert mnist=m --data mnist=images/mnist --out settings.yaml

featcal tune --recipe merge.yaml --merged merged --data math=math.jsonl --data code=code.jsonl --out settings.yaml

Exit codes: 0 done; 2 a mistake in arguments or files; 130 interrupted, and the same command then goes on where it was."""


def tune(
    merged: options.Merged,
    data: options.Data,
    out: Annotated[
        Path, Option(help="File to write the settings and all trials to: .json or .yaml.")
    ],
    base: options.Base = None,
    expert: options.SomeExperts = None,
    recipe: options.MergekitRecipe = None,
    trials: Annotated[int, Option(min=1, help="Calibrations to try.")] = 16,
    holdout: Annotated[
        float, Option(help="Share of every task's samples on which trials are compared.")
    ] = 0.25,
    ridge: Annotated[float, Option(help="λ of the first trial.")] = 0.05,
    anchor_blend: Annotated[float, Option(help="ρ of the first trial.")] = 2.0,
    interpolation: Annotated[float, Option(help="α of the first trial.")] = 0.3,
    samples: Annotated[
        int, Option(min=2, help="Samples of each task, those held out among them.")
    ] = 256,
    tokens: options.Tokens = None,
    seed: Annotated[
        int, Option(min=0, help="Which samples are drawn and held out, and what is tried.")
    ] = 42,
    batch: options.Batch = 32,
    split: options.Split = "train",
    clip: Annotated[Path | None, Option(help=CLIP)] = None,
    template: Annotated[
        list[str] | None,
        Option(help="With --clip: prompt with {} for the class name; once for each."),
    ] = None,
    module: options.Modules = None,
    stack: options.Stacks = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    host_memory: options.HostMemory = "",
    resume: options.Resume = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose λ, ρ and α without labels: calibrate on a part of the samples, compare with the
    experts on the rest.
    """
    import featcal
    from featcal.settings import Calibration

    start = Calibration(
        ridge=ridge,
        anchor_blend=anchor_blend,
        interpolation=interpolation,
        modules=tuple(module or ()) or None,
    )
    existing_folder("--merged", merged)
    named, places = named_models(base, expert or (), recipe, merged), named_places("--data", data)
    require(out.suffix in WRITTEN, "--out", str(out), f"must end with {', '.join(WRITTEN)}")
    require(not out.exists(), "--out", str(out), "names something that exists; name a new file")
    given: dict[str, Any] = {
        "device": device_named(device),
        "dtype": dtype_named(dtype),
        "resume": resume,
    }
    given |= {"host_memory": bytes_of("--host-memory", host_memory) if host_memory else None}
    from featcal.data.batches import Draw, drawn
    from featcal.models.batch import check_tasks
    from featcal.tuning.search import imported

    imported()
    check_tasks(named.experts, {name: [place] for name, place in places.items()})
    student = alike_student(merged, named)
    plan = stacks_named(student, stack)
    given["plan"] = plan if stack else None
    block_count(student, start.modules, plan)
    given["batches"] = drawn(
        student,
        (named.base, merged),
        places,
        Draw(samples, seed, batch, split, tokens, dtype_named(dtype)),
    )
    if clip is not None:
        given |= zero_shot(
            existing_folder("--clip", clip), places, split, template or ["a photo of a {}."]
        )
    if given["device"].type == "cpu":
        give_back_large_blocks()
    unfinished = out.with_name(f".{out.name}.trials.json")
    given |= {"trials": trials, "holdout": holdout, "seed": seed, "kept_in": unfinished}
    whole = whole_experts(named, out.with_name(f".{out.name}.models"), list(named.experts))
    with whole as given["experts"], counted(trials + 1, "tuning") as progress:
        try:
            found = featcal.tune(
                merged, base=named.base, settings=start, progress=progress, **given
            )
        except KeyboardInterrupt:
            note("the same command goes on after the last finished trial")
            raise
    same: dict[str, Any] = {
        "samples": samples,
        "seed": seed,
        "batch": batch,
        "split": split,
        "device": device,
        "dtype": dtype,
    }
    models = {"--recipe": named.recipe.file if named.recipe else None, "--base": base}
    same |= {"tokens": tokens}
    told = as_mapping(found) | {
        "calibrate": command(
            found,
            merged,
            models,
            {"--expert": expert, "--data": data, "--module": module, "--stack": stack},
            same,
        )
    }
    write(out, told)
    unfinished.unlink(missing_ok=True)
    show(found, told, out, as_json)


def zero_shot(
    clip: Path, places: "Mapping[str, Place]", split: str, templates: Sequence[str]
) -> dict[str, Any]:
    """Projection and, by task, the classes' unit vectors times the logit scale; of the data the
    names of classes are read.
    """
    from featcal.cli.evaluate import require_tokenizer, require_words
    from featcal.data.images import Preprocess, load_images
    from featcal.evaluation.zero_shot import zero_shot_head
    from featcal.models.load import load_clip, load_tokenizer

    for prompt in templates:
        require("{}" in prompt, "--template", prompt, "must hold {} where the class name goes")
    whole = load_clip(clip)
    require_tokenizer(clip)
    tokenizer, heads = load_tokenizer(clip), {}
    for task, place in places.items():
        more = {"revision": place.revision, "config": place.config}
        images = load_images(place.source, split, Preprocess.from_folder(clip), in_memory=0, **more)
        require_words(task, clip, tokenizer, images, list(templates))
        heads[task] = whole.logit_scale.detach().exp() * zero_shot_head(
            whole, tokenizer, images.classes, templates
        )
    return {"head": whole.visual_projection.weight.detach(), "heads": heads}


def command(
    found: "Tuned",
    merged: Path,
    models: Mapping[str, Path | None],
    lists: Mapping[str, Sequence[str] | None],
    same: Mapping[str, Any],
) -> str:
    """The command that calibrates with the chosen settings, on all samples."""
    words = ["featcal", "calibrate", "--merged", str(merged)]
    for option, value in models.items():
        words += [option, str(value)] if value is not None else []
    for option, values in lists.items():
        words += [word for value in values or () for word in (option, value)]
    chosen = {
        name: f"{getattr(found.settings, name):g}"
        for name in ("ridge", "anchor_blend", "interpolation")
    }
    for name, value in {**chosen, **same}.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return shlex.join([*words, "--out", "calibrated"])


def as_mapping(found: "Tuned") -> dict[str, Any]:
    """The chosen settings, and every trial with its divergence over all tasks and of each."""
    listed = [one.content | {"mean": one.mean} for one in found.candidates]
    return {"settings": found.settings.model_dump(), "trial": found.best.number, "trials": listed}


def write(out: Path, told: Mapping[str, Any]) -> None:
    """The file that --out names, as JSON or YAML by its ending."""
    import yaml

    from featcal.files import atomic_path, write_json

    if out.suffix == ".json":
        return write_json(out, told)
    plain = json.loads(json.dumps(told))  # tuples as lists
    with atomic_path(out) as hidden:
        hidden.write_text(
            yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10**6),
            encoding="utf-8",
        )


def show(found: "Tuned", told: Mapping[str, Any], out: Path, as_json: bool) -> None:
    """Every trial, the chosen one marked, and the command that uses it."""
    if as_json:
        return say_json(told)
    rows = []
    for one in found.candidates:
        s, mark = one.settings, "chosen" if one.number == found.best.number else one.origin
        rows.append(
            [
                str(one.number + 1),
                f"{s.ridge:g}",
                f"{s.anchor_blend:g}",
                f"{s.interpolation:g}",
                f"{one.mean:.4f}",
                mark,
            ]
        )
    table(
        "divergence from the experts on samples held out; smaller is better",
        ["trial", "λ", "ρ", "α", "divergence", ""],
        rows,
    )
    say(f"settings: {out}")
    say(f"calibrate with them, on all samples:\n{told['calibrate']}")
