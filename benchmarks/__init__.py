"""Benchmarks, each against the plain version in the same run. The import makes transformers
importable with a CPU torch.
"""

import featcal  # noqa: F401
