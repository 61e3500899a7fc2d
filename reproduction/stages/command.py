"""`featcal stage`, a command of the reproduction: one stage of dvc.yaml, for DVC rather than for
people.
"""

from typing import Annotated

from typer import Argument

EPILOG = """Examples:

featcal stage calibrate clip_b32-8

featcal stage gather scores/clip_b32-8"""


def stage(
    verb: Annotated[str, Argument(help="What to do: prepare, merge, calibrate, evaluate, ...")],
    key: Annotated[
        str | None, Argument(help="For what: a key of params.yaml, or role and pool.")
    ] = None,
) -> None:
    """Run one stage of dvc.yaml; `dvc repro` calls this in the right order."""
    from reproduction.stages.run import run_stage

    run_stage(verb, key)
