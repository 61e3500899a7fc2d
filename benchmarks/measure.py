"""Helpers of the benchmarks: the machine, peak memory of this process, options, random models."""

import argparse
import copy
import platform
import resource
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from featcal.settings import Calibration

ROOT = Path(__file__).parents[1]
MIB = 2**20
SETTINGS = Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.3)  # the paper's for CLIP


def memory(field: str) -> int:
    """Return bytes of this process: VmRSS now, VmHWM at the peak; elsewhere than on Linux the peak.

    Linux hands `getrusage`'s peak on from the parent to a new program, so it would hide what a
    small child needs.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split(f"{field}:")[1].split()[0]) * 1024
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine(device: str) -> str:
    """Return one line: the processor or GPU, threads and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    name = f"{next(names, platform.processor())}, {torch.get_num_threads()} thread(s)"
    name = torch.cuda.get_device_name() if device.startswith("cuda") else name
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}; Python {platform.python_version()}, {libraries}"


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with one option per default, and --device and --threads."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, value in ({"device": "cpu", "threads": 1} | defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser


def seeded(seed: int) -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(seed)


def tower(width: int = 768, layers: int = 12) -> CLIPVisionModel:
    """Return a CLIP vision tower with random weights; ViT-B/32's shape by default."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    heads = max(1, width // 64)
    config = CLIPVisionConfig(**sizes, num_attention_heads=heads, image_size=224, patch_size=32)
    return moved(CLIPVisionModel(config).eval(), 0, 0.02, keep=0.0)


@torch.no_grad()
def moved(model: nn.Module, seed: int, scale: float, keep: float = 1.0) -> nn.Module:
    """Return a copy with every parameter moved by a draw from the seed, as fine-tuning would; norms
    keep their scale.
    """
    model, g = copy.deepcopy(model), seeded(seed)
    for name, p in model.named_parameters():
        norm = "norm" in name.lower() and name.endswith("weight")
        draw = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
        p.mul_(1.0 if norm else keep).add_(scale * draw)
    return model


@torch.no_grad()
def averaged(models: list[nn.Module]) -> nn.Module:
    """Return the simple average of parameters."""
    result = copy.deepcopy(models[0])
    for p, *others in zip(result.parameters(), *(m.parameters() for m in models[1:]), strict=True):
        p.copy_((p + sum(others)) / len(models))
    return result


def images(seed: int, count: int, size: int = 224) -> Tensor:
    """Return random images (count, 3, size, size), smooth enough that neighbouring pixels are
    alike.
    """
    coarse = torch.randn(count, 3, max(2, size // 8), max(2, size // 8), generator=seeded(seed))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")


@torch.no_grad()
def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """Return the largest ‖p − q‖ / ‖q‖ over the parameters of two models."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).norm() / q.norm().clamp_min(1e-30)) for p, q in pairs)
