"""`featcal merge`: merge several experts by any method, with its settings as `--set NAME=VALUE`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_origin

from typer import Argument, Option

from featcal.cli import options, output
from featcal.cli.inputs import Request, read_inputs
from featcal.cli.output import note, say, say_json
from featcal.errors import FeatCalError, UnknownKey
from featcal.merging.registry import method_named, method_names, methods_table


class MergeSampling(options.Sampling):
    """Keys of --set that every method has."""

    embeddings: str = "merge"


SETTINGS = (MergeSampling(batch=16),)
SCALE = "Scale of the task vectors. Default: the method's."
DATA = "Samples of a task, if the method needs any. Repeatable."
SAMPLES = "Samples per task (lot: 16 to 64). Default: 256, or all there are."
SEED = "Random seed for drawing samples, and of a method that draws."
HEAD = "Zero-shot heads (heads.safetensors), if the method needs them."
SET = (
    "A setting of the method. Repeatable. With every method: batch=16 (samples per batch; for "
    "adamerging per step), split=train, tokens (maximum per text), embeddings=merge (base keeps "
    "the base's)."
)
METHODS = "\n\n".join(f"{n}: {keys or 'no settings'}. {of}." for n, keys, of in methods_table())
EPILOG = f"""Methods and their settings, with defaults (vocabulary: token embeddings and language heads):

{METHODS}

Examples:

featcal merge task_arithmetic --scale 0.3 --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged

featcal merge regmean --base base --expert mnist=m --expert dtd=d --data mnist=images/mnist --data dtd=images/dtd --out merged"""


def merge(
    method: Annotated[str, Argument(metavar="METHOD", help=f"{', '.join(method_names())}.")],
    base: Annotated[str, Option(**options.MODEL, help=options.BASE)],
    expert: Annotated[list[str], Option(**options.NAMED, help=options.EXPERT)],
    out: options.Out,
    scale: Annotated[float | None, Option(help=SCALE)] = None,
    setting: Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help=SET)] = None,
    data: Annotated[list[str] | None, Option(metavar="NAME=PATH", help=DATA)] = None,
    column: options.Column = None,
    head: Annotated[Path | None, Option(help=HEAD)] = None,
    samples: Annotated[int | None, Option(min=1, help=SAMPLES)] = None,
    seed: Annotated[int, Option(min=0, help=SEED)] = 42,
    device: options.Device = "auto",
    push_to_hub: options.Push = None,
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Merge experts into one model. Tensors are read one at a time where the method allows it."""
    typed = [*(setting or ()), *([] if scale is None else [f"scale={scale}"])]
    pairs = options.pairs_by_name("--set", typed, "NAME=VALUE", "density=0.1")
    common = [f"{key}={pairs.pop(key)}" for key in MergeSampling.model_fields if key in pairs]
    (keys,) = options.read_set(common, "merge", *SETTINGS)
    if method not in method_names():
        raise UnknownKey("METHOD", method, method_names())
    inputs = read_inputs(None, base, expert, data)
    output.new_folder(out, force, filter(None, (head, *inputs.folders)))
    output.require_space("--out", out, output.stored_bytes(inputs.base))
    output.require_hub(push_to_hub)
    from featcal.merging.merge import merge as merge_folders

    entry = method_named(method)
    fields = entry.settings.model_fields
    settings: dict[str, Any] = {"seed": seed} if "seed" in fields else {}
    for name, text in pairs.items():
        if name not in fields:
            raise UnknownKey(f"merge.{method}", name, fields)
        plain = get_origin(fields[name].annotation) is tuple and text[0] != "["
        settings[name] = text.split(",") if plain else options.yaml_scalar(text)
    typed = [o for o, v in (("--data", data), ("--samples", samples), ("--column", column)) if v]
    typed += [f"--set {pair}" for pair in common if not pair.startswith("embeddings=")]
    if typed and "batches" not in entry.needs:
        problem = f"{method} uses no calibration data (--data)"
        raise FeatCalError(", ".join(typed), problem, "leave it out")
    extra: Any = {"head": head, "embeddings": keys.embeddings, "device": device}
    if inputs.data:
        # the base's folder alone says how texts are prepared
        of_base = replace(inputs, experts=dict.fromkeys(inputs.experts, inputs.base))
        draw = keys.draw(samples or options.DEFAULT_SAMPLES, seed, column=column)
        request = Request(of_base, keys, draw, device, {})
        draws = request.draws(samples)
        extra["batches"] = request.batches(draws)
        extra["_complete"] = partial(request.record, draws=draws)
    merge_folders(method, inputs.base, inputs.experts, out=out, progress=note, **extra, **settings)
    if as_json:
        experts = {name: str(folder) for name, folder in inputs.experts.items()}
        content = {"folder": str(out), "method": method, "settings": settings}
        say_json(content | {"base": str(inputs.base), "experts": experts})
    else:
        say(f"{method} of {', '.join(inputs.experts)}: {out}")
    output.push(out, push_to_hub)
