"""How merged models are made from base and experts."""

from collections.abc import Iterable
from typing import Any

from reproduction.engine.context import Setup
from reproduction.engine.samples import streams
from reproduction.engine.spec import ModelSpec
from reproduction.engine.workers import console


def merge_all(label: str, setup: Setup, models: Iterable[ModelSpec]) -> None:
    """Make the merged models, first those that look at samples, since they take longest."""
    merged = sorted((m for m in models if m.method == "merged"), key=lambda m: m.draw is None)
    setup.context.run(f"{label} merge", merge, {m.name: (setup, m) for m in merged})


def merge(setup: Setup, model: ModelSpec) -> None:
    """Make one merged model."""
    import featcal
    from featcal.merging.registry import method_named

    run, more = model.settings, dict[str, Any]()
    if model.draw is not None:
        more = {
            "batches": streams(setup, model.draw),
            "head": setup.heads if "head" in method_named(run.method).needs else None,
            "device": setup.context.device,
            "n_jobs": setup.context.suite.workers or 1,  # adamerging takes as long as all others
            "progress": lambda line: console.print(f"  {line}", soft_wrap=True),
        }
    featcal.merge(
        run.method, setup.base, setup.experts, out=model.folder, **more, **(run.options or {})
    )
