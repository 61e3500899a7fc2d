"""Full-size architectures with random weights on a CUDA GPU: ViT-B/32 with eight tasks, and
FLAN-T5-base with eight.

What a calibration takes in time and memory follows from sizes alone, so no checkpoint is
downloaded. Scores would mean nothing and are not taken.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, T5Config, T5ForConditionalGeneration

import featcal
from featcal.card import BlockRecord

TASKS = ("sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd")
SAMPLES, BATCH = 256, 128  # of each task, as in the paper's suite; texts 32 at a time
TOKENS, ANSWER = 64, 4  # of a prompt of GLUE and of what should follow it
NEEDS_CUDA = (
    "rehearsal: --full-size needs a CUDA GPU, and this machine has none (or a torch without CUDA). Without it the sizes are only "
    "known to be built and calibrated in a small form, by the tests"
)


@dataclass(frozen=True)
class Size:
    """An architecture, a model of it with random weights, one batch of a task, and the
    calibration's settings.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], dict[str, torch.Tensor]]
    batch_size: int
    settings: featcal.Calibration


@dataclass(frozen=True)
class Cost:
    """Seconds of task arithmetic and of the calibration, its peak on the GPU, and its last block."""

    merge: float
    calibration: float
    peak: int  # bytes; 0 without a GPU
    last: BlockRecord


def vision(**smaller: Any) -> Size:
    """openai/clip-vit-base-patch32's vision tower; `smaller` replaces entries of its
    configuration.
    """
    full: dict[str, Any] = dict(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        patch_size=32, image_size=224,
    )  # fmt: skip
    full |= smaller
    config, shape = CLIPVisionConfig(**full), (3, full["image_size"], full["image_size"])
    return Size(
        "ViT-B/32, 8 tasks",
        lambda: CLIPVisionModel(config),
        lambda count, draw: {"pixel_values": torch.randn(count, *shape, generator=draw)},
        BATCH,
        featcal.Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.3),
    )


def text(**smaller: Any) -> Size:
    """google/flan-t5-base."""
    full: dict[str, Any] = dict(
        d_model=768, d_kv=64, d_ff=2048, num_heads=12, num_layers=12, num_decoder_layers=12,
        vocab_size=32128, feed_forward_proj="gated-gelu", decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    config = T5Config(**(full | smaller))
    return Size(
        "FLAN-T5-base, 8 tasks",
        lambda: T5ForConditionalGeneration(config),
        lambda count, draw: {
            "input_ids": torch.randint(2, config.vocab_size, (count, TOKENS), generator=draw),
            "attention_mask": torch.ones(count, TOKENS, dtype=torch.long),
            "labels": torch.randint(2, config.vocab_size, (count, ANSWER), generator=draw),
        },
        32,
        featcal.Calibration(ridge=1e-5, anchor_blend=2.0, interpolation=0.6, norm=False),
    )


def calibrated(
    size: Size, device: str, samples: int = SAMPLES, tasks: tuple[str, ...] = TASKS
) -> Cost:
    """Build base and experts, merge and calibrate them on `device`, and report time and memory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = size.build().eval().to(device)
    experts = {task: _near(base, seed) for seed, task in enumerate(tasks)}
    counts = [min(size.batch_size, samples - start) for start in range(0, samples, size.batch_size)]
    batches = {}
    for seed, task in enumerate(tasks):
        draw = torch.Generator().manual_seed(seed)
        batches[task] = [size.batch(count, draw) for count in counts]
    start = time.perf_counter()
    merged = featcal.merge("task_arithmetic", base, experts, scale=0.3)
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    between = time.perf_counter()
    result = featcal.calibrate(
        merged, base=base, experts=experts, batches=batches, settings=size.settings
    )
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - between
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    return Cost(between - start, seconds, peak, result.blocks[-1])


def _near(base: nn.Module, seed: int) -> nn.Module:
    """An expert: the base, every weight moved a little."""
    expert = copy.deepcopy(base)
    draw = torch.Generator(next(base.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for parameter in expert.parameters():
            spread = 0.1 * float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.add_(
                spread * torch.randn(parameter.shape, generator=draw, device=parameter.device)
            )
    return expert


def report() -> int:
    """Both sizes on the GPU, one line each; 2 where there is none."""
    if not torch.cuda.is_available():
        print(NEEDS_CUDA)
        return 2
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {SAMPLES} samples of each task"
    )
    for size in (vision(), text()):
        cost = calibrated(size, "cuda")
        memory = cost.peak / 2**30
        summary = f"{size.name}: task arithmetic {cost.merge:.1f} s, calibration {cost.calibration:.1f} s, {memory:.1f} GiB at most"
        print(f"{summary}; drift of the last block {cost.last.relative_drift:.3f}", flush=True)
        torch.cuda.empty_cache()
    return 0
