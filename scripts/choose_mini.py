"""Chose the mini suite, on validation images only. Writes reproduction/mini/choice.json.

`suite` chooses the strength of the domain shift, then the scale of task arithmetic; it knows no
calibration and no adapter. (What is not chosen here, the tasks, the frozen embeddings and the
models' shapes, comes from a prototype whose scores were seen.)
  1. One strength for both roles, from .35 ... .65: base averages over the 8 tasks lie in 40-55 for
     both, and the sum of their distances to the paper's 48.2 is smallest. If a check of 2 fails, the
     next nearest strength is tried.
  2. Checks, per role, 8 tasks: experts at least 85; simple averaging and task arithmetic 8-20
     points above the base and at least 20 below the experts.
  3. One scale per pool for both roles: the best mean validation average among those that pass check
     2 (of all, if none does), with every seed of expert training: three for 8 tasks, else one.
`settings`, run only after that is frozen, chooses lambda, alpha and rho for the suite, one after
the other, on both roles together; among equals it stays with the value it started from.
`wudi` chooses the rate of WUDI's Adam for one role by the merger's own loss on its experts of 8 tasks
(`dvc repro pipeline/prepare/dvc.yaml:prepare@clip_b32-8`), without any image: of RATES the one with
the lowest loss after the source's 400 steps. The source's own rate is the first. Writes
reproduction/mini/wudi_rate.json, by role. `wudi vit_s` does so for the model of real images.
"""

import argparse
import json
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from featcal.evaluation.accuracy import evaluate_pool, percent
from featcal.files import atomic_path
from featcal.models.load import load_clip, load_tokenizer
from reproduction.engine.workers import fan_out
from reproduction.mini.clip import TEMPLATES
from reproduction.mini.images import TASKS, drawn_set
from reproduction.mini.training import MODELS
from reproduction.prepare.fine_tune import fine_tune
from reproduction.prepare.suite import FineTune

ROLES = ("clip_b32", "clip_l14")
POOLS = {str(size): list(TASKS)[:size] for size in (8, 14, 20)}
STRENGTHS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65)
SCALES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
SEEDS = (0, 1, 2)
PAPER_BASE = 48.2
TRAIN, VALIDATION, DATA_SEED, SAMPLES, DRAW = 1200, 300, 0, 256, 1
RIDGES, BLENDS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 1e-2, 5e-2), (1.0, 2.0, 3.0)
GRID = {"ridge": RIDGES, "interpolation": (0.3, 0.6, 0.9, 1.0), "anchor_blend": BLENDS}
START = {"ridge": 3e-4, "interpolation": 0.6, "anchor_blend": 2.0}
RATES = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)
PREPARED = Path("outputs/mini/prepared")
WUDI_RATE = Path("reproduction/mini/wudi_rate.json")
CHOICE = Path("reproduction/mini/choice.json")
CACHE = Path(".featcal/choose")
WORKERS = 2
cached_set = cache(drawn_set)  # a worker process meets the same split many times


class Base:
    """Return a base's vision tower, and the frozen classifier of each task after it."""

    def __init__(self, role: str):
        clip = load_clip(MODELS / role)
        tokenizer = load_tokenizer(MODELS / role)
        self.vision = clip.vision_model.eval()
        self.projection = clip.visual_projection.weight.detach()
        self.logit_scale = clip.logit_scale.detach()
        with torch.no_grad():
            self.heads = {key: self._head(clip, tokenizer, task) for key, task in TASKS.items()}

    def _head(self, clip, tokenizer, task) -> torch.Tensor:
        total = 0.0
        for template in range(TEMPLATES):
            prompts = [task.templates[template].format(name) for name in task.classes]
            tokens = tokenizer(prompts, padding=True, return_tensors="pt")
            total = total + F.normalize(clip.get_text_features(**tokens).pooler_output, dim=-1)
        return F.normalize(total, dim=-1)

    def average(self, data: dict, weights: dict | None = None) -> float:
        """Return the average accuracy on the tasks of `data`, in percent."""
        if weights is not None:
            self.vision.load_state_dict(weights)
        right = evaluate_pool({"": self.vision}, data, self.heads, self.projection, 100)[""]
        return float(np.mean([percent(flags) for flags in right.values()]))


def validation(role: str, tasks, strength: float) -> dict:
    arguments = ("validation", VALIDATION, DATA_SEED, strength)
    return {task: cached_set(MODELS / role, task, *arguments) for task in tasks}


def base_average(role: str, strength: float) -> float:
    return Base(role).average(validation(role, POOLS["8"], strength))


def expert_file(role: str, task: str, seed: int, strength: float) -> Path:
    return CACHE / f"{strength:.2f}" / role / f"seed{seed}" / f"{task}.safetensors"


def make_expert(role: str, task: str, seed: int, strength: float) -> float:
    """Its validation accuracy; the weights stay in the cache."""
    path, base = expert_file(role, task, seed, strength), Base(role)
    if not path.is_file():
        rows = {task: cached_set(MODELS / role, task, "train", TRAIN, DATA_SEED, strength)}
        heads = {"visual_projection": base.projection, "logit_scale": base.logit_scale}
        heads[f"head/{task}"] = base.heads[task]
        recipe = FineTune(steps=250 if TASKS[task].hard else 100)
        expert = fine_tune(base.vision, heads, rows, recipe, seed)
        with atomic_path(path) as hidden:
            save_file(expert.state_dict(), hidden)
    return base.average(validation(role, [task], strength), load_file(path))


def merged_weights(base: dict, role: str, tasks, seed: int, strength: float, scale: float) -> dict:
    """base + scale * sum of (expert - base); scale 1/T is simple averaging."""
    merged = {name: value.clone() for name, value in base.items()}
    for task in tasks:
        for name, value in load_file(expert_file(role, task, seed, strength)).items():
            merged[name] += scale * (value - base[name])
    return merged


def merged_averages(role: str, pool: str, seed: int, strength: float) -> dict:
    """Validation averages of the base, simple averaging and task arithmetic at every scale."""
    base, tasks = Base(role), POOLS[pool]
    data = validation(role, tasks, strength)
    start = {n: v.clone() for n, v in base.vision.state_dict().items()}

    def average(scale: float) -> float:
        return base.average(data, merged_weights(start, role, tasks, seed, strength, scale))

    scores = {"base": average(0.0), "average": average(1 / len(tasks))}
    return scores | {"task_arithmetic": {f"{scale:g}": average(scale) for scale in SCALES}}


def measured(strength: float, pools, seeds) -> dict:
    """pool -> role -> seed -> averages of base, experts, simple averaging, task arithmetic."""
    tasks = max((POOLS[pool] for pool in pools), key=len)
    roles = ROLES[::-1]  # the larger model first
    models = product(roles, seeds, tasks)
    jobs = {f"{r} {t} seed {s}": (r, t, s, strength) for r, s, t in models}
    experts = dict(fan_out("experts", make_expert, jobs, WORKERS))
    models = product(roles, pools, seeds)
    jobs = {f"{r}/{p}/{s}": (r, p, s, strength) for r, p, s in models}
    scores_of: dict = {pool: {role: {} for role in ROLES} for pool in pools}
    for name, scores in fan_out("merged", merged_averages, jobs, WORKERS):
        role, pool, seed = name.split("/")
        accuracies = {task: experts[f"{role} {task} seed {seed}"] for task in POOLS[pool]}
        mean = float(np.mean(list(accuracies.values())))
        scores_of[pool][role][seed] = scores | {"experts": mean, "expert_of": accuracies}
    return scores_of


def passes(scores: dict, value: float) -> bool:
    """Check 2 for one merged average."""
    return 8 <= value - scores["base"] <= 20 and scores["experts"] - value >= 20


def best_scale(by_role: dict) -> dict:
    """Return the chosen scale of a pool, and whether every check of 2 holds with it."""
    runs = [scores for seeds in by_role.values() for scores in seeds.values()]
    means, passing = {}, []
    for scale in runs[0]["task_arithmetic"]:
        values = [scores["task_arithmetic"][scale] for scores in runs]
        means[scale] = float(np.mean(values))
        passing += [scale] if all(map(passes, runs, values)) else []
    averaging = all(s["experts"] >= 85 and passes(s, s["average"]) for s in runs)
    best = float(max(passing or means, key=means.__getitem__))
    return {"scale": best, "checks_hold": bool(passing) and averaging}


def choose_suite() -> None:
    jobs = {f"{role}/{s:g}": (role, s) for role, s in product(ROLES[::-1], STRENGTHS)}
    bases = dict(fan_out("bases", base_average, jobs, WORKERS))
    table = {f"{s:g}": {role: bases[f"{role}/{s:g}"] for role in ROLES} for s in STRENGTHS}
    distance = {s: sum(abs(v - PAPER_BASE) for v in row.values()) for s, row in table.items()}
    in_range = [s for s, row in table.items() if all(40 <= v <= 55 for v in row.values())]
    checks: dict = {}
    for strength in sorted(in_range, key=distance.__getitem__):
        pool8 = measured(float(strength), ["8"], SEEDS[:1])["8"]
        checks[strength] = best_scale(pool8) | {"scores": pool8}
        print(strength, json.dumps(checks[strength]), flush=True)
        if checks[strength]["checks_hold"]:
            break
    else:
        raise SystemExit(f"no strength passes every check; base averages: {table}")
    spread = measured(float(strength), ["8"], SEEDS)
    larger = measured(float(strength), ["14", "20"], SEEDS[:1])
    scales = {pool: best_scale(by_role) for pool, by_role in (spread | larger).items()}
    measurements = {"base_by_strength": table, "tried": checks}
    measurements |= {"pools": spread | larger, "checked": scales}
    scale = {role: {pool: scales[pool]["scale"] for pool in POOLS} for role in ROLES}
    write({"suite": measurements}, {"strength": float(strength), "scale": scale})


def write(measurements: dict, chosen: dict) -> None:
    record = json.loads(CHOICE.read_text()) if CHOICE.is_file() else {}
    record |= measurements | {"chosen": record.get("chosen", {}) | chosen, "images": "validation"}
    write_rounded(CHOICE, record)


def write_rounded(path: Path, record: dict) -> None:
    """Write JSON whose floats have six digits."""
    rounded = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.6g}"))
    with atomic_path(path) as hidden:
        hidden.write_text(json.dumps(rounded, indent=1, sort_keys=True) + "\n")


def calibrated_average(role: str, strength: float, scale: float, values: dict) -> float:
    from featcal.calibration.calibrate import calibrate
    from featcal.settings import Calibration

    base, tasks = Base(role), POOLS["8"]
    start = {n: v.clone() for n, v in base.vision.state_dict().items()}
    merged, origin, batches, experts = Base(role).vision, Base(role).vision, {}, {}
    merged.load_state_dict(merged_weights(start, role, tasks, 0, strength, scale))
    for task in tasks:
        rows = cached_set(MODELS / role, task, "train", TRAIN, DATA_SEED, strength)
        order = np.random.default_rng([DRAW, len(task), *task.encode()]).permutation(TRAIN)
        batches[task] = list(rows.batches(order[:SAMPLES], SAMPLES))
        experts[task] = Base(role).vision
        experts[task].load_state_dict(load_file(expert_file(role, task, 0, strength)))
    models = {"base": origin, "experts": experts}
    result = calibrate(merged, **models, batches=batches, settings=Calibration(**values))
    return base.average(validation(role, tasks, strength), result.model.state_dict())


def choose_settings() -> None:
    frozen = json.loads(CHOICE.read_text())["chosen"]
    chosen, sweeps = dict(START), {}
    for name, grid in GRID.items():
        jobs = {}
        for value, role in product(grid, ROLES[::-1]):
            fixed = (role, frozen["strength"], frozen["scale"][role]["8"])
            jobs[f"{role}/{value:g}"] = (*fixed, chosen | {name: value})
        scores_of = dict(fan_out(name, calibrated_average, jobs, WORKERS))
        sweeps[name] = {
            f"{v:g}": {role: scores_of[f"{role}/{v:g}"] for role in ROLES} for v in grid
        }
        # with no reason to move, the value it started from
        score = {v: (sum(sweeps[name][f"{v:g}"].values()), v == START[name]) for v in grid}
        chosen[name] = max(grid, key=score.__getitem__)
        print(name, sweeps[name], "->", chosen[name], flush=True)
    about = {"start": START, "samples": SAMPLES, "draw_seed": DRAW}
    about |= {"upstream": "task_arithmetic", "pool": "8"}
    write({"settings": about | {"sweeps": sweeps}}, {"settings": chosen})


def wudi_loss(role: str, rate: float) -> float:
    """Return the loss that WUDI ends at, summed over matrices."""
    from featcal.merging.merge import merge

    prepared = PREPARED / f"{role}-8"
    experts = {path.name: path for path in sorted((prepared / "experts").iterdir())}
    with TemporaryDirectory() as folder:
        out = merge("wudi", prepared / "base", experts, rate=rate, out=Path(folder, "merged"))
        return json.loads(Path(out, "merge.json").read_text())["loss"][-1]


def choose_wudi(role: str) -> None:
    jobs = {f"{rate:g}": (role, rate) for rate in RATES}
    losses = dict(fan_out("wudi", wudi_loss, jobs, WORKERS))
    best = min(losses, key=losses.__getitem__)
    rates = json.loads(WUDI_RATE.read_text()) if WUDI_RATE.is_file() else {}
    rates[role] = {"chosen": float(best), "losses": {rate: losses[rate] for rate in jobs}}
    with atomic_path(WUDI_RATE) as hidden:
        hidden.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["suite", "settings", "wudi"])
    parser.add_argument("role", nargs="?", default="clip_b32", help="for wudi")
    args = parser.parse_args()
    if args.what == "wudi":
        choose_wudi(args.role)
    else:
        {"suite": choose_suite, "settings": choose_settings}[args.what]()
