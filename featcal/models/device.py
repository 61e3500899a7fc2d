"""Where models run: a word of the settings as a device of torch."""

import torch

from featcal.errors import BadSetting


def torch_device(word: str | torch.device) -> torch.device:
    """A device by torch's name, or "auto": the GPU where there is one. Raises: BadSetting; so for
    cuda that torch lacks.
    """
    there = torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if there else "cpu") if word == "auto" else word)
    except (RuntimeError, TypeError, ValueError):
        raise BadSetting(
            "device", word, "must be cpu, cuda or auto, or another device of torch"
        ) from None
    if device.type == "cuda" and not there:
        way_out = "needs a GPU that this torch can use (see `featcal doctor`); write auto or cpu to run without one"
        raise BadSetting("device", word, way_out)
    return device
