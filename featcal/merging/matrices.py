"""Which tensors WUDI takes for matrices, told from names and shapes: of no model is a module made for it."""

import re
from itertools import groupby

from featcal.merging.job import Job
from featcal.merging.settings import is_vocabulary

STACKED = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"))
NO_LINEAR = "relative_attention_bias.weight"  # T5 keeps this table of positions inside its first block


def matrix_groups(job: Job) -> list[tuple[str, ...]]:
    """FusionBench: every tensor with two axes by itself, CLIP's position embedding too; not those that the settings exclude."""
    two = (name for name in job.names if len(job.base.shape(name)) == 2)
    return [(name,) for name in two if not is_vocabulary(name, job.settings.exclude)]


def linear_groups(job: Job) -> list[tuple[str, ...]]:
    """Official: weights of the linears inside numbered blocks; q, k and v of one attention are one matrix, as in its CLIP."""
    inside = [names[0] for names in matrix_groups(job) if re.search(r"\.\d+\..*\.weight$", names[0])]
    linears = sorted((name for name in inside if not name.endswith(NO_LINEAR)), key=lambda name: (_parent(name), name))
    groups: list[tuple[str, ...]] = []
    for _, members in groupby(linears, key=_parent):
        paths = {path.rpartition(".")[2]: path for path in (name.removesuffix(".weight") for name in members)}
        for words in STACKED:
            if set(words) <= set(paths) and len({job.base.shape(f"{paths[word]}.weight")[1] for word in words}) == 1:
                groups.append(tuple(f"{paths.pop(word)}.weight" for word in words))
        groups += [(f"{path}.weight",) for path in paths.values()]
    return groups


def _parent(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]
