"""Bytes: checkpoints, results, atomic writes. Knows no models and no mathematics."""
