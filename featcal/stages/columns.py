"""Columns of the small files beside the scores: loss curves, the sweeps of rescaled mergers, and what the studies found."""

CURVES = ("suite", "role", "pool", "upstream", "method", "setting", "seed", "step", "loss")
SCALES = ("suite", "role", "pool", "upstream", "factor", "value", "chosen")
CORRUPTED = (
    "suite", "role", "pool", "upstream", "method", "setting", "corruption", "task", "metric", "seed", "value", "count",
)  # fmt: skip
EXAMPLES = ("task", "index", "corruption", "row", "column")
SWEEP = (
    "suite", "role", "pool", "upstream", "method", "setting", "parameter", "at", "chosen", "task", "metric", "seed", "value",
    "count",
)  # fmt: skip
