"""Every mistake a user can make, one class each, with its text and the way out; anything else is a fault of ours."""

from featcal.errors.base import FeatCalError
from featcal.errors.files import BadData, BadFile, DiskFull, HubUnreachable, MissingPath, NoSafetensors, TruncatedFile
from featcal.errors.models import (
    AdapterMisfit,
    BadCapture,
    BadPlan,
    MissingTensor,
    NotFinite,
    NotFloating,
    ReplayDiffers,
    TensorsDiffer,
    TypesDiffer,
    UnknownInput,
    UnknownModelClass,
    WrongKeys,
)
from featcal.errors.runs import (
    AdapterDiverged,
    BadBatches,
    FoundElsewhere,
    LostRank,
    SingularGram,
    TaskMismatch,
    TooManyRanks,
    TrainingDiverged,
)
from featcal.errors.settings import BadPage, BadSetting, UnknownKey

__all__ = [
    "AdapterDiverged",
    "AdapterMisfit",
    "BadBatches",
    "BadCapture",
    "BadData",
    "BadFile",
    "BadPage",
    "BadPlan",
    "BadSetting",
    "DiskFull",
    "FeatCalError",
    "FoundElsewhere",
    "HubUnreachable",
    "LostRank",
    "MissingPath",
    "MissingTensor",
    "NoSafetensors",
    "NotFinite",
    "NotFloating",
    "ReplayDiffers",
    "SingularGram",
    "TaskMismatch",
    "TensorsDiffer",
    "TooManyRanks",
    "TrainingDiverged",
    "TruncatedFile",
    "TypesDiffer",
    "UnknownInput",
    "UnknownKey",
    "UnknownModelClass",
    "WrongKeys",
]
