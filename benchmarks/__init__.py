"""Benchmarks. The import makes transformers importable with a CPU torch."""

import featcal  # noqa: F401
