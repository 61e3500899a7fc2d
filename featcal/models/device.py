"""Where models run: a word of the settings as a device of torch."""

import torch

from featcal.errors import BadSetting


def torch_device(word: str) -> torch.device:
    """ "cpu", "cuda", or "auto": the GPU where there is one. Raises: BadSetting for cuda without a GPU that torch can use."""
    there = torch.cuda.is_available()
    if word == "cuda" and not there:
        way_out = "needs a GPU that this torch can use (see `featcal doctor`); write auto or cpu to run without one"
        raise BadSetting("device", word, way_out)
    return torch.device("cuda" if word == "cuda" or (word == "auto" and there) else "cpu")
