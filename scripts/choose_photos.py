"""How well the experts on real images do, and the scale of task arithmetic after them, on validation
images. Writes reproduction/real_images/choice.json.

The scale with the best average is taken, before FeatCal or any adapter has run. Needs the prepared
models: dvc repro pipeline/prepare/dvc.yaml:prepare_role@vit_s-8
"""

from functools import partial
from pathlib import Path

import featcal
from featcal.files import write_json
from reproduction.engine.context import load_setup
from reproduction.engine.samples import Selection
from reproduction.engine.score import answers

SCALES = (0.1, 0.2, 0.3, 0.4, 0.5)
FOUND = Path(__file__).parents[1] / "reproduction" / "real_images" / "choice.json"


def main() -> None:
    """Score base, experts and merged models."""
    setup = load_setup("vit_s-8")
    base, read = setup.load(setup.base), partial(Selection("validation").read, setup)
    models = {f"scale {scale}": merged(setup, scale) for scale in SCALES}

    def of(task: str) -> dict:
        return {"base": base, "expert": setup.load(setup.expert(task)), **models}

    rows = {}
    for name, found in answers(setup, of, read).items():
        scores = {task: round(own["value"], 2) for task, own in found.items()}
        rows[name] = {**scores, "average": round(sum(scores.values()) / len(scores), 2)}
    best = max(SCALES, key=lambda scale: rows[f"scale {scale}"]["average"])
    write_json(FOUND, {"validation": rows, "scale": best})


def merged(setup, scale):
    """Return task arithmetic at a scale."""
    experts = {task: setup.load(folder) for task, folder in setup.experts.items()}
    return featcal.merge("task_arithmetic", setup.load(setup.base), experts, scale=scale)


if __name__ == "__main__":
    main()
