"""The opponent: the method on CLIP's vision tower in its published form (github.com/egangu/featcal),
batch for batch and product for product.

One Gram matrix per linear, α on every token, d × d cross moments, everything in the models' own
precision, one `linalg.solve` per linear. Features are kept between blocks, in the host's memory,
and the teacher runs once. After the last block the student does not run again.
Knows the package's settings and nothing else of it.
"""

import copy
from collections.abc import Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcal.settings import Calibration

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "mlp.fc1",
    "mlp.fc2",
)
NORMS = ("layer_norm1", "layer_norm2")
BATCH = 16
STABILISER = 1e-8  # ε of Eq. 14, on the left side
PATCH_WEIGHT = 0.01  # of a patch token in the last block, except where keys and values read it

Pairs = list[
    tuple[Tensor, Tensor]
]  # per batch the student's and the teacher's features (batch, tokens, d)
Sums = dict[str, list[Tensor]]  # module name -> sums over the tokens of one task


@torch.no_grad()
def calibrate(
    merged: nn.Module,
    base: nn.Module,
    experts: Mapping[str, nn.Module],
    images: Mapping[str, Tensor],
    s: Calibration,
):
    """Return the calibrated copy of the merged model; images (n, 3, height, width) per task."""
    student = copy.deepcopy(merged).eval()
    hidden = {
        t: [
            (embedded(student, x).to("cpu"), embedded(experts[t], x).to("cpu"))
            for x in images[t].split(BATCH)
        ]
        for t in experts
    }
    for i, block in enumerate(student.encoder.layers):
        teachers = {t: expert.encoder.layers[i] for t, expert in experts.items()}
        last = i + 1 == len(student.encoder.layers)
        hidden = calibrate_block(block, base.encoder.layers[i], teachers, hidden, s, last)
    return student


def embedded(model: nn.Module, images: Tensor) -> Tensor:
    """Return the input of the first block."""
    return model.pre_layrnorm(model.embeddings(images))


@torch.no_grad()
def calibrate_block(
    student: nn.Module,
    base: nn.Module,
    teachers: Mapping[str, nn.Module],
    hidden: Mapping[str, Pairs],
    s: Calibration,
    last: bool,
) -> dict[str, Pairs]:
    """Solve one block in place and return the features after it, none after the last one."""
    device = next(student.parameters()).device
    sums: dict[str, Sums] = {t: {} for t in teachers}
    after: dict[str, list[Tensor]] = {t: [] for t in teachers}
    for task, teacher in teachers.items():
        for x_student, x_teacher in hidden[task]:
            with inputs(student) as cal:
                student(x_student.to(device), attention_mask=None)
            with inputs(teacher) as exp:
                after[task].append(teacher(x_teacher.to(device), attention_mask=None).to("cpu"))
            add(sums[task], cal, exp, s, last)
    solved = {name: solve_linear(name, student, base, teachers, sums, s) for name in LINEARS}
    solved |= {name: solve_norm(name, student, base, teachers, sums, s) for name in NORMS if s.norm}
    for name, (weight, bias) in solved.items():
        student.get_submodule(name).weight.copy_(weight)
        if name in NORMS or s.bias:
            student.get_submodule(name).bias.copy_(bias)
    if last:
        return {}
    return {
        t: [
            (student(x.to(device), attention_mask=None).to("cpu"), y)
            for (x, _), y in zip(hidden[t], after[t], strict=True)
        ]
        for t in teachers
    }


@contextmanager
def inputs(block: nn.Module):
    """Capture the inputs (batch, tokens, d) of linears and norms during the next forward."""
    captured: dict[str, Tensor] = {}
    handles = [
        block.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: captured.update({name: args[0]})
        )
        for name in LINEARS + NORMS
    ]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def add(
    sums: Sums, cal: Mapping[str, Tensor], exp: Mapping[str, Tensor], s: Calibration, last: bool
) -> None:
    """Add one batch to the sums of every module (Eqs. 10, 13, 52, 56)."""
    for name in LINEARS + NORMS:
        x = cal[name].flatten(0, 1)  # (n, d)
        p = torch.ones_like(cal[name][..., 0])  # (batch, tokens)
        if last and not name.endswith(("k_proj", "v_proj")):
            p[:, 1:] = PATCH_WEIGHT
        p = p.flatten()[:, None]  # (n, 1)
        if name in NORMS:
            z = F.layer_norm(x, x.shape[1:])
            batch = [(p * z).sum(0), (p * z * z).sum(0), p.sum()]
        else:
            target = s.interpolation * exp[name].flatten(0, 1) + (1 - s.interpolation) * x  # Eq. 10
            batch = [
                x.T @ (p * x),
                target.T @ (p * x),
                (p * x).sum(0),
                (p * target).sum(0),
                p.sum(),
            ]
        if name not in sums:
            sums[name] = [torch.zeros_like(part) for part in batch]
        for total, part in zip(sums[name], batch, strict=True):
            total += part


def anchors(name: str, student: nn.Module, base: nn.Module, rho: float) -> tuple[Tensor, Tensor]:
    """Return ρ·merged + (1−ρ)·base of weight and bias (Eqs. 11, 51)."""
    merged, first = student.get_submodule(name), base.get_submodule(name)
    return rho * merged.weight + (1 - rho) * first.weight, rho * merged.bias + (
        1 - rho
    ) * first.bias


def solve_linear(
    name: str,
    student: nn.Module,
    base: nn.Module,
    teachers: Mapping[str, nn.Module],
    sums: Mapping[str, Sums],
    s: Calibration,
) -> tuple[Tensor, Tensor]:
    """Return weight (o, d) and bias (o,) of one linear (Eqs. 14, 17, 55)."""
    A, a = anchors(name, student, base, s.anchor_blend)
    left, right = (
        (s.ridge + STABILISER) * torch.eye(A.shape[1]).to(A),
        s.ridge * A,
    )  # (d, d), (o, d)
    shares = []
    for task, teacher in teachers.items():
        G, C, cal, target, n = sums[task][name]
        linear = teacher.get_submodule(name)
        omega = 1 / (G / n).norm() if s.task_weights == "gram" else torch.ones_like(n)
        left, right = left + omega * G / n, right + omega * linear.weight @ (C / n)
        shares.append((omega, cal / n, linear.bias + linear.weight @ (target / n)))
    W = torch.linalg.solve(left, right.T).T
    gaps = sum(omega * (y - W @ x) for omega, x, y in shares)
    return W, (gaps + s.ridge * a) / (sum(omega for omega, _, _ in shares) + s.ridge)


def solve_norm(
    name: str,
    student: nn.Module,
    base: nn.Module,
    teachers: Mapping[str, nn.Module],
    sums: Mapping[str, Sums],
    s: Calibration,
) -> tuple[Tensor, Tensor]:
    """Return scale and shift (d,) of one norm (Eqs. 58, 59)."""
    gain, shift = anchors(name, student, base, s.anchor_blend)
    a11, a12, a22, r1, r2 = s.ridge, 0.0, len(teachers) + s.ridge, s.ridge * gain, s.ridge * shift
    for task, teacher in teachers.items():
        z, zz, n = sums[task][name]
        norm = teacher.get_submodule(name)
        a11, a12 = a11 + zz / n, a12 + z / n
        r1, r2 = r1 + zz / n * norm.weight + z / n * norm.bias, r2 + z / n * norm.weight + norm.bias
    D = a11 * a22 - a12 * a12
    return (a22 * r1 - a12 * r2) / D, (a11 * r2 - a12 * r1) / D
