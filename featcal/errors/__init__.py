"""Every mistake a user can make, one class each, with its text and the way out; anything else is a fault of ours."""

from featcal.errors.base import FeatCalError
from featcal.errors.files import BadData, BadFile, DiskFull, HubUnreachable, MissingPath, NoSafetensors, TruncatedFile
from featcal.errors.models import (
    AdapterMisfit,
    BadCapture,
    BadPlan,
    MissingTensor,
    NotFinite,
    ReplayDiffers,
    TensorsDiffer,
    UnknownModelClass,
    WrongKeys,
)
from featcal.errors.runs import AdapterDiverged, BadBatches, SingularGram, TaskMismatch, TrainingDiverged
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
    "HubUnreachable",
    "MissingPath",
    "MissingTensor",
    "NoSafetensors",
    "NotFinite",
    "ReplayDiffers",
    "SingularGram",
    "TaskMismatch",
    "TensorsDiffer",
    "TrainingDiverged",
    "TruncatedFile",
    "UnknownKey",
    "UnknownModelClass",
    "WrongKeys",
]
