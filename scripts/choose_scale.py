"""The scale of task arithmetic after experts on real images or on instructions, and how well those
do, on validation rows. Writes choice.json or choice_14.json of reproduction/real_images, or
choice.json of reproduction/real_language.

The scale with the best average is taken, before FeatCal or any adapter has run. Needs the prepared
models: dvc repro pipeline/prepare/dvc.yaml:prepare_role@vit_s-8

  python scripts/choose_scale.py vit_s-8     (or vit_s-14)
  python scripts/choose_scale.py smollm2-chat
"""

import sys
from pathlib import Path
from typing import Any

import featcal
from featcal.files import write_json
from featcal.models.load import load_tokenizer
from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import Selection
from reproduction.engine.score import model_scores
from reproduction.language.generation import right_answers
from reproduction.prepare.chat import INSTRUCTIONS
from reproduction.prepare.texts import load_texts

SCALES = (0.1, 0.2, 0.3, 0.4, 0.5)
ROWS = 20  # of each task of instructions
CHOICES = {
    "vit_s-8": "real_images/choice.json",
    "vit_s-14": "real_images/choice_14.json",
    "smollm2-chat": "real_language/choice.json",
}


def main(key: str) -> None:
    """Score base, experts and merged models."""
    setup = load_setup(key)
    base = setup.load(setup.base)
    experts = {task: setup.load(folder) for task, folder in setup.experts.items()}
    models: dict[str, Any] = {"base": dict.fromkeys(setup.tasks, base), "expert": experts}
    for scale in SCALES:
        merged = featcal.merge("task_arithmetic", base, experts, scale=scale)
        models[f"scale {scale}"] = dict.fromkeys(setup.tasks, merged)
    all_scores = (chat_scores if setup.of_texts else image_scores)(setup, models)
    rows = {}
    for name, scores in all_scores.items():
        rounded = {task: round(score, 2) for task, score in scores.items()}
        rows[name] = {**rounded, "average": round(sum(rounded.values()) / len(rounded), 2)}
    best = max(SCALES, key=lambda scale: rows[f"scale {scale}"]["average"])
    path = Path(__file__).parents[1] / "reproduction" / CHOICES[key]
    write_json(path, {"validation": rows, "scale": best})


def image_scores(setup: Setup, models: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the accuracy of each model on each task."""
    by_name = {name: by_task.get for name, by_task in models.items()}
    results = model_scores(setup, by_name, Selection("validation"))
    return {
        name: {task: result["value"] for task, result in by_task.items()}
        for name, by_task in results.items()
    }


def chat_scores(setup: Setup, models: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the percentage of right answers by likelihood of each model on each task."""
    tokenizer = load_tokenizer(setup.base)
    scores: dict[str, dict[str, float]] = {name: {} for name in models}
    for task in setup.tasks:
        texts = list(load_texts(setup.texts, task, "validation"))[:ROWS]
        rows = [(text.text, text.target) for text in texts]
        options = [*INSTRUCTIONS[task].answers.values()]
        for name, by_task in models.items():
            right, _ = right_answers(by_task[task], tokenizer, rows, options)
            scores[name][task] = 100 * sum(right) / len(right)
    return scores


if __name__ == "__main__":
    main(sys.argv[1])
