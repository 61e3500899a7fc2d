"""The settings of every merging method, by its name; their classes are in method_settings.py and
data_settings.py.

Knows nothing of torch, so that params.yaml is checked before anything heavy is loaded.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from featcal.errors import UnknownKey
from featcal.merging.data_settings import AdaMerging, Fisher, GradientMatching, Mats, RegMean
from featcal.merging.method_settings import (
    Breadcrumbs,
    Consensus,
    Dare,
    DareTies,
    IsoCts,
    NoSettings,
    Pcb,
    TaskArithmetic,
    Ties,
    TsvMerge,
    Wudi,
    WudiClosedForm,
)
from featcal.settings import Settings

SETTINGS: dict[str, type[Settings]] = {
    "average": NoSettings,
    "task_arithmetic": TaskArithmetic,
    "ties": Ties,
    "wudi": Wudi,
    "regmean": RegMean,
    "regmean_plus_plus": RegMean,
    "lot": NoSettings,
    "adamerging": AdaMerging,
    "wudi_closed_form": WudiClosedForm,
    "tsv_merge": TsvMerge,
    "iso_c": TsvMerge,
    "iso_cts": IsoCts,
    "dare": Dare,
    "dare_ties": DareTies,
    "breadcrumbs": Breadcrumbs,
    "consensus": Consensus,
    "pcb": Pcb,
    "mats": Mats,
    "fisher": Fisher,
    "gradient_matching": GradientMatching,
}


class MergeSettings(TypedDict, total=False):
    """What methods can be told, for signatures: every setting of the classes above; a method
    refuses those of others.
    """

    scale: float
    density: float
    combine: Literal["sum", "mean"]
    variant: Literal["fusion_bench", "official", "closed_form"]
    steps: int | None
    rate: float
    exclude: tuple[str, ...] | list[str]
    off_diagonal: float
    granularity: Literal["layer", "task"]
    start: float
    clamp: bool
    batches_per_step: int
    common: float
    drop: float
    seed: int
    keep: float
    remove: float
    threshold: float
    tasks: int
    ratio: float
    normalize: bool
    floor: float
    base_weight: float
    rtol: float | None


def settings_of(method: object, given: Mapping[str, Any], place: str) -> Any:
    """The settings of a method. Raises: UnknownKey for another method or a key it does not take;
    BadSetting for a value.
    """
    if method not in SETTINGS:
        raise UnknownKey(f"{place}.method", str(method), list(SETTINGS))
    return SETTINGS[str(method)].from_mapping(given, place)
