"""One block of ViT-B/32's shape: observed and solved by the package and by the plain version, in
turns.

python -m benchmarks.block                   Also: how near the Gram product comes to the device's
matmul ceiling.
"""

import copy

import torch

from benchmarks import plain_version
from benchmarks.measure import (
    arguments,
    averaged,
    in_turns,
    largest_difference,
    machine,
    moved,
    ratio,
    seconds,
    seeded,
    tower,
)
from featcal.calibration.block import calibrate_block
from featcal.calibration.features import StudentTeacherFeatures
from featcal.calibration.models import Models
from featcal.calibration.observe import BlockSpec
from featcal.calibration.ranks import Ranks
from featcal.core.moments import add_gram, stripes
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.models.families import KNOWN
from featcal.models.modules import solved_modules
from featcal.models.streamed import InMemoryModel
from featcal.settings import Calibration

PLAN = KNOWN["CLIPVisionModel"]
SETTINGS = Calibration(ridge=0.05, anchor_blend=2.0, interpolation=0.3)  # the paper's for CLIP
TOLERANCE = (
    1e-4  # relative, of every parameter: what float32 sums and solves cost the plain version
)
TOKENS = 50


def contestants(width: int, tasks: int, samples: int, batch: int, device: str):
    """Two functions without arguments, the plain version's and the package's; each returns its
    calibrated block.
    """
    base = tower(width, layers=1).encoder.layers[0].to(device)
    teachers = {f"task{t}": moved(base, 1 + t, 0.01) for t in range(tasks)}
    merged = averaged(list(teachers.values()))
    features = {
        name: torch.randn(samples, TOKENS, width, generator=seeded(50 + t))
        for t, name in enumerate(teachers)
    }
    pairs = {  # the student's features and the teacher's, near each other
        name: (x.to(device), (x + 0.3 * torch.randn(x.shape, generator=seeded(90 + t))).to(device))
        for t, (name, x) in enumerate(features.items())
    }

    def plain():
        block = copy.deepcopy(merged)
        split = {t: [z.split(plain_version.BATCH) for z in pair] for t, pair in pairs.items()}
        hidden = {t: list(zip(*pair, strict=True)) for t, pair in split.items()}
        plain_version.calibrate_block(block, base, teachers, hidden, SETTINGS, last=False)
        return block

    @torch.no_grad()
    def ours():
        block, none = copy.deepcopy(merged), ({"attention_mask": None},)
        tracks = {
            t: [[(part, none) for part in z.split(batch)] for z in pair]
            for t, pair in pairs.items()
        }
        unmasked = [None] * len(range(0, samples, batch))
        tracks = {
            t: StudentTeacherFeatures([student], teacher, unmasked, unmasked)
            for t, (student, teacher) in tracks.items()
        }
        stack, (linears, norms) = PLAN.stacks[0], solved_modules(block, SETTINGS.norm)
        rule = PLAN.token_rule
        spec = BlockSpec(
            "block", stack, tuple(linears), tuple(norms), rule, last=False, settings=SETTINGS
        )
        experts = {name: InMemoryModel(teacher) for name, teacher in teachers.items()}
        student, where = InMemoryModel(block), torch.device(device)
        models = Models(student, student, InMemoryModel(base), experts, PLAN, where, torch.float32)
        calibrate_block(models, "", [(block, spec)], tracks, Ranks())
        return block

    return plain, ours


def compare(width: int, tasks: int, samples: int, batch: int, repeats: int, device: str = "cpu"):
    """Seconds (plain, ours) of each pair. Raises: AssertionError unless both give the same block
    within TOLERANCE.
    """
    plain, ours = contestants(width, tasks, samples, batch, device)
    with exact_products():
        difference = largest_difference(plain(), ours())
        assert difference < TOLERANCE, f"the results differ by {difference:.1e}"
        return in_turns(plain, ours, repeats, device), difference


def gram_share(width: int, rows: int, device: str, repeats: int = 5) -> float:
    """Operations per second of the Gram product of one batch (only those computed), as a share of a
    large matmul's.
    """
    x, a = torch.randn(rows, width, device=device), torch.randn(3072, 3072, device=device)
    G = torch.zeros(width, width, dtype=SUM_DTYPE, device=device)
    computed = rows * sum(
        (end - start) * (width - start) for start, end in stripes(width, G.is_cuda)
    )
    with exact_products():
        add_gram(G, x), a @ a
        times = [
            (seconds(lambda: add_gram(G, x), device), seconds(lambda: a @ a, device))
            for _ in range(repeats)
        ]
    return sorted((computed / own) / (len(a) ** 3 / ceiling) for own, ceiling in times)[
        repeats // 2
    ]


def main() -> None:
    args = arguments(__doc__, width=768, tasks=2, samples=128, batch=32, repeats=5).parse_args()
    torch.set_num_threads(args.threads)
    print(machine(args.device))
    pairs, difference = compare(
        args.width, args.tasks, args.samples, args.batch, args.repeats, args.device
    )
    print(f"same block within {difference:.1e} (tolerance {TOLERANCE})")
    print(f"time, plain / ours: {ratio(pairs)}")
    for width in (args.width, 4 * args.width):
        share = gram_share(width, args.batch * TOKENS, args.device)
        print(f"Gram product, {width} features: {share:.0%} of the matmul ceiling in float32")


if __name__ == "__main__":
    main()
