"""Chose the Llama part of the mini suite, on validation texts only. Writes
reproduction/mini/language/choice_llama.json.

Per role: the six scores of the base, of the three experts, of their average and of task arithmetic
at several scales. Knows no calibration and no adapter. What was chosen by it, before anything was
calibrated: the shares of the base's reading and its careless answers, and the experts' steps and
learning rate (bases far from perfect in the experts' domains, experts best in their own). The scale
of task arithmetic is the paper's 0.3.

  python scripts/choose_llama.py [role ...] [--steps N] [--lr X] [--rows N] [--write]
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from choose_mini import write_rounded

import featcal
from featcal.data.texts import Sample
from featcal.files import read_json
from featcal.models.load import load_model, load_tokenizer
from reproduction.language.answers import CHECKS
from reproduction.language.generation import generate_texts
from reproduction.mini.language.domains import (
    DOMAINS,
    TESTS,
    TRAINING,
    test_items,
    test_row,
    training_items,
)
from reproduction.mini.training import MODELS
from reproduction.prepare.fine_tune import fine_tune_text
from reproduction.prepare.suite import FineTuneText, load_suite

ROLES = ("llama_3b", "llama_8b")
SCALES = (0.1, 0.2, 0.3, 0.4, 0.5)
DATA_SEED, EXPERT_SEED, BATCH = 0, 0, 50
CHOICE = Path("reproduction/mini/language/choice_llama.json")


def scores(model, tokenizer, rows: int) -> dict[str, float]:
    """Percent right of each test on validation prompts, and their mean."""
    results = {}
    for key, test in TESTS.items():
        items = test_items(key, "validation", rows, DATA_SEED)
        answers = generate_texts(
            model, tokenizer, [item.prompt for item in items], BATCH, test.new_tokens
        )
        pairs = zip(items, answers, strict=True)
        right = [CHECKS[test.check](test_row(key, item), answer) for item, answer in pairs]
        results[key] = 100 * float(np.mean(right))
    return results | {"average": float(np.mean(list(results.values())))}


def measured(role: str, settings: FineTuneText, rows: int) -> dict[str, dict[str, float]]:
    folder, table = MODELS / role, {}
    tokenizer, base, experts = load_tokenizer(folder), load_model(folder).eval(), []

    def add(name: str, model: Any) -> None:
        table[name] = scores(model, tokenizer, rows)
        values = " ".join(f"{value:5.1f}" for value in table[name].values())
        print(f"{role} {name:20}", values, flush=True)

    add("base", base)
    for domain in DOMAINS:
        items = training_items(domain, "train", TRAINING["train"], DATA_SEED)
        samples = [
            Sample(f"{domain} {n}", item.prompt, f"{item.target}\n") for n, item in enumerate(items)
        ]
        experts.append(fine_tune_text(folder, samples, settings, domain, EXPERT_SEED))
        add(domain, experts[-1])
    add("average", featcal.merge("average", base, experts))
    for scale in SCALES:
        merged = featcal.merge("task_arithmetic", base, experts, scale=scale)
        add(f"task_arithmetic {scale:g}", merged)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("roles", nargs="*", default=ROLES)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = read_json(CHOICE) if CHOICE.is_file() else {}
    for role in args.roles:
        options = {"steps": args.steps, "lr": args.lr}
        changes = {name: value for name, value in options.items() if value is not None}
        settings = load_suite(Path(), "mini").language.roles[role].fine_tune.but(**changes)
        values = {name: getattr(settings, name) for name in ("steps", "lr", "batch", "frozen")}
        validation = measured(role, settings, args.rows)
        results[role] = {"validation": validation, "rows": args.rows, "experts": values}
    if args.write:
        write_rounded(CHOICE, results)


if __name__ == "__main__":
    main()
