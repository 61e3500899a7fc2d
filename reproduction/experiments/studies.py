"""The studies of params.yaml as settings: experiments that make many models of one role
and pool and keep no weights.

Each is one stage of the same name and writes outputs/<suite>/<study>/<key>/; `gather` copies its
small files to results/. Knows nothing of torch, models or where results go.
"""

from collections.abc import Mapping
from typing import Any

from featcal.errors import UnknownKey
from featcal.settings import Settings, require
from reproduction.experiments.ablate import AblateStudy
from reproduction.experiments.beyond import BeyondStudy
from reproduction.experiments.choices import ChoicesStudy
from reproduction.experiments.comparisons import (
    CorruptedStudy,
    CostStudy,
    ExpertSeedsStudy,
    SamplesStudy,
    SecondEncoderStudy,
    TaskCountsStudy,
)
from reproduction.experiments.entries import Entry, for_suite
from reproduction.experiments.field import FieldStudy
from reproduction.experiments.runs import role_and_pool
from reproduction.experiments.sweeps import SweepStudy
from reproduction.experiments.theory import TheoryStudy
from reproduction.experiments.tunings import TuneStudy

STUDIES: dict[str, type[Settings]] = {
    "ablate": AblateStudy, "samples": SamplesStudy, "corrupted": CorruptedStudy, "cost": CostStudy, "sweep": SweepStudy,
    "theory": TheoryStudy, "choices": ChoicesStudy, "tune": TuneStudy, "task_counts": TaskCountsStudy, "beyond": BeyondStudy,
    "expert_seeds": ExpertSeedsStudy, "field": FieldStudy, "second_encoder": SecondEncoderStudy,
}  # fmt: skip
SHARED = ("rivals", "paper")


def shared(key: str, entry: Any, suite: str) -> Entry:
    """What the studies of one role and pool have in common: `rivals`, and `paper`, FeatCal's
    settings of the paper.
    """
    role_and_pool(key, "studied")
    group = for_suite(f"studied.{key}", entry, suite) or {}
    for word, settings in group.items():
        if word not in SHARED:
            raise UnknownKey(f"studied.{key}.{suite}", str(word), list(SHARED))
        require(
            isinstance(settings, dict),
            f"studied.{key}.{suite}.{word}",
            settings,
            "must be a mapping of settings",
        )
    return group


def study_run(
    kind: str, key: str, entry: Any, suite: str, studied: Mapping[str, Entry] | None = None
) -> Any:
    """One entry of a study's section, as its dataclass; None where the suite does not run it.

    studied: what `shared` returns, by role and pool; a study's own words count more.
    """
    role, pool = role_and_pool(key, kind)
    chosen = for_suite(f"{kind}.{key}", entry, suite)
    if chosen is None:
        return None
    place, common = f"{kind}.{key}.{suite}", (studied or {}).get(key, {})
    words = _with_shared(STUDIES[kind], chosen, common, place)
    return STUDIES[kind].from_mapping({"role": role, "pool": pool, **words}, place)


def _with_shared(kind: type[Settings], own: Entry, common: Entry, place: str) -> dict[str, Any]:
    """A study's words, with those that it leaves to what studies have in common."""
    rivals, paper = common.get("rivals", {}), common.get("paper")
    featcal, setting = rivals.get("featcal"), rivals.get("setting")
    values = {
        "rivals": rivals,
        "setting": setting,
        "featcal": featcal,
        "paper": paper,
        "suite": featcal,
    }
    found = {name: values[name] for name in kind.model_fields if values.get(name)}
    if kind is TuneStudy and setting == "paper":
        found["suite"] = None  # nothing was chosen with labels
    found |= own
    if isinstance(own.get("rivals"), dict):
        found["rivals"] = {**rivals, **own["rivals"]}
    if isinstance(own.get("at_papers"), bool):
        require(
            not own["at_papers"] or paper is not None,
            f"{place}.at_papers",
            True,
            "must be false without `paper` in studied",
        )
        found["at_papers"] = paper if own["at_papers"] else None
    if isinstance(own.get("around"), list):
        at = {"paper": {"featcal": paper}, setting: {"featcal": featcal}}
        found["around"] = [{**at.get(one.get("setting"), {}), **one} for one in own["around"]]
    return found
