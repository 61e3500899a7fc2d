"""Stage `merge`: the merged models of params.yaml."""

from shutil import rmtree

from featcal.errors import UnknownKey
from reproduction.engine import spec
from reproduction.engine.context import Setup, load_context
from reproduction.engine.merge import merge_all


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
        models = [m for m in spec.merged(setup) if m.upstream in upstreams] if setup.plays else []
        out = setup.folder("merged") if key == setup.key else setup.merged(runs[0].upstream)
        rmtree(out, ignore_errors=True)
        merge_all(key, setup, models)
        if not models:
            context.not_run(f"merge {key}", out)
