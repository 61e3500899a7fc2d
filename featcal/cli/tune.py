"""`featcal tune`: choose λ, ρ and α for a merged model without labels, and print the command that
calibrates with them.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.cli import options
from featcal.cli.calibrate import block_count
from featcal.cli.folders import plan_with, read_inputs, skeleton, whole_experts
from featcal.cli.start import return_large_blocks
from featcal.cli.terminal import bytes_of, note, progress_bar, say, say_json, table
from featcal.settings import Calibration, require

if TYPE_CHECKING:
    from featcal.data.places import Location
    from featcal.tuning.search import Tuned

SETTINGS = (Calibration(), options.Running())
CLIP = "Whole CLIP: compare zero-shot answers over the data's classes. Default: compare features."
SUFFIXES = (".json", ".yaml", ".yml")
EPILOG = f"""{options.DATA_FORMATS}

Examples:

featcal tune --base base --merged merged --expert mnist=m --data mnist=images/mnist --out settings.yaml

featcal tune --merged merged --data math=math.jsonl --data code=code.jsonl --out settings.yaml --set recipe=merge.yaml

Exit codes: 0 done; 2 a mistake in arguments or files; 130 interrupted, and
the same command continues after the last finished trial."""


def tune(
    merged: options.Merged,
    data: options.Data,
    out: Annotated[Path, Option(help="File to write settings and trials to: .json or .yaml.")],
    base: options.Base = None,
    expert: options.RecipeExperts = None,
    trials: Annotated[int, Option(min=1, help="Calibrations to try.")] = 16,
    holdout: Annotated[float, Option(help="Share of samples on which trials are compared.")] = 0.25,
    ridge: Annotated[float, Option(help="λ of the first trial.")] = 0.05,
    anchor_blend: Annotated[float, Option(help="ρ of the first trial.")] = 2.0,
    interpolation: Annotated[float, Option(help="α of the first trial.")] = 0.3,
    samples: Annotated[int, Option(min=2, help="Samples per task, with those held out.")] = 256,
    seed: Annotated[int, Option(min=0, help="Seed of samples, held-out samples and trials.")] = 42,
    clip: Annotated[Path | None, Option(callback=options.must_exist, help=CLIP)] = None,
    template: options.Template = None,
    setting: Annotated[list[str] | None, options.set_option(*SETTINGS)] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    host_memory: options.HostMemory = "",
    as_json: options.Json = False,
) -> None:
    """Choose λ, ρ and α without labels: calibrate on a part of the samples, and compare with the
    experts on the rest.
    """
    import featcal
    from featcal.data.batches import drawn
    from featcal.models.batch import check_tasks
    from featcal.tuning.search import imported

    chosen = Calibration(ridge=ridge, anchor_blend=anchor_blend, interpolation=interpolation)
    first, keys = options.read_set(setting, "tune", chosen, options.Running())
    inputs = read_inputs(base, expert, keys.recipe, merged)
    datasets = options.named_data(data)
    expected = f"must end with {', '.join(SUFFIXES)}"
    require(out.suffix in SUFFIXES, "--out", str(out), expected)
    require(not out.exists(), "--out", str(out), "names something that exists; name a new file")
    where, precision = options.device_named(device), options.dtype_named(dtype)
    memory = bytes_of("--host-memory", host_memory)
    imported()  # optuna, before any work
    check_tasks(inputs.experts, {name: [dataset] for name, dataset in datasets.items()})
    student = skeleton(merged)
    plan = plan_with(student, keys.stack)
    block_count(student, plan, first)
    how: dict[str, Any] = {"device": where, "dtype": precision, "host_memory": memory}
    how |= {"plan": plan if keys.stack else None, "resume": keys.resume}
    how["batches"] = drawn(
        student, (inputs.base, merged), datasets, keys.draw(samples, seed, dtype)
    )
    if clip is not None:
        prompts = template or ["a photo of a {}."]
        how |= scaled_heads(clip, datasets, keys.split, prompts)
    if where.type == "cpu":
        return_large_blocks()
    unfinished = out.with_name(f".{out.name}.trials.json")
    how |= {"trials": trials, "holdout": holdout, "seed": seed, "kept_in": unfinished}
    work = out.with_name(f".{out.name}.models")
    with (
        whole_experts(inputs, work, inputs.experts) as experts,
        progress_bar(trials + 1, "tuning") as progress,
    ):
        how |= {"base": inputs.base, "experts": experts, "settings": first}
        try:
            tuned = featcal.tune(merged, progress=progress, **how)
        except KeyboardInterrupt:
            note("the same command continues after the last finished trial")
            raise
    chosen = {key.replace("_", "-"): key for key in ("ridge", "anchor_blend", "interpolation")}
    repeated = {
        "--merged": [merged],
        "--base": [base] if base else [],
        "--expert": expert or [],
        "--data": data,
        **{f"--{name}": [f"{getattr(tuned.settings, key):g}"] for name, key in chosen.items()},
        "--samples": [samples],
        "--seed": [seed],
        "--device": [device],
        "--dtype": [dtype],
        "--set": [pair for pair in setting or () if not pair.startswith("resume=")],
        "--out": ["calibrated"],
    }
    arguments = [a for option, given in repeated.items() for one in given for a in (option, one)]
    trial_list = [one.content | {"mean": one.mean} for one in tuned.candidates]
    content = {
        "settings": tuned.settings.model_dump(),
        "trial": tuned.best.number,
        "trials": trial_list,
        "calibrate": shlex.join(["featcal", "calibrate", *map(str, arguments)]),
    }
    write_settings(out, content)
    unfinished.unlink(missing_ok=True)
    show_trials(tuned, content, out, as_json)


def scaled_heads(
    folder: Path, datasets: "Mapping[str, Location]", split: str, templates: list[str]
) -> dict[str, Any]:
    """Return CLIP's projection and, by task, the classes' unit vectors times the logit scale."""
    from featcal.cli.evaluate import zero_shot_heads
    from featcal.data.images import Preprocess, load_images
    from featcal.models.load import load_clip

    for prompt in templates:
        require("{}" in prompt, "--template", prompt, "must hold {} where the class name goes")
    clip, preprocess = load_clip(folder), Preprocess.from_folder(folder)
    tasks = {}
    for task, dataset in datasets.items():
        source = {"revision": dataset.revision, "config": dataset.config}
        tasks[task] = load_images(dataset.source, split, preprocess, in_memory=0, **source)
    heads = zero_shot_heads(folder, clip, tasks, templates)
    scale = clip.logit_scale.detach().exp()
    return {
        "head": clip.visual_projection.weight.detach(),
        "heads": {task: scale * head for task, head in heads.items()},
    }


def write_settings(out: Path, content: Mapping[str, Any]) -> None:
    """Write the settings and trials as JSON or YAML, by the ending of the file."""
    import yaml

    from featcal.files import atomic_path, write_json

    if out.suffix == ".json":
        return write_json(out, content)
    plain = json.loads(json.dumps(content))  # tuples as lists
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10**6)
    with atomic_path(out) as hidden:
        hidden.write_text(text, encoding="utf-8")


def show_trials(tuned: "Tuned", content: Mapping[str, Any], out: Path, as_json: bool) -> None:
    """Print every trial, the chosen one marked, and the command that uses it."""
    if as_json:
        return say_json(content)
    rows = []
    for one in tuned.candidates:
        s, mark = one.settings, "chosen" if one.number == tuned.best.number else one.origin
        values = [f"{value:g}" for value in (s.ridge, s.anchor_blend, s.interpolation)]
        rows.append([str(one.number + 1), *values, f"{one.mean:.4f}", mark])
    columns = ["trial", "λ", "ρ", "α", "divergence", ""]
    table("divergence from the experts on held-out samples; smaller is better", columns, rows)
    say(f"settings: {out}")
    say(f"calibrate with them, on all samples:\n{content['calibrate']}")
