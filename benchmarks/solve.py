"""Solve one site with one float64 Cholesky factor for all its linears, or with one float32
`linalg.solve` per linear.

python -m benchmarks.solve                   Also: the precision of both, against a tall
least-squares problem in float64.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import arguments, in_turns, machine, ratio, seeded
from featcal.core.moments import Moments
from featcal.core.precision import exact_products
from featcal.core.ridge import RidgeSystem, anchor, solve_ridge, task_system

SITES = {
    "clip-b32 q, k, v": (768, (768, 768, 768)),
    "clip-b32 fc2": (3072, (768,)),
}  # inputs, outputs of each linear
RIDGES = (0.05, 1e-3, 1e-5)  # the paper's for CLIP, between, the paper's for T5
ALPHA, BATCH = 0.3, 512
TOLERANCE = 1e-4  # relative, of the weight at the largest ridge


@dataclass(frozen=True)
class Task:
    """Features of one task at one site and its expert's weight."""

    cal: Tensor  # (n, d)
    exp: Tensor  # (n, d)
    weight: Tensor  # (o, d)


def power_law(seed: int, tokens: int, d: int, o: int, device: str) -> Task:
    """Float32 features whose energy falls off as a power law around one dominant mean, as in
    trained transformers.
    """
    g = seeded(seed)
    Q = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))[0]
    spectrum = torch.arange(1, d + 1, dtype=torch.float64) ** -1.2
    cal, gap = (
        (torch.randn(tokens, d, generator=g, dtype=torch.float64) * spectrum) @ Q.T
        for _ in range(2)
    )
    cal, weight = cal + 3 * Q[:, 0], torch.randn(o, d, generator=g) / d**0.5
    return Task(cal.float().to(device), (cal + 0.3 * gap).float().to(device), weight.to(device))


def our_system(tasks: list[Task]) -> RidgeSystem:
    """The package's: float32 products added in float64, α after the sums."""
    o, d = tasks[0].weight.shape
    total = RidgeSystem.zero(d, o, tasks[0].cal.device)
    for task in tasks:
        moments = Moments.zero(d, device=task.cal.device)
        for cal, exp in zip(task.cal.split(BATCH), task.exp.split(BATCH), strict=True):
            moments.add(cal, exp, torch.ones_like(cal[:, 0]))
        total += task_system(moments, task.weight, torch.zeros_like(task.weight[:, 0]), ALPHA)
    return total


def plain_system(tasks: list[Task]) -> tuple[Tensor, Tensor]:
    """Left (d, d) and right (d, o) side in float32, products added in float32."""
    left = right = 0
    for task in tasks:
        G = C = 0
        for cal, exp in zip(task.cal.split(BATCH), task.exp.split(BATCH), strict=True):
            G, C = G + cal.T @ cal, C + cal.T @ (ALPHA * exp + (1 - ALPHA) * cal)
        left, right = left + G / G.norm(), right + C @ task.weight.T / G.norm()
    return left, right


def plain_solve(
    left: Tensor, right: Tensor, A: Tensor, ridge: float, outputs: tuple[int, ...]
) -> Tensor:
    """One solve in float32 per linear; weight (Σo, d)."""
    parts = zip(right.split(outputs, 1), A.split(outputs), strict=True)
    system = left + ridge * torch.eye(len(left)).to(left)
    return torch.cat([torch.linalg.solve(system, R + ridge * a.T).T for R, a in parts])


def least_squares(tasks: list[Task], A: Tensor, ridge: float) -> Tensor:
    """The oracle, without a Gram matrix in the system: all tokens and √λ I stacked, QR in
    float64.
    """
    rows, targets = (
        [ridge**0.5 * torch.eye(A.shape[1], dtype=torch.float64)],
        [ridge**0.5 * A.double().T],
    )
    for task in tasks:
        cal, exp = task.cal.double(), task.exp.double()
        root = (cal.T @ cal).norm() ** -0.5
        rows.append(root * cal)
        targets.append(root * (ALPHA * exp + (1 - ALPHA) * cal) @ task.weight.double().T)
    return torch.linalg.lstsq(torch.cat(rows), torch.cat(targets), driver="gels").solution.T


def precision(d: int, o: int, tokens: int) -> dict[float, tuple[float, float]]:
    """Per ridge the relative error of the weight, (plain, ours)."""
    tasks = [power_law(seed, tokens, d, o, "cpu") for seed in range(3)]
    A = torch.randn(o, d, generator=seeded(7)) / d**0.5
    plain, errors = plain_system(tasks), {}
    for ridge in RIDGES:
        exact = least_squares(tasks, A, ridge)
        solved = (
            plain_solve(*plain, A, ridge, (o,)),
            solve_ridge(our_system(tasks), A, A[:, 0] * 0, ridge).weight,
        )
        errors[ridge] = tuple(float((W - exact).norm() / exact.norm()) for W in solved)
    return errors


def compare(d: int, outputs: tuple[int, ...], repeats: int, device: str = "cpu"):
    """Seconds (plain, ours) of each pair. Raises: AssertionError unless both give the same weight
    within TOLERANCE.
    """
    o, ridge = sum(outputs), RIDGES[0]
    tasks = [power_law(seed, 4 * d, d, o, device) for seed in range(2)]
    ours, (left, right) = our_system(tasks), plain_system(tasks)
    A = (torch.randn(o, d, generator=seeded(7)) / d**0.5).to(device)
    a, still = torch.zeros_like(A[:, 0]), anchor(A, A, 1.0)

    def solved() -> Tensor:
        return solve_ridge(
            copy.deepcopy(ours), still, a, ridge
        ).weight  # a solution consumes its system

    contestants = lambda: plain_solve(left, right, A, ridge, outputs), solved
    plain, own = (solve() for solve in contestants)
    difference = float((plain - own).norm() / own.norm())
    assert difference < TOLERANCE, f"the results differ by {difference:.1e}"
    return in_turns(*contestants, repeats, device), difference


def main() -> None:
    args = arguments(__doc__, repeats=5, width=256, tokens=4096).parse_args()
    torch.set_num_threads(args.threads)
    print(machine(args.device))
    with exact_products():
        for site, (d, outputs) in SITES.items():
            pairs, difference = compare(d, outputs, args.repeats, args.device)
            print(
                f"{site}: same weight within {difference:.1e}; time, plain / ours: {ratio(pairs)}"
            )
        print("ridge    error of plain   error of ours   plain / ours")
        for ridge, (plain, ours) in precision(args.width, 64, args.tokens).items():
            print(f"{ridge:<8g} {plain:<16.1e} {ours:<15.1e} {plain / ours:.0f}x")


if __name__ == "__main__":
    main()
