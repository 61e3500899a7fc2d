"""Make merged models from base and experts; the stage `merge`."""

from collections.abc import Iterable
from shutil import rmtree
from typing import Any

from featcal.errors import UnknownKey
from reproduction.engine.context import Setup, load_context
from reproduction.engine.samples import streams
from reproduction.engine.spec import ModelSpec, merged
from reproduction.engine.workers import console


def run(key: str) -> None:
    """Write outputs/<suite>/merged/<role>-<pool>/<merger>/ of a role and pool, or of one merger of
    them, such as `clip_b32-8-wudi`.
    """
    context = load_context()
    known = context.experiments.merge
    runs = [run for run in known.values() if key in (run.key, run.merged)]
    if not runs:
        keys = dict.fromkeys(one for run in known.values() for one in (run.key, run.merged))
        raise UnknownKey("merge", key, list(keys))
    with context.recorded("merge", key):
        setup = Setup(context, runs[0].role, runs[0].pool)
        upstreams = {run.upstream for run in runs}
        models = [m for m in merged(setup) if m.upstream in upstreams] if setup.plays else []
        out = setup.folder("merged") if key == setup.key else setup.merged(runs[0].upstream)
        rmtree(out, ignore_errors=True)
        merge_all(key, setup, models)
        if not models:
            context.not_run(f"merge {key}", out)


def merge_all(label: str, setup: Setup, models: Iterable[ModelSpec]) -> None:
    """Make the merged models, first those that look at samples, since they take longest."""
    chosen = sorted((m for m in models if m.method == "merged"), key=lambda m: m.draw is None)
    setup.context.run(f"{label} merge", merge, {m.name: (setup, m) for m in chosen})


def merge(setup: Setup, model: ModelSpec) -> None:
    """Make one merged model."""
    import featcal
    from featcal.merging.registry import method_named

    run, more = model.settings, dict[str, Any](device=setup.context.device)
    if model.draw is not None:
        more |= {
            "batches": streams(setup, model.draw),
            "head": setup.heads if "head" in method_named(run.method).needs else None,
            "n_jobs": setup.context.suite.workers or 1,  # adamerging takes as long as all others
            "progress": lambda line: console.print(f"  {line}", soft_wrap=True),
        }
    featcal.merge(
        run.method, setup.base, setup.experts, out=model.folder, **more, **(run.options or {})
    )
