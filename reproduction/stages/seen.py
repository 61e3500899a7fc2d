"""Which test images an adapter or a merger was shown: the draws of its stream again, labels unused
there.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reproduction.experiments.runs import Draw, Pool
from reproduction.results import packed
from reproduction.stages.context import Context


def draws_of(context: Context, role: str, pool: Pool) -> Iterator[Draw]:
    """What every merger and every adapter of a role and pool sees, at every seed."""
    for merged in context.experiments.merged_in(role, pool).values():
        if merged.draw is not None:
            yield merged.draw
    for adapted in context.experiments.adapted_in(role, pool).values():
        for chosen in (adapted.settings or {}).values():
            yield from (chosen.draw.but(seed=seed) for seed in chosen.seeds)


def seen_rows(
    context: Context,
    role: str,
    pool: Pool,
    draws: Iterable[Draw],
    scores: Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """A row per task and draw of test images, once for all who see the same; other draws are left
    out.

    scores: rows that tell how many test images a task has.   A draw of more than there are is all
    of them, as in the streams.
    """
    from featcal.data.batches import draw_indices

    counts = {row["task"]: int(row["count"]) for row in scores}
    tests = dict.fromkeys(
        (draw.stream, draw.samples, draw.seed) for draw in draws if draw.split == "test"
    )
    rows = []
    for stream, samples, seed in tests:
        for task, count in counts.items():
            shown = set(range(count))
            if samples is not None:
                shown = set(draw_indices(task, count, min(samples, count), seed).tolist())
            words = {
                "suite": context.suite.name,
                "role": role,
                "pool": pool,
                "task": task,
                "stream": stream,
            }
            drawn = {
                "samples": samples,
                "seed": seed,
                "count": count,
                "seen": packed(i in shown for i in range(count)),
            }
            rows.append(words | drawn)
    return rows
