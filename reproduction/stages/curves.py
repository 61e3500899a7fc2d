"""Loss curves of what was trained, shortened to a few points each."""

from collections.abc import Iterator, Sequence
from typing import Any

from featcal.files import read_json
from reproduction.experiments.runs import Pool
from reproduction.stages.context import Context

POINTS = 20


def curves(context: Context, role: str, pool: Pool) -> Iterator[dict[str, Any]]:
    """Means of the loss over consecutive steps: of a merger summed over tasks, as it is minimised;
    of adapters their mean.
    """
    words: dict[str, Any] = {"suite": context.suite.name, "role": role, "pool": pool}
    for key, run in context.experiments.merged_in(role, pool).items():
        record = context.layout.merged(key) / "merge.json"
        loss = read_json(record).get("loss") if record.is_file() else None
        if (
            isinstance(loss, list) and loss
        ):  # AdaMerging; others tell something else there, or nothing
            named = {
                "upstream": run.upstream,
                "method": "merged",
                "setting": "",
                "seed": run.draw.seed if run.draw else "",
            }
            yield from ({**words, **named, **point} for point in shortened(loss))
    for key, adapt in context.experiments.adapted_in(role, pool).items():
        for setting, chosen in (adapt.settings or {}).items():
            for seed in chosen.seeds:
                by_task = read_json(context.layout.adapted(key, setting, seed) / "adapters.json")[
                    "loss"
                ].values()
                mean = [
                    sum(losses) / len(losses) for losses in zip(*by_task, strict=True)
                ]  # none where nothing is trained
                named = {
                    "upstream": adapt.upstream,
                    "method": adapt.method,
                    "setting": setting,
                    "seed": seed,
                }
                yield from ({**words, **named, **point} for point in shortened(mean))


def shortened(losses: Sequence[float]) -> Iterator[dict[str, Any]]:
    """At most POINTS means over stretches of equal length; step: the last of each."""
    length = -(-len(losses) // POINTS) or 1
    for start in range(0, len(losses), length):
        part = losses[start : start + length]
        yield {"step": start + len(part), "loss": float(sum(part) / len(part))}
