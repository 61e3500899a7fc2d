"""How well the experts on instructions do, and the scale of task arithmetic after them, on validation
rows. Writes reproduction/real_language/choice.json.

The scale with the best average is taken, before FeatCal has run. Needs the prepared models:
dvc repro pipeline/prepare/dvc.yaml:prepare_role@smollm2-chat
"""

from pathlib import Path

import featcal
from featcal.files import write_json
from featcal.models.load import load_tokenizer
from reproduction.engine.context import load_setup
from reproduction.language.chat import right_answers
from reproduction.prepare.chat import INSTRUCTIONS
from reproduction.prepare.texts import load_texts

SCALES = (0.1, 0.2, 0.3, 0.4, 0.5)
ROWS = 20  # of each task
FOUND = Path(__file__).parents[1] / "reproduction" / "real_language" / "choice.json"


def main() -> None:
    """Score base, experts and merged models."""
    setup = load_setup("smollm2-chat")
    base, tokenizer = setup.load(setup.base), load_tokenizer(setup.base)
    experts = {task: setup.load(folder) for task, folder in setup.experts.items()}
    rows = {"base": scores(setup, tokenizer, dict.fromkeys(setup.tasks, base))}
    rows["expert"] = scores(setup, tokenizer, experts)
    for scale in SCALES:
        merged = featcal.merge("task_arithmetic", base, experts, scale=scale)
        rows[f"scale {scale}"] = scores(setup, tokenizer, dict.fromkeys(setup.tasks, merged))
    best = max(SCALES, key=lambda scale: rows[f"scale {scale}"]["average"])
    write_json(FOUND, {"validation": rows, "scale": best})


def scores(setup, tokenizer, models):
    """Return the percentage of right answers by likelihood of each task's model, and the average."""
    found = {}
    for task, model in models.items():
        texts = list(load_texts(setup.texts, task, "validation"))[:ROWS]
        rows, words = [(one.text, one.target) for one in texts], INSTRUCTIONS[task].words.values()
        right, _ = right_answers(model, tokenizer, rows, [*words])
        found[task] = round(100 * sum(right) / len(right), 2)
    found = {**found, "average": round(sum(found.values()) / len(found), 2)}
    print(found, flush=True)
    return found


if __name__ == "__main__":
    main()
