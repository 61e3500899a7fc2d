"""Every mistake a user can make, one class each, with its text and the way out; anything else is a fault of ours."""

from featcal.errors.base import FeatCalError
from featcal.errors.files import BadData, BadFile, DiskFull, HubUnreachable, MissingPath, NoSafetensors, TruncatedFile
from featcal.errors.models import (
    BadCapture,
    BadPlan,
    MissingTensor,
    NotFinite,
    ReplayDiffers,
    TensorsDiffer,
    UnknownModelClass,
    WrongKeys,
)
from featcal.errors.runs import BadBatches, MergeDiverged, SingularGram, SingularSum, TaskMismatch, TrainingDiverged
from featcal.errors.settings import BadPage, BadSetting, UnknownKey

__all__ = [
    "BadBatches",
    "BadCapture",
    "BadData",
    "BadFile",
    "BadPage",
    "BadPlan",
    "BadSetting",
    "DiskFull",
    "FeatCalError",
    "HubUnreachable",
    "MergeDiverged",
    "MissingPath",
    "MissingTensor",
    "NoSafetensors",
    "NotFinite",
    "ReplayDiffers",
    "SingularGram",
    "SingularSum",
    "TaskMismatch",
    "TensorsDiffer",
    "TrainingDiverged",
    "TruncatedFile",
    "UnknownKey",
    "UnknownModelClass",
    "WrongKeys",
]
