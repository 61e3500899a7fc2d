"""Columns of the small files beside the scores: loss curves, and the sweeps of rescaled mergers."""

CURVES = ("suite", "role", "pool", "upstream", "method", "setting", "seed", "step", "loss")
SCALES = ("suite", "role", "pool", "upstream", "factor", "value", "chosen")
