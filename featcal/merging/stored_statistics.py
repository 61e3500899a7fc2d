"""Statistics of a task that its owner has written, in the place of samples: for RegMean and for
calibration.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.coverage import solved_modules
from featcal.blocks.linear import weight_of
from featcal.blocks.plan import blocks_of
from featcal.blocks.plans import plan_for
from featcal.calibration.fingerprint import Digest, add_files
from featcal.calibration.observe import Observation
from featcal.calibration.published import Published
from featcal.calibration.sites import Modules
from featcal.core.moments import Moments
from featcal.core.norm import NormMoments
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.errors import BadBatches, BadFile
from featcal.merging.arithmetic import average_tensor
from featcal.merging.features import Seen
from featcal.merging.forward_order import require_own_names
from featcal.merging.job import Job, Named
from featcal.merging.statistics import GRAM, MEAN, NORM, RECORD, TOKENS, WEIGHED
from featcal.storage.checkpoint import LazyCheckpoint, folder_path
from featcal.storage.results import read_json


class Statistics(Published):
    """A folder that `statistics` wrote, in the place of a task's batches. Raises: BadFile; what
    opening the folder raises.
    """

    def __init__(self, folder: str | Path):
        self.folder = folder_path(folder)
        self._tensors = LazyCheckpoint(folder)
        if not (self.folder / RECORD).is_file():
            raise BadFile(
                folder, f"no {RECORD} in this folder", "give a folder that featcal stats wrote"
            )
        self.tokens = read_json(self.folder / RECORD).get("tokens")

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        raise BadBatches(
            str(self.folder),
            "holds statistics, which only regmean and calibrate take; give the other methods samples",
        )

    @property
    def digest(self) -> str:
        """Of the folder's files."""
        digest = Digest()
        add_files(digest, self.folder.glob("*.safetensors"))
        return str(digest)

    def _stored(self, path: str) -> str:
        """What a block's path, a dot behind it, is here, where no tower is named: a model with a
        head has its name before it.
        """
        there = any(name.startswith(GRAM + path) for name in self._tensors.names)
        return path if there else path.partition(".")[2]

    def observation(self, path: str, teacher: nn.Module, modules: Modules) -> Observation:
        """The moments of the expert's block at a path, as means with weight 1. Raises: BadFile,
        also for a mixture; NotFinite.
        """
        where, seen = self._stored(f"{path}."), Observation()

        def stored(kind: str) -> dict[str, Tensor]:
            names = [name for name in self._tensors.names if name.startswith(kind + where)]
            return {
                name.removeprefix(kind + where): self._tensors.finite_tensor(name).to(
                    on_, SUM_DTYPE
                )
                for name in names
            }

        on_, one = next(teacher.parameters()).device, torch.ones((), dtype=SUM_DTYPE)
        means, weighed, grams, norms = (stored(kind) for kind in (MEAN, WEIGHED, GRAM, NORM))
        sites = {linear: site for site in means for linear in site.split("+")}
        reads = {linear: site for site in grams for linear in site.split("+")}
        widths = {name: weight_of(teacher.get_submodule(name)).shape[1] for name in modules.linears}
        if any(
            name not in sites or len(means[sites[name]]) != width for name, width in widths.items()
        ) or (set(modules.norms) - norms.keys()):
            problem = f"the statistics of {path} are not those of this model's linears and norms"
            way_out = "have them written again with an expert of this base: featcal stats; of a mixture of experts give samples"
            raise BadFile(self.folder, problem, way_out)
        for name in modules.linears:
            solved = tuple(linear for linear in sites[name].split("+") if linear in modules.linears)
            G = weighed[sites[name]] if sites[name] in weighed else grams[reads[name]]
            mean = means[sites[name]]
            if solved not in seen.sites:
                seen.sites[solved] = Moments(G, G.clone(), mean, mean.clone(), one.to(on_))
        for name in modules.norms:
            seen.norms[name] = NormMoments(*norms[name], one.to(on_))
        return seen

    def block(self, path: str, block: nn.Module) -> Seen:
        """The sums of the block at a path. Raises: BadFile unless they are those of its linears;
        NotFinite.
        """
        seen, where = Seen(), GRAM + self._stored(path)
        for name in (name for name in self._tensors.names if name.startswith(where)):
            site = tuple(name.removeprefix(where).split("+"))
            tokens = self._tensors.tensor(name.replace(GRAM, TOKENS, 1)).item()
            seen.grams[site], seen.tokens[site] = (
                self._tensors.finite_tensor(name).to(SUM_DTYPE) * tokens,
                int(tokens),
            )
        widths = {linear: len(G) for site, G in seen.grams.items() for linear in site}
        if widths != {
            name: weight_of(block.get_submodule(name)).shape[1] for name in solved_modules(block)[0]
        }:
            problem = f"the statistics of {path.rstrip('.')} are not those of this model's linears"
            raise BadFile(
                self.folder,
                problem,
                "have them written again with an expert of this base: featcal stats",
            )
        return seen


def from_statistics(
    job: Job, solve: Callable[[str, nn.Module, dict[str, Seen]], Iterator[Named]]
) -> Iterator[Named]:
    """Every tensor of a job whose data are statistics: blocks by `solve`, all others by their mean.

    Raises: BadBatches where a task has none, or where those of two tasks are of other sites.
    """
    for task in job.experts:
        if not isinstance(job.batches.get(task), Statistics):
            raise BadBatches(
                task, "has no statistics, others have; write its own, too: featcal stats"
            )
    job.record["tokens"] = {task: job.batches[task].tokens for task in job.experts}  # type: ignore[attr-defined]
    worker, done = job.structure(), set[str]()
    require_own_names(job, worker)
    for stack in plan_for(worker).stacks:
        for number, block in enumerate(blocks_of(worker, stack)):
            path = f"{stack.blocks}.{number}."
            seen = {task: job.batches[task].block(path, block) for task in job.experts}  # type: ignore[attr-defined]
            sites = {task: one.grams.keys() for task, one in seen.items()}
            if other := next(
                (task for task in sites if sites[task] != sites[next(iter(sites))]), None
            ):
                raise BadBatches(
                    other,
                    f"has statistics of other sites of {path[:-1]} than {next(iter(sites))!r}",
                )
            with exact_products():
                merged = {
                    name: tensor.to(job.base.dtype(name))
                    for name, tensor in solve(path, block, on(job, seen))
                }
            done |= merged.keys()
            yield from merged.items()
            job.progress(f"{path[:-1]}  {len(seen)} tasks")
    for name in sorted(set(job.names) - done):
        yield name, average_tensor(*job.read(name))


def on(job: Job, seen: dict[str, Seen]) -> dict[str, Seen]:
    """The sums where the job computes."""

    def moved(grams: dict[Any, Tensor]) -> dict[Any, Tensor]:
        return {site: G.to(job.device) for site, G in grams.items()}

    return {task: Seen(moved(one.grams), one.tokens) for task, one in seen.items()}
