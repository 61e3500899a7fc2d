"""Features of one task by a merged model and its expert as one safetensors file, between encoding
and training.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from featcal.baselines.adapters import Pair


def write_pair(pair: Pair, path: Path) -> None:
    """Write the features as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in vars(pair).items()}, path)


def read_pair(path: Path, device: torch.device) -> Pair:
    """What write_pair wrote, features on the device; how many rows a sample has is read on the
    CPU.
    """
    tensors = load_file(path)
    return Pair(tensors["merged"].to(device), tensors["expert"].to(device), tensors["sizes"])
