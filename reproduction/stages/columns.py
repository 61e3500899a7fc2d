"""Columns of the small files beside the scores: loss curves, sweeps, what is measured of features,
what studies found.
"""

from reproduction.results import DRIFT, PROJECTION, SCORES

CURVES = ("suite", "role", "pool", "upstream", "method", "setting", "seed", "step", "loss")
SCALES = ("suite", "role", "pool", "upstream", "factor", "value", "chosen")
SAMPLES = (
    "suite",
    "role",
    "pool",
    "upstream",
    "method",
    "setting",
    "task",
    "metric",
    "seed",
    "samples",
    "value",
    "count",
)
AUDIT = (
    "suite", "role", "pool", "upstream", "method", "setting", "encode", "task", "metric", "seed", "samples", "step",
    "value", "count",
)  # fmt: skip
CORRUPTED = (
    "suite", "role", "pool", "upstream", "method", "setting", "corruption", "task", "metric", "seed", "value", "count",
)  # fmt: skip
EXPERT_SEEDS = (*SCORES, "expert_seed")
# which test images a stream held: `seen` as `correct` beside scores
SEEN = ("suite", "role", "pool", "task", "stream", "samples", "seed", "count", "seen")
EXAMPLES = ("task", "index", "corruption", "row", "column")
SWEEP = (
    "suite", "role", "pool", "upstream", "method", "setting", "parameter", "at", "chosen", "task", "metric", "seed", "value",
    "count",
)  # fmt: skip
# value: among the task's own classes, union: among those of all tasks; drift, mean_drift: of final
# features
TASK_COUNTS = (
    "suite", "role", "pool", "upstream", "method", "setting", "tasks", "draw", "task", "metric", "seed", "value", "union",
    "drift", "mean_drift", "count",
)  # fmt: skip
CHOICES = (
    "suite", "role", "pool", "upstream", "method", "setting", "choice", "option", "default", "task", "metric", "seed", "value",
    "count",
)  # fmt: skip
TUNE = (
    "suite", "role", "pool", "upstream", "method", "setting", "trial", "origin", "chosen", "ridge", "anchor_blend",
    "interpolation", "divergence", "task", "metric", "seed", "value", "count",
)  # fmt: skip
# variant: what is on; validation: percent right of validation samples, as value is of test samples
BEYOND = (
    "suite", "role", "pool", "upstream", "method", "setting", "variant", "chosen", "samples", "task", "metric", "seed",
    "validation", "value", "count",
)  # fmt: skip

_MODEL = ("suite", "role", "pool", "upstream", "method", "setting", "seed", "task")
ALIGNMENT = (
    *_MODEL,
    "cosine",
    "cosine_sd",
    "l2",
    "count",
)  # final features against the expert's, over all test images
SIMILARITY = (
    "task",
    "method",
    "setting",
    "index",
    "similarity",
)  # the same, image by image, of one task
VECTORS = (
    *_MODEL,
    "part",
    "cosine",
    "size",
    "count",
)  # change from the base against the expert's; count: parameters
# what stage `measure` writes, by the name of the file
MEASURED = {
    "drift": DRIFT,
    "alignment": ALIGNMENT,
    "similarity": SIMILARITY,
    "projection": PROJECTION,
    "vectors": VECTORS,
}
THEORY = (
    "suite", "role", "pool", "upstream", "method", "setting", "statement", "quantity", "task", "block", "nodes", "value", "count",
)  # fmt: skip
THEORY_POINTS = (
    "method",
    "setting",
    "statement",
    "task",
    "block",
    "index",
    "actual",
    "bound",
    "kept",
)
