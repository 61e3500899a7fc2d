"""Stage `adapt`: adapters after the merged models of params.yaml."""

from reproduction.engine import spec
from reproduction.engine.adapt import adapt_all
from reproduction.engine.context import load_setup


def run(key: str) -> None:
    """Write outputs/<suite>/adapted/<role>-<pool>/<merger>-<adapter>/<setting>/seed<NN>/ of a role
    and pool.
    """
    setup = load_setup(key)
    with setup.context.recorded("adapt", key):
        models = list(spec.adapted(setup)) if setup.plays else []
        if not models:
            setup.context.not_run(f"adapt {key}", setup.folder("adapted"))
            return
        with spec.replacing(setup.folder("adapted"), models) as made:
            adapt_all(key, setup, made)
