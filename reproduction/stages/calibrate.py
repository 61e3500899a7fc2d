"""Stage `calibrate`: FeatCal on the merged models of params.yaml."""

from typing import Any

from reproduction.engine import spec
from reproduction.engine.calibrate import calibrate_all
from reproduction.engine.context import load_setup


def run(key: str) -> None:
    """Write outputs/<suite>/calibrated/<role>-<pool>/<merger>-<setting>/seed<NN>/ of a role and
    pool; of language models also anchor/ next to it.
    """
    setup = load_setup(key)
    with setup.context.recorded("calibrate", key) as record:
        models = [*(spec.anchors(setup) if setup.of_texts else ()), *spec.calibrated(setup)]
        models = models if setup.plays else []
        if not models:
            setup.context.not_run(f"calibrate {key}", setup.folder("calibrated"))
            return
        with spec.replacing(setup.folder("calibrated"), models) as made:
            seconds = calibrate_all(key, setup, made)
        record["cost"] = cost = dict[str, dict[str, Any]]()
        for model in models:
            if model.method == "featcal":
                run = model.name.partition("/")[0]  # its key in params.yaml
                own = cost.setdefault(f"calibrate@{run}", {})
                own[f"seed {model.seed}"] = {"seconds": round(seconds[model.name], 3)}
