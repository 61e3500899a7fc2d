"""`featcal stage`, a command of the reproduction: one stage of dvc.yaml, for DVC rather than for
people.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated

from typer import Argument

from featcal.settings import require

EPILOG = """Examples:

featcal stage calibrate clip_b32-8

featcal stage gather scores/clip_b32-8"""
STAGES = tuple(  # files of this folder, each with a function `run`; other verbs are studies
    "prepare_data prepare_photos prepare_texts prepare pretrain merge calibrate adapt multitask"
    " evaluate measure gather summary page".split()
)
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
    """Run one stage of dvc.yaml in the project that holds the current folder.

    Raises: UnknownKey for an unknown verb or key; whatever the stage itself raises.
    """
    fine = (key is None) == (verb in WITHOUT_KEY)
    expected = "takes no key" if verb in WITHOUT_KEY else "needs a key, for example clip_b32-8"
    require(fine, f"stage {verb}", key, expected)
    run: Callable[..., None]
    if verb in STAGES:
        run = import_module(f"reproduction.stages.{verb}").run
    else:
        from reproduction.engine.study import run_study
        from reproduction.experiments import require_known, studies

        require_known("stage", verb, (*STAGES, *studies()))
        run = partial(run_study, verb)
    run(*([] if key is None else [key]))
