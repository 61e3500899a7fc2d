"""What preprocessor_config.json says, in the words of `Preprocess`; what a file leaves out is its
processor's default.

Known are the processors of CLIP, ViT, DeiT, BiT (DINOv2) and SigLIP, whose steps are resize, crop,
rescale and normalise. Any
other, and any step beyond these, is refused: other pixels would be another calibration. Opens no
picture.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image

from featcal.errors import BadFile

Processor = Literal["pil", "torchvision"]  # what resizes
PROCESSORS: tuple[Processor, ...] = get_args(Processor)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC = int(Image.Resampling.BILINEAR), int(Image.Resampling.BICUBIC)

_CLIP = {
    "size": {"shortest_edge": 224},
    "crop": True,
    "resample": BICUBIC,
    "mean": CLIP_MEAN,
    "std": CLIP_STD,
    "square": False,
}
_SQUARE = {"size": {"height": 224, "width": 224}, "crop": False, "mean": HALF, "std": HALF}
DEFAULTS: dict[str, dict[str, Any]] = {  # square: what a bare number means as size
    "CLIP": _CLIP,
    "Bit": _CLIP,
    "ViT": _SQUARE | {"resample": BILINEAR, "square": True},
    "Siglip": _SQUARE | {"resample": BICUBIC, "square": False},
    "DeiT": _SQUARE
    | {"size": {"height": 256, "width": 256}, "crop": True, "resample": BICUBIC, "square": True},
}
_SUFFIX = re.compile(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$")
MEND = "give the preprocessor_config.json that was saved with this model"
OTHERWISE = "prepare the pictures with transformers' AutoImageProcessor and call featcal.calibrate from Python with such batches"


def steps(path: Path, content: object) -> dict[str, Any]:
    """Fields of `Preprocess` from the content of a processor's file. Raises: BadFile naming the
    file and the entry.
    """
    if not isinstance(content, dict):
        raise BadFile(path, "not a mapping of settings", MEND)
    kind = (
        content.get("image_processor_type")
        or content.get("feature_extractor_type")
        or "CLIPImageProcessor"
    )
    family = DEFAULTS.get(_SUFFIX.sub("", str(kind)))
    if family is None:
        raise BadFile(
            path,
            f"pictures are prepared by {kind}; known are those of {', '.join(sorted(DEFAULTS))}",
            OTHERWISE,
        )
    if content.get("do_pad"):
        raise BadFile(path, "do_pad is set, a step that is not known here", OTHERWISE)
    resize, normalise = content.get("do_resize", True), content.get("do_normalize", True)
    shortest, resized = (
        _size(path, content.get("size", family["size"]), family["square"])
        if resize
        else (None, None)
    )
    crop = content.get("crop_size", 224) if content.get("do_center_crop", family["crop"]) else None
    return {
        "shortest": shortest,
        "resized": resized,
        "crop": None if crop is None else _rectangle(path, "crop_size", crop),
        "resample": _resample(path, content.get("resample", family["resample"])),
        "factor": _number(path, content, "rescale_factor", 1 / 255)
        if content.get("do_rescale", True)
        else 1.0,
        "mean": _channels(path, "image_mean", content.get("image_mean", family["mean"]))
        if normalise
        else (0.0,) * 3,
        "std": _channels(path, "image_std", content.get("image_std", family["std"]))
        if normalise
        else (1.0,) * 3,
    }


def _size(path: Path, size: Any, square: bool) -> tuple[int | None, tuple[int, int] | None]:
    """The short side, or (height, width)."""
    if isinstance(size, int) and not square:  # files from 2021 hold a bare number
        size = {"shortest_edge": size}
    if isinstance(size, Mapping) and set(size) == {"shortest_edge"}:
        return _pixels(path, "size", size, size["shortest_edge"]), None
    if isinstance(size, Mapping) and set(size) != {"height", "width"}:
        raise BadFile(
            path, f"size is {size}; known are shortest_edge, or height and width", OTHERWISE
        )
    return None, _rectangle(path, "size", size)


def _rectangle(path: Path, key: str, value: Any) -> tuple[int, int]:
    """(height, width)."""
    sides = {"height": value, "width": value} if isinstance(value, int) else value
    if not isinstance(sides, Mapping) or set(sides) != {"height", "width"}:
        raise BadFile(
            path, f"{key} is {value!r}, which is neither a number nor height and width", MEND
        )
    return _pixels(path, key, value, sides["height"]), _pixels(path, key, value, sides["width"])


def _pixels(path: Path, key: str, whole: Any, side: Any) -> int:
    if not isinstance(side, int) or side < 1:
        raise BadFile(path, f"{key} is {whole!r}, which is no number of pixels", MEND)
    return side


def _resample(path: Path, value: Any) -> int:
    if value not in list(Image.Resampling):
        raise BadFile(
            path, f"resample is {value!r}, which PIL does not know", "2 is bilinear, 3 bicubic"
        )
    return int(value)


def _number(path: Path, content: Mapping[str, Any], key: str, default: float) -> float:
    value = content.get(key, default)
    if not isinstance(value, int | float):
        raise BadFile(path, f"{key} is {value!r}, which is no number", MEND)
    return value


def _channels(path: Path, key: str, value: Any) -> tuple[float, ...]:
    """One number for each of the three channels."""
    numbers = [value] * 3 if isinstance(value, int | float) else value
    if (
        not isinstance(numbers, list | tuple)
        or len(numbers) != 3
        or not all(isinstance(n, int | float) for n in numbers)
    ):
        raise BadFile(path, f"{key} is {value!r}; three numbers are expected, one a channel", MEND)
    return tuple(numbers)
