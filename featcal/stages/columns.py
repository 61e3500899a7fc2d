"""Columns of the small files beside the scores: loss curves, sweeps of rescaled mergers, and what is measured of features."""

from featcal.storage.results import DRIFT, PROJECTION

CURVES = ("suite", "role", "pool", "upstream", "method", "setting", "seed", "step", "loss")
SCALES = ("suite", "role", "pool", "upstream", "factor", "value", "chosen")

_MODEL = ("suite", "role", "pool", "upstream", "method", "setting", "seed", "task")
ALIGNMENT = (*_MODEL, "cosine", "cosine_sd", "l2", "count")  # final features against the expert's, over all test images
SIMILARITY = ("task", "method", "setting", "index", "similarity")  # the same, image by image, of one task
VECTORS = (*_MODEL, "part", "cosine", "size", "count")  # change from the base against the expert's; count: parameters
# what stage `measure` writes, by the name of the file
MEASURED = {"drift": DRIFT, "alignment": ALIGNMENT, "similarity": SIMILARITY, "projection": PROJECTION, "vectors": VECTORS}
