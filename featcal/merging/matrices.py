"""Which tensors are matrices, told from names and shapes: of no model is a module made for it."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from torch import Tensor

from featcal.merging.arithmetic import task_vectors
from featcal.merging.job import Job, Named
from featcal.merging.vocabulary import is_vocabulary

STACKED = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"))
NO_LINEAR = (
    "relative_attention_bias.weight"  # T5 keeps this table of positions inside its first block
)


def matrix_groups(job: Job) -> list[tuple[str, ...]]:
    """FusionBench: every tensor with two axes by itself, CLIP's position embedding too; not those
    that the settings exclude.
    """
    two = (name for name in job.names if len(job.base.shape(name)) == 2)
    return [(name,) for name in two if not is_vocabulary(name, job.settings.exclude)]


def matrix_by_matrix(job: Job, merged: Callable[[Sequence[Tensor]], Tensor]) -> Iterator[Named]:
    """τ of every tensor: of a matrix what `merged` makes of its task vectors (o, d) in float64, of
    any other their mean.
    """
    matrices = {names[0] for names in matrix_groups(job)}
    for number, name in enumerate(job.names, start=1):
        vectors = task_vectors(*job.read(name))
        yield (
            name,
            merged(vectors) if name in matrices else sum(vectors[1:], vectors[0]) / len(vectors),
        )
        job.progress(f"{number}/{len(job.names)}: {name}")


def linear_groups(job: Job) -> list[tuple[str, ...]]:
    """Official: weights of the linears inside numbered blocks; q, k and v of one attention are one
    matrix, as in its CLIP.
    """
    inside = [
        names[0] for names in matrix_groups(job) if re.search(r"\.\d+\..*\.weight$", names[0])
    ]
    linears = sorted(
        (name for name in inside if not name.endswith(NO_LINEAR)),
        key=lambda name: (_parent(name), name),
    )
    groups: list[tuple[str, ...]] = []
    for _, members in groupby(linears, key=_parent):
        paths = {
            path.rpartition(".")[2]: path
            for path in (name.removesuffix(".weight") for name in members)
        }
        for words in STACKED:
            if (
                set(words) <= set(paths)
                and len({job.base.shape(f"{paths[word]}.weight")[1] for word in words}) == 1
            ):
                groups.append(tuple(f"{paths.pop(word)}.weight" for word in words))
        groups += [(f"{path}.weight",) for path in paths.values()]
    return groups


def _parent(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]
