"""λ, ρ and α of the preset `best`, on validation samples of images and of texts. Writes
reproduction/preset_choice.json.

Every candidate calibrates from two mergers with 64 samples of each task and is scored on validation
samples; test samples are not looked at. The choice is the candidate with the highest mean over
roles and mergers; the preset is in featcal/settings.py. Averages that are known already are
kept, so that a run that was interrupted goes on. Needs the prepared and merged models.

  python scripts/choose_preset.py clip_b32-8 minilm-8
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import featcal
from featcal.evaluation.zero_shot import evaluate_pool, percent
from featcal.files import read_json, write_json
from reproduction.engine.context import Context, Setup, load_context
from reproduction.engine.samples import streams
from reproduction.engine.workers import fan_out
from reproduction.experiments import Draw, role_and_pool
from reproduction.prepare.sources import load_task

FORM: dict[str, Any] = {
    "residual": 1.0,
    "order": "sites",
    "affine": "joint",
}  # as the page Beyond the paper finds it
RIDGES, ANCHOR_BLENDS, INTERPOLATIONS = (1.0e-4, 1.0e-2, 0.05), (1.0, 4.0, 8.0, 16.0), (0.3, 1.0)
UPSTREAMS = ("task_arithmetic", "wudi_closed_form")
SAMPLES, ROWS, BATCH = (
    64,
    100,
    64,
)  # of each task for a calibration, of each that are scored, and at once
FOUND = Path(__file__).parents[1] / "reproduction" / "preset_choice.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("key", nargs="+")
    keys, context = parser.parse_args().key, load_context()
    averages: dict[str, dict[str, float]] = read_json(FOUND)["averages"] if FOUND.is_file() else {}
    for key, upstream in product(keys, UPSTREAMS):
        known = averages.setdefault(f"{key} {upstream}", {})
        jobs = {
            name: (context, key, upstream, settings)
            for name, settings in candidates().items()
            if name not in known
        }
        for name, value in fan_out(f"{key} {upstream}", average, jobs, context.suite.workers):
            known[name] = value
            write_json(
                FOUND, {"samples": SAMPLES, "rows": ROWS, **choice(averages), "averages": averages}
            )


def candidates() -> dict[str, featcal.Calibration]:
    """Settings by what they are called in the file."""
    return {
        f"ridge {r:g}, anchor_blend {b:g}, interpolation {i:g}": featcal.Calibration(
            ridge=r, anchor_blend=b, interpolation=i, **FORM
        )
        for r, b, i in product(RIDGES, ANCHOR_BLENDS, INTERPOLATIONS)
    }


def choice(averages: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Means of the candidates that every role and merger knows, and the settings of the best of
    them; none until there is one.
    """
    known = [name for name in candidates() if all(name in each for each in averages.values())]
    means = {
        name: round(sum(each[name] for each in averages.values()) / len(averages), 2)
        for name in known
    }
    if not means:
        return {"best": None, "settings": None, "means": {}}
    best = max(means, key=lambda name: means[name])
    settings = candidates()[best].model_dump()
    return {
        "best": best,
        "settings": {
            name: settings[name] for name in ("ridge", "anchor_blend", "interpolation", *FORM)
        },
        "means": means,
    }


def average(context: Context, key: str, upstream: str, settings: featcal.Calibration) -> float:
    """Average accuracy on validation samples, in percent, after a calibration."""
    from safetensors.torch import load_file

    role, pool = role_and_pool(key)
    layout = context.layout
    batches = {
        task: list(given)
        for task, given in streams(
            Setup(context, role, pool), Draw(stream="train", samples=SAMPLES, batch=BATCH, seed=42)
        ).items()
    }
    experts = {task: layout.expert(role, pool, task) for task in batches}
    merged, base = layout.merged(f"{key}-{upstream}"), layout.base(role, pool)
    result = featcal.calibrate(
        merged, base=base, experts=experts, batches=batches, settings=settings
    )
    tensors, values = load_file(layout.heads(role, pool)), []
    for task in experts:
        samples = load_task(layout.data_of(role), task, "validation", base)
        samples = samples.take(range(0, len(samples), max(len(samples) // ROWS, 1)))
        heads, projection = {task: tensors[f"head/{task}"]}, tensors.get("visual_projection")
        values.append(
            percent(
                evaluate_pool({"model": result.model}, {task: samples}, heads, projection)["model"][
                    task
                ]
            )
        )
    return round(sum(values) / len(values), 2)


if __name__ == "__main__":
    main()
