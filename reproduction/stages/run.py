"""`featcal stage VERB [KEY]`: the table of stages."""

from collections.abc import Callable
from importlib import import_module

from featcal.errors import BadSetting
from reproduction.experiments.runs import require_known
from reproduction.experiments.studies import STUDIES

VERBS = (
    "pretrain", "prepare_data", "prepare_texts", "prepare", "merge", "calibrate", "adapt", "multitask", "evaluate",
    "measure", *STUDIES, "gather", "summary", "page",
)  # fmt: skip
WITHOUT_KEY = ("prepare_data", "prepare_texts")


def run_stage(verb: str, key: str | None) -> None:
    """Run one stage of dvc.yaml in the project that holds the current folder.

    Raises: UnknownKey for a verb or key that does not exist; whatever the stage itself raises.
    """
    require_known("stage", verb, VERBS)
    if (key is None) != (verb in WITHOUT_KEY):
        raise BadSetting(
            f"stage {verb}",
            key,
            "takes no key" if verb in WITHOUT_KEY else "needs a key, for example clip_b32-8",
        )
    run: Callable[..., None] = import_module(f"reproduction.stages.{verb}").run
    run(*([] if key is None else [key]))
