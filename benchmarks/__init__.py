"""Benchmarks, each against the plain version in the same run. The import makes transformers
importable beside a CPU torch.
"""

import featcal  # noqa: F401
