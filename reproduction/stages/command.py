"""`featcal stage`: one stage of dvc.yaml, for DVC rather than for people."""

from pkgutil import resolve_name
from typing import Annotated

from typer import Argument

from featcal.settings import require

EPILOG = """Examples:

featcal stage calibrate clip_b32-8

featcal stage gather scores/clip_b32-8"""
STAGES = {  # their functions, below `reproduction`; other verbs are studies
    "prepare_data": "stages.prepare_data:images",
    "prepare_photos": "stages.prepare:photos",
    "prepare_texts": "stages.prepare_data:texts",
    "prepare": "stages.prepare:run",
    "pretrain": "stages.command:pretrain",
    "merge": "engine.make:run_merge",
    "calibrate": "engine.make:run_calibrate",
    "adapt": "engine.make:run_adapt",
    "multitask": "stages.prepare:multitask",
    "evaluate": "engine.score:run",
    "measure": "stages.measure:run",
    "gather": "results:gather",
    "summary": "stages.page:summary",
    "page": "stages.page:run",
}
LIGHT = ("pretrain", "gather", "summary", "page")  # have no workers
WITHOUT_KEY = ("prepare_data", "prepare_photos", "prepare_texts")


def stage(
    verb: Annotated[str, Argument(help="What to do: prepare, merge, calibrate, evaluate, ...")],
    key: Annotated[
        str | None, Argument(help="For what: a key of params.yaml, or role and pool.")
    ] = None,
) -> None:
    """Run one stage of dvc.yaml; `dvc repro` calls this in the right order."""
    if verb not in LIGHT:
        from reproduction.engine.workers import start_early

        start_early()
    run_stage(verb, key)


def run_stage(verb: str, key: str | None) -> None:
    """Run one stage of dvc.yaml in the current project. Raises: UnknownKey; what the stage raises."""
    valid = (key is None) == (verb in WITHOUT_KEY)
    expected = "takes no key" if verb in WITHOUT_KEY else "needs a key, for example clip_b32-8"
    require(valid, f"stage {verb}", key, expected)
    if verb in STAGES:
        resolve_name(f"reproduction.{STAGES[verb]}")(*([] if key is None else [key]))
        return
    from reproduction.engine.study import run_study
    from reproduction.experiments import require_known, studies

    require_known("stage", verb, (*STAGES, *studies()))
    run_study(verb, str(key))


def pretrain(key: str) -> None:
    """Write reproduction/mini/models/<role>/, which ships; an interrupted run continues."""
    from reproduction.experiments import require_known
    from reproduction.mini.clip import ClipPretraining
    from reproduction.mini.language.llama import LlamaPretraining
    from reproduction.mini.language.t5 import T5Pretraining
    from reproduction.mini.training import STATE, run_to_end
    from reproduction.results import project_root

    bases = (ClipPretraining, T5Pretraining, LlamaPretraining)
    kinds = {role: kind for kind in bases for role in kind.recipes}
    require_known("pretrain", key, kinds)
    kind, root = kinds[key], project_root()
    out = root / "reproduction/mini/models" / key
    run_to_end(kind, kind.recipes[key], key, out, root / STATE)
