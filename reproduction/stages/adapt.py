"""Stage `adapt`: adapters after the merged models of params.yaml."""

from shutil import rmtree

from reproduction.engine import spec
from reproduction.engine.adapt import adapt_all
from reproduction.engine.context import load_setup


def adapt(key: str) -> None:
    """Write outputs/<suite>/adapted/<role>-<pool>/<merger>-<adapter>/<setting>/seed<NN>/ of a role
    and pool.
    """
    setup = load_setup(key)
    with setup.context.recorded("adapt", key):
        models = list(spec.adapted(setup)) if setup.plays else []
        rmtree(setup.folder("adapted"), ignore_errors=True)
        adapt_all(key, setup, models)
        if not models:
            setup.context.not_run(f"adapt {key}", setup.folder("adapted"))
