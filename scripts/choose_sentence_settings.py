"""Settings of the real encoder's mergers and of FeatCal, on validation texts. Writes
reproduction/real_text/settings_choice.json.

The experts were trained before and stay; test texts are not looked at. Of task arithmetic with 14
and 20 tasks the scale, chosen by its own score before anything was calibrated (with 8 it is the
paper's); of FeatCal λ, ρ and α with 8, the best mean over the mergers of UPSTREAMS, since one
choice serves them all, on fewer texts than it is run with. What was interrupted goes on.
Needs the prepared and merged models: dvc repro pipeline/merge/dvc.yaml:merge@minilm-8

  python scripts/choose_sentence_settings.py featcal minilm-8
  python scripts/choose_sentence_settings.py scale minilm-14
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import featcal
from featcal.files import read_json, write_json
from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import load_split, streams
from reproduction.engine.score import average, task_scores
from reproduction.engine.workers import fan_out
from reproduction.experiments import SampleDraw

GRID = (1.0e-4, 1.0e-2, 0.05), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), (0.3, 0.9)
UPSTREAMS = ("task_arithmetic", "wudi")
SCALES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
SAMPLES = 64  # of each task, for a calibration
ROWS = 150  # of each task that are scored
OUT = Path(__file__).parents[1] / "reproduction" / "real_text" / "settings_choice.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["featcal", "scale"])
    parser.add_argument("key", nargs="+")
    args = parser.parse_args()
    record = read_json(OUT) if OUT.is_file() else {}
    for key in args.key:
        setup = load_setup(key)
        entry = record.setdefault(key, {}).setdefault(args.what, {"rows": ROWS})
        if args.what == "scale":
            points = {f"scale {scale:g}": (scale,) for scale in SCALES}
            function, mergers = merged, ("task_arithmetic",)
        else:
            text = "ridge {:g}, anchor_blend {:g}, interpolation {:g}"
            points = {text.format(*point): point for point in product(*GRID)}
            function, mergers = calibrated, UPSTREAMS
        scores: dict[str, dict[str, float]] = entry.setdefault("by_merger", {})
        for merger in mergers:
            done = scores.setdefault(merger, {})
            jobs = {n: (setup, merger, *point) for n, point in points.items() if n not in done}
            workers = setup.context.suite.workers
            for name, value in fan_out(f"{key} {merger}", function, jobs, workers):
                done[name] = value
                write_json(OUT, record)
        entry["averages"] = {
            name: round(sum(s[name] for s in scores.values()) / len(scores), 2) for name in points
        }
        entry["best"] = max(points, key=entry["averages"].__getitem__)
        write_json(OUT, record)


def merged(setup: Setup, merger: str, scale: float) -> float:
    """Return the average accuracy of a merged model at one scale."""
    base = setup.load(setup.base)
    experts = {task: setup.load(folder) for task, folder in setup.experts.items()}
    return score(setup, featcal.merge(merger, base, experts, scale=scale))


def calibrated(
    setup: Setup, merger: str, ridge: float, anchor_blend: float, interpolation: float
) -> float:
    """Return the average accuracy of a merged model after FeatCal."""
    result = featcal.calibrate(
        setup.merged(merger),
        base=setup.base,
        experts=setup.experts,
        batches=streams(setup, SampleDraw(stream="train", samples=SAMPLES, batch=64)),
        settings=featcal.Calibration(
            ridge=ridge, anchor_blend=anchor_blend, interpolation=interpolation
        ),
    )
    return score(setup, result.model)


def score(setup: Setup, model: Any) -> float:
    """Return the average accuracy on validation texts, in percent."""

    def read(task: str) -> Any:
        texts = load_split(setup, task, "validation")
        return texts.take(range(0, len(texts), max(len(texts) // ROWS, 1)))  # of every length

    return round(average(task_scores(setup, lambda _: {"model": model}, read)["model"]), 2)


if __name__ == "__main__":
    main()
