"""Columns of the small files beside the scores: loss curves, sweeps of rescaled mergers, scores of the studies."""

CURVES = ("suite", "role", "pool", "upstream", "method", "setting", "seed", "step", "loss")
SCALES = ("suite", "role", "pool", "upstream", "factor", "value", "chosen")
SAMPLES = ("suite", "role", "pool", "upstream", "method", "setting", "task", "metric", "seed", "samples", "value", "count")
AUDIT = (
    "suite", "role", "pool", "upstream", "method", "setting", "encode", "task", "metric", "seed", "samples", "step",
    "value", "count",
)  # fmt: skip
CORRUPTED = (
    "suite", "role", "pool", "upstream", "method", "setting", "corruption", "task", "metric", "seed", "value", "count",
)  # fmt: skip
EXAMPLES = ("task", "index", "corruption", "row", "column")
SWEEP = (
    "suite", "role", "pool", "upstream", "method", "setting", "parameter", "at", "chosen", "task", "metric", "seed", "value",
    "count",
)  # fmt: skip
