"""What the benchmarks share: two contestants timed in turns, peak memory of this process, the
machine, random models.
"""

import argparse
import copy
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

MIB = 2**20


def synchronise(device: str) -> None:
    """Wait for the GPU, where there is one."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any], device: str) -> float:
    """Of one call: on one CPU thread its processor time, which neighbours lengthen less; else the
    clock.
    """
    several = torch.get_num_threads() > 1  # whose waiting would count as often as there are threads
    clock = time.perf_counter if several or device.startswith("cuda") else time.process_time
    synchronise(device)
    start = clock()
    run()
    synchronise(device)
    return clock() - start


def in_turns(
    plain: Callable[[], Any], ours: Callable[[], Any], repeats: int, device: str = "cpu"
) -> list[tuple[float, float]]:
    """Seconds (plain, ours) of `repeats` pairs, taken in turns so that both meet the same
    neighbours.

    Callers run both once before, to compare the results; that is the warm-up.
    """
    return [(seconds(plain, device), seconds(ours, device)) for _ in range(repeats)]


def ratio(pairs: list[tuple[float, float]]) -> str:
    """Median of plain / ours over the pairs, with the range."""
    ratios = [plain / ours for plain, ours in pairs]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)"


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the peak. Elsewhere than on Linux both are the
    peak.

    Linux hands `getrusage`'s peak on from the parent to a new program, so it would hide what a
    small child needs.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split(f"{field}:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )


def machine(device: str) -> str:
    """One line: the processor or GPU, threads and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    name = (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"{cpu}, {torch.get_num_threads()} thread(s)"
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}; {versions}"


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with one option per default, and --device and --threads."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, value in (defaults | {"device": "cpu", "threads": 1}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def tower(width: int = 768, layers: int = 12, image: int = 224, patch: int = 32) -> CLIPVisionModel:
    """A CLIP vision tower with random weights; ViT-B/32's shape by default."""
    shape = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": max(1, width // 64),
    }
    config = CLIPVisionConfig(**shape, num_hidden_layers=layers, image_size=image, patch_size=patch)
    return moved(CLIPVisionModel(config).eval(), 0, 0.02, keep=0.0)


@torch.no_grad()
def moved(model: nn.Module, seed: int, scale: float, keep: float = 1.0) -> nn.Module:
    """A copy with every parameter moved by a draw from the seed, a stand-in for fine-tuning; norms
    keep their scale.
    """
    model, g = copy.deepcopy(model), seeded(seed)
    for name, p in model.named_parameters():
        norm = "norm" in name.lower() and name.endswith("weight")
        p.mul_(1.0 if norm else keep).add_(
            scale * torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
        )
    return model


@torch.no_grad()
def averaged(models: list[nn.Module]) -> nn.Module:
    """Simple averaging of parameters."""
    result = copy.deepcopy(models[0])
    for p, *others in zip(result.parameters(), *(m.parameters() for m in models[1:]), strict=True):
        p.copy_((p + sum(others)) / len(models))
    return result


def images(seed: int, count: int, size: int = 224) -> Tensor:
    """Random images as tensors (count, 3, size, size), smooth enough that neighbouring pixels are
    alike.
    """
    coarse = torch.randn(count, 3, max(2, size // 8), max(2, size // 8), generator=seeded(seed))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")


@torch.no_grad()
def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """Largest ‖p − q‖ / ‖q‖ over the parameters of two models."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).norm() / q.norm().clamp_min(1e-30)) for p, q in pairs)
