"""Stage `corrupted`: FeatCal and the adapters from damaged calibration images or texts, scored on
clean test samples.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.experiments.comparisons import CorruptedStudy
from reproduction.experiments.runs import Draw
from reproduction.results import CORRUPTED, EXAMPLES, SEEN
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import score
from reproduction.stages.seen import seen_rows
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out

if TYPE_CHECKING:
    import numpy as np

Way = tuple[str, str]  # method and setting
LARGEST = 96  # pixels of an example: enough to see the damage, small enough for git


def run(key: str) -> None:
    """Write outputs/<suite>/corrupted/<key>/: corrupted.csv, what was right and what was seen, and
    the examples.

    All are empty where the suite does not run it.
    """
    tables = {"corrupted.seen": SEEN, "corrupted.examples": EXAMPLES}
    run_study("corrupted", key, found, CORRUPTED, tables, finish=write_sheet)


def found(context: Context, key: str, study: CorruptedStudy, folder: Path) -> Found:
    """Scores, the test samples that were seen, and examples of the damage."""
    rows = scores(context, key, study, folder)
    draws = [study.rivals.draw("surgery", study.samples, seed) for seed in study.seeds]
    seen = seen_rows(context, study.role, study.pool, draws, rows)
    pictures, shown, told = examples(context, study)
    more = {"corrupted.seen": seen, "corrupted.examples": shown}
    return Found(rows, more, {"study": study.model_dump(), **told}, pictures=pictures)


def scores(context: Context, key: str, study: CorruptedStudy, folder: Path) -> list[dict[str, Any]]:
    """Rows of every corruption, seed and method, from models that are made in `folder`."""
    merged = f"{study.role}-{study.pool}-{study.upstream}"
    jobs, models, damage = (
        {},
        [Scored(merged, context.layout.merged(merged), "merged", study.upstream)],
        {},
    )
    for seed in study.seeds:
        for corruption in study.damages:
            for method, setting in study.ways:
                name = f"{corruption}-{method}-{setting}-{seed}"
                adapted_model = "" if method == "featcal" else merged
                models.append(
                    Scored(
                        name, folder / name, method, study.upstream, setting, seed, adapted_model
                    )
                )
                damage[name] = corruption
            for draw, ways in by_draw(study, seed).items():
                outs = {way: folder / f"{corruption}-{'-'.join(way)}-{seed}" for way in ways}
                methods = " and ".join(dict.fromkeys(method for method, _ in ways))
                jobs[f"{corruption}, {methods}, {draw.stream}, seed {seed}"] = (
                    context,
                    study,
                    corruption,
                    draw,
                    outs,
                )
    jobs = dict(
        sorted(jobs.items(), key=lambda job: ("featcal", study.rivals.setting) not in job[1][4])
    )  # the longest first
    for _ in fan_out(f"corrupted {key}", calibrate_on, jobs, context.suite.workers):
        pass
    found = score(context, f"corrupted {key}", study.role, study.pool, models)
    return [
        {**row, "corruption": corruption}
        for name, corruption in damage.items()
        for row in found[name]
    ]


def by_draw(study: CorruptedStudy, seed: int) -> dict[Draw, list[Way]]:
    """The ways to calibrate by the images they see: FeatCal's settings, both adapters, and both on
    training images.
    """
    found: dict[Draw, list[Way]] = {}
    for method, setting in study.ways:
        draw = study.rivals.draw(method, study.samples, seed)
        draw = draw.but(stream="train") if setting.endswith("_train") else draw
        found.setdefault(draw, []).append((method, setting))
    return found


def calibrate_on(
    context: Context, study: CorruptedStudy, corruption: str, draw: Draw, outs: Mapping[Way, Path]
) -> None:
    """Calibrated models and adapters of all tasks from the samples they would see undamaged,
    damaged once for all of them.
    """
    from safetensors.torch import load_file

    import featcal
    from featcal.baselines.training import pool_features
    from featcal.models.load import torch_device
    from reproduction.stages.streams import streams

    layout, role, pool, rivals = context.layout, study.role, study.pool, study.rivals
    merged = layout.merged(f"{role}-{pool}-{study.upstream}")
    experts = {task: layout.expert(role, pool, task) for task in context.suite.tasks_of(role, pool)}
    device = torch_device(context.suite.device)
    batches = streams(
        context,
        role,
        pool,
        draw,
        change=lambda task, samples: damaged(samples, task, corruption, draw.seed),
    )
    pairs = None
    for (method, setting), out in outs.items():
        if method == "featcal":
            base, settings = layout.base(role, pool), rivals.featcal
            if setting != rivals.setting and study.at_papers:
                settings = study.at_papers
            featcal.calibrate(
                merged,
                base=base,
                experts=experts,
                batches=batches,
                settings=settings,
                device=device,
                out=out,
            )
            continue
        if pairs is None:
            head = load_file(layout.heads(role, pool)).get("visual_projection")
            pairs = pool_features(merged, experts, batches, head, device)
        getattr(rivals, method).fit(pairs, draw.seed).save(out)


def damaged(samples: Any, task: str, damage: str, seed: int) -> Any:
    """Images under a corruption, or texts under a damage with its strength behind the name."""
    from reproduction.prepare import damage as made

    name, _, strength = damage.partition("-")
    if strength:
        return made.damaged(samples, task, name, int(strength), seed)
    return made.corrupted(samples, task, name, seed)


def examples(
    context: Context, study: CorruptedStudy
) -> tuple[list[list["np.ndarray"]], list[dict[str, Any]], dict[str, Any]]:
    """Of every second task the first sample that FeatCal sees, clean and damaged, and how strong
    damage is.

    Pictures, and which of them is where; of texts neither, as they are told with the strength.
    """
    from featcal.data.batches import draw_indices
    from reproduction.prepare import damage
    from reproduction.prepare.sources import load_task

    seed, pictures, shown, texts = study.seeds[0], [], [], {}
    data, base = context.layout.data_of(study.role), context.layout.base(study.role, study.pool)
    for row, task in enumerate(context.suite.tasks_of(study.role, study.pool)[1::2]):
        samples: Any = load_task(data, task, "train", base)
        place = draw_indices(task, len(samples.labels), study.samples, seed)[:1]
        samples = (
            samples.take(place) if study.of_texts else samples
        )  # what happens to a picture depends on its place
        versions = {"clean": samples} | {
            name: damaged(samples, task, name, seed) for name in study.damages
        }
        if study.of_texts:
            texts[task] = {name: version.texts[0] for name, version in versions.items()}
            continue
        pictures.append(
            [version.pixels[place][0] for version in versions.values()]
        )  # (3, H, W) each
        words = {"task": task, "index": int(place[0]), "row": row}
        shown += [
            {**words, "corruption": name, "column": column} for column, name in enumerate(versions)
        ]
    if study.of_texts:
        return [], [], {"strengths": damage.damage_strengths(), "examples": texts}
    return pictures, shown, {"strengths": damage.corruption_strengths(pictures[0][0].shape[-1])}


def write_sheet(folder: Path, found: Found) -> None:
    """Rows of examples (3, H, W) as one PNG without gaps, made smaller where they are large; one
    white pixel for none.
    """
    import numpy as np
    from PIL import Image

    pictures, path = found.pictures, folder / "corrupted.examples.png"
    if not pictures:
        Image.new("RGB", (1, 1), "white").save(path)
        return
    sheet = np.concatenate([np.concatenate(row, axis=2) for row in pictures], axis=1).transpose(
        1, 2, 0
    )
    image = Image.fromarray(np.ascontiguousarray(sheet))
    side = pictures[0][0].shape[-1]
    if side > LARGEST:
        image = image.resize(
            (image.width * LARGEST // side, image.height * LARGEST // side), Image.Resampling.BOX
        )
    image.save(path, optimize=True)
