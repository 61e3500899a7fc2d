"""Before any test: one thread, no hub, and featcal first, which makes transformers importable beside a CPU torch."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import featcal  # noqa: E402, F401, I001
import torch  # noqa: E402

torch.set_num_threads(1)
