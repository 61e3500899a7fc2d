"""How pictures are prepared: open_clip's preprocess_cfg as transformers' preprocessor_config.json,
and back.

open_clip resizes to the model's own picture size, so a processor that does something else cannot be
said in its words.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from featcal.data.images import Preprocess
from featcal.errors import BadFile

_RESAMPLE = {
    "bicubic": 3,
    "bilinear": 2,
    "random": 3,
}  # PIL's numbers; "random" varies in training only
# what open_clip does where a configuration says nothing
DEFAULT = {
    "mean": OPENAI_CLIP_MEAN,
    "std": OPENAI_CLIP_STD,
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


def processor(theirs: Mapping[str, Any], side: int, place: object) -> dict[str, Any]:
    """The content of preprocessor_config.json. Raises: BadFile."""
    chosen = DEFAULT | {key: value for key, value in theirs.items() if value is not None}
    mode, interpolation = chosen["resize_mode"], chosen["interpolation"]
    if mode not in ("shortest", "squash") or interpolation not in _RESAMPLE:
        problem = f"pictures are resized by {mode!r} with {interpolation!r}, for which transformers has no counterpart"
        raise BadFile(
            place,
            problem,
            "resize_mode must be shortest or squash, interpolation bicubic or bilinear",
        )
    square = {"height": side, "width": side}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side} if mode == "shortest" else square,
        "resample": _RESAMPLE[interpolation],
        "do_center_crop": True,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _three(chosen["mean"]),
        "image_std": _three(chosen["std"]),
        "do_convert_rgb": True,
    }


def preprocess_cfg(folder: Path, side: int) -> dict[str, Any]:
    """open_clip's words for what a folder's processor does. Raises: MissingPath; BadFile for what
    it cannot say.
    """
    ours = Preprocess.from_folder(folder).processor
    square, size = {"height": side, "width": side}, dict(ours.size)
    cropped = ours.do_center_crop and dict(ours.crop_size) == square
    squashed = size == square and (cropped or not ours.do_center_crop)
    shortest = size == {"shortest_edge": side} and cropped
    words = {number: word for word, number in _RESAMPLE.items() if word != "random"}
    if (
        not ours.do_resize
        or not (ours.do_rescale and ours.do_normalize)
        or not (squashed or shortest)
        or ours.resample not in words
        or abs(ours.rescale_factor * 255 - 1) > 1e-9
    ):
        problem = f"its image processor does not resize to {side} pixels, bicubic or bilinear, and scale to [0, 1]"
        raise BadFile(
            folder,
            f"{problem}, which is all that open_clip can do for this model",
            "change preprocessor_config.json",
        )
    return {
        "mean": list(ours.image_mean),
        "std": list(ours.image_std),
        "interpolation": words[ours.resample],
        "resize_mode": "squash" if squashed else "shortest",
    }


def _three(value: Any) -> list[float]:
    return list(value) if isinstance(value, list | tuple) else [value] * 3
