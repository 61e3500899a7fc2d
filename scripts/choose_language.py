"""Scores the small T5 models, their experts and their merged models on validation texts. Writes
choice_t5.json.

Nothing here knows calibration or adapters. Wanted, per role: a base of 50-78 points, experts of
85-95, and at least 8 points between task arithmetic at the paper's 0.3 and the experts.
"""

import argparse
from pathlib import Path

import torch

from featcal.files import read_json, write_json
from featcal.models.load import load_model, load_tokenizer
from reproduction.language.generation import score_glue
from reproduction.mini.language.domains import COUNTS, WORLDS, draw_rows, draw_samples
from reproduction.mini.training import MODELS
from reproduction.prepare.fine_tune import fine_tune_text
from reproduction.prepare.suite import FineTuneText, Lora
from reproduction.prepare.tasks import prompted

CHOICE = Path("reproduction/mini/language/choice_t5.json")
ROLES = {"flan_t5_base": FineTuneText(lr=5e-4), "flan_t5_large": FineTuneText(lr=3e-3, lora=Lora())}
SCALES = (0.1, 0.2, 0.3, 0.4, 0.5)
DATA_SEED, EXPERT_SEED, BATCH = 0, 0, 100


def scores(model, tokenizer, tasks) -> dict[str, float]:
    """Validation score of each task."""
    results = {}
    for task in tasks:
        rows = draw_rows(task, "validation", COUNTS["validation"], DATA_SEED)
        pairs = [prompted(task, row) for row in rows]
        results[task] = round(score_glue(model, tokenizer, task, pairs, BATCH)[0], 4)
    return results


def measured(folder: Path, settings: FineTuneText) -> dict:
    """Scores of one role; the base is moved along the sum of all task vectors, of which simple
    averaging takes an eighth.
    """
    tokenizer, base = load_tokenizer(folder), load_model(folder)
    results: dict = {"base": scores(base, tokenizer, WORLDS), "experts": {}}
    start = {name: value.clone() for name, value in base.state_dict().items()}
    vector_sum = {name: torch.zeros_like(value) for name, value in start.items()}
    for task in WORLDS:
        samples = draw_samples(task, "train", COUNTS["train"], DATA_SEED)
        expert = fine_tune_text(folder, samples, settings, task, EXPERT_SEED)
        results["experts"] |= scores(expert, tokenizer, [task])
        print(task, "expert", results["experts"][task], flush=True)
        for name, value in expert.state_dict().items():
            vector_sum[name] += value - start[name]
    factors = {f"task_arithmetic {scale:g}": scale for scale in SCALES}
    for name, scale in ({"average": 1 / len(WORLDS)} | factors).items():
        base.load_state_dict({key: value + scale * vector_sum[key] for key, value in start.items()})
        results[name] = scores(base, tokenizer, WORLDS)
    for name, values in results.items():
        columns = [f"{value:6.1f}" for value in values.values()]
        print(f"{name:22}", *columns, f"| {sum(values.values()) / len(values):5.1f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("roles", nargs="*", default=list(ROLES), choices=[*ROLES, []])
    torch.set_num_threads(1)
    record = read_json(CHOICE) if CHOICE.is_file() else {}
    for role in parser.parse_args().roles:
        record[role] = measured(MODELS / role, ROLES[role])
        write_json(CHOICE, dict(sorted(record.items())))


if __name__ == "__main__":
    main()
