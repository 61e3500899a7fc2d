"""Columns of the small files beside the scores: loss curves, the sweeps of rescaled mergers, and what the studies write."""

CURVES = ("suite", "role", "pool", "upstream", "method", "setting", "seed", "step", "loss")
SCALES = ("suite", "role", "pool", "upstream", "factor", "value", "chosen")
THEORY = (
    "suite", "role", "pool", "upstream", "method", "setting", "statement", "quantity", "task", "block", "nodes", "value", "count",
)  # fmt: skip
THEORY_POINTS = ("method", "setting", "statement", "task", "block", "index", "actual", "bound", "kept")
