"""What RegMean and calibration take of a task's data, as a folder that its owner can hand on instead: moments of each site.

Sums over all tokens, never a sample; how much they still tell of the data is not bounded here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.coverage import solved_modules
from featcal.blocks.linear import weight_of
from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.plans import plan_for
from featcal.calibration.fingerprint import Digest, add_files
from featcal.calibration.observe import BlockView, Expert, Observation, add_linears, add_norm
from featcal.calibration.published import Published
from featcal.calibration.sites import Modules, calibrated_modules
from featcal.calibration.tokens import Tokens
from featcal.core.moments import Moments, mirror
from featcal.core.norm import NormMoments
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.errors import BadBatches, BadFile
from featcal.merging.arithmetic import average_tensor
from featcal.merging.features import Seen, Track, Watch
from featcal.merging.forward_order import ForwardOrder, require_own_names
from featcal.merging.job import Job, Named, silent
from featcal.merging.sources import source
from featcal.models.load import VISION, load_as_calibrated, model_class
from featcal.storage.checkpoint import LazyCheckpoint, folder_path
from featcal.storage.model_card import card, table, write_card
from featcal.storage.results import read_json, write_json
from featcal.storage.writer import ShardWriter

RECORD = "statistics.json"
GRAM, TOKENS = "gram.", "tokens."  # of RegMean, by what each site reads
# of calibration: of a site Σ w x / Σ w, and Σ w xxᵀ / Σ w where its tokens do not all count 1; of a norm both means of z, z²
MEAN, WEIGHED, NORM = "mean.", "weighed.", "norm."


def statistics(
    expert: str | Path,
    batches: Iterable[Mapping[str, Any]],
    out: str | Path,
    *,
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = silent,
) -> Path:
    """Write (1/n) Σ x xᵀ of every site of an expert's blocks, (d, d) in float32, and n, the tokens that count; and the means.

    expert:  the folder of the model that was fine-tuned on the task.   batches: of the task, for its own forward.
    Returns: the folder `out`, which `merge("regmean", ...)` and `calibrate` take as Statistics(out) in the place of the task's
             batches.
    Raises:  BadBatches; DiskFull; what opening the model raises.
    """
    part = VISION if model_class(expert).__name__ == "CLIPModel" else None
    own = source(expert, "expert", part)
    job = Job(own, {"task": own}, None, lambda: load_as_calibrated(expert), device=torch.device(device), progress=progress)
    job.batches = {"task": batches}
    rows: list[list[str]] = []
    seen_by_calibration: dict[str, Observation] = {}  # of the block at work

    def also(path: str, block: nn.Module, stack: Stack, track: Track) -> Watch:
        plan, modules = plan_for(order.worker), calibrated_modules(block, norm=True)
        last, own = blocks_of(order.worker, stack)[-1] is block, Observation()
        view = BlockView(path[:-1], stack, last, modules, plan.rule(stack), track.fed)
        seen_by_calibration.clear()
        seen_by_calibration[path] = own

        def add(x: dict[str, Tensor], hidden: Tensor, mask: Tensor | None, fed: Any, fed_mask: Tensor | None) -> None:
            tokens = Tokens(hidden, mask, fed, fed_mask)
            add_linears(own, x, Expert(block, x, {}, {}), view, tokens)
            for name in modules.norms:
                add_norm(own, name, x[name], block.get_submodule(name), view, tokens)

        return add

    with ShardWriter(out) as writer:

        def keep(path: str, block: nn.Module, seen: dict[str, Seen]) -> Iterator[Named]:
            for site, G in seen["task"].grams.items():
                name, tokens = path + "+".join(site), seen["task"].tokens[site]
                writer.write(GRAM + name, (G / max(tokens, 1)).float())
                writer.write(TOKENS + name, torch.tensor(tokens))
                rows.append([name, str(len(G)), f"{tokens:,}"])
            own = seen_by_calibration[path]
            for site, sums in own.sites.items():
                name, G = path + "+".join(site), mirror(sums.G) / sums.weight
                reads = next(of for of in seen["task"].grams if site[0] in of)
                if not torch.allclose(G, seen["task"].grams[reads] / seen["task"].tokens[reads]):
                    writer.write(WEIGHED + name, G.float())
                writer.write(MEAN + name, (sums.cal / sums.weight).float())
            for norm, of in own.norms.items():
                writer.write(NORM + path + norm, (torch.stack([of.z, of.zz]) / of.weight).float())
            yield from ()

        order = ForwardOrder(job, keep, own=True, also=also)
        for _ in order.tensors():  # of the model itself nothing is kept
            pass
        kind = model_class(expert).__name__ if part is None else "CLIPVisionModel"
        write_json(writer.folder / RECORD, {"architecture": kind, "tokens": job.record["tokens"]["task"]})
        write_card(writer.folder, statistics_card(expert, rows))
    return Path(out)


def statistics_card(expert: str | Path, rows: list[list[str]]) -> str:
    """The card's text."""
    sections = [
        "Mean Gram matrices and means of the inputs of an expert's linears and norms, which RegMean and FeatCal take instead of "
        "samples: sums over all tokens of the task's samples. No sample is in them; how much they tell of the samples was not "
        "examined.",
        table(["site", "features", "tokens"], rows),
        "## Use",
        "```bash\nfeatcal merge regmean --stats NAME=this/folder ...\nfeatcal calibrate --stats NAME=this/folder ...\n```",
    ]
    return card("Statistics of a task", {"expert": expert}, ("featcal",), {}, sections)


class Statistics(Published):
    """A folder that `statistics` wrote, in the place of a task's batches. Raises: BadFile; what opening the folder raises."""

    def __init__(self, folder: str | Path):
        self.folder = folder_path(folder)
        self._tensors = LazyCheckpoint(folder)
        if not (self.folder / RECORD).is_file():
            raise BadFile(folder, f"no {RECORD} in this folder", "give a folder that featcal stats wrote")
        self.tokens = read_json(self.folder / RECORD).get("tokens")

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        raise BadBatches(
            str(self.folder), "holds statistics, which only regmean and calibrate take; give the other methods samples"
        )

    @property
    def digest(self) -> str:
        """Of the folder's files."""
        digest = Digest()
        add_files(digest, self.folder.glob("*.safetensors"))
        return str(digest)

    def _stored(self, path: str) -> str:
        """What a block's path, a dot behind it, is here: of an expert with a head it is longer by its tower's name."""
        stored = [name.removeprefix(GRAM) for name in self._tensors.names if name.startswith(GRAM)]
        for name in stored:
            tower, _, inner = name.partition(".")
            if inner.startswith(path):
                return f"{tower}.{path}"
        shorter = path.partition(".")[2]
        exact = any(name.startswith(path) for name in stored) or not any(name.startswith(shorter) for name in stored)
        return path if exact else shorter

    def observation(self, path: str, teacher: nn.Module, modules: Modules) -> Observation:
        """The moments of the expert's block at a path, as means with weight 1. Raises: BadFile, also for a mixture; NotFinite."""
        where, seen = self._stored(f"{path}."), Observation()

        def stored(kind: str) -> dict[str, Tensor]:
            names = [name for name in self._tensors.names if name.startswith(kind + where)]
            return {name.removeprefix(kind + where): self._tensors.finite_tensor(name).to(on_, SUM_DTYPE) for name in names}

        on_, one = next(teacher.parameters()).device, torch.ones((), dtype=SUM_DTYPE)
        means, weighed, grams, norms = (stored(kind) for kind in (MEAN, WEIGHED, GRAM, NORM))
        sites = {linear: site for site in means for linear in site.split("+")}
        reads = {linear: site for site in grams for linear in site.split("+")}
        widths = {name: weight_of(teacher.get_submodule(name)).shape[1] for name in modules.linears}
        if any(name not in sites or len(means[sites[name]]) != width for name, width in widths.items()) or (
            set(modules.norms) - norms.keys()
        ):
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
        """The sums of the block at a path. Raises: BadFile unless they are those of its linears; NotFinite."""
        seen, where = Seen(), GRAM + self._stored(path)
        for name in (name for name in self._tensors.names if name.startswith(where)):
            site = tuple(name.removeprefix(where).split("+"))
            tokens = self._tensors.tensor(name.replace(GRAM, TOKENS, 1)).item()
            seen.grams[site], seen.tokens[site] = self._tensors.finite_tensor(name).to(SUM_DTYPE) * tokens, int(tokens)
        widths = {linear: len(G) for site, G in seen.grams.items() for linear in site}
        if widths != {name: weight_of(block.get_submodule(name)).shape[1] for name in solved_modules(block)[0]}:
            problem = f"the statistics of {path.rstrip('.')} are not those of this model's linears"
            raise BadFile(self.folder, problem, "have them written again with an expert of this base: featcal stats")
        return seen


def from_statistics(job: Job, solve: Callable[[str, nn.Module, dict[str, Seen]], Iterator[Named]]) -> Iterator[Named]:
    """Every tensor of a job whose data are statistics: blocks by `solve`, all others by their mean.

    Raises: BadBatches where a task has none, or where those of two tasks are of other sites.
    """
    for task in job.experts:
        if not isinstance(job.batches.get(task), Statistics):
            raise BadBatches(task, "has no statistics, others have; write its own, too: featcal stats")
    job.record["tokens"] = {task: job.batches[task].tokens for task in job.experts}  # type: ignore[attr-defined]
    worker, done = job.structure(), set[str]()
    require_own_names(job, worker)
    for stack in plan_for(worker).stacks:
        for number, block in enumerate(blocks_of(worker, stack)):
            path = f"{stack.blocks}.{number}."
            seen = {task: job.batches[task].block(path, block) for task in job.experts}  # type: ignore[attr-defined]
            sites = {task: one.grams.keys() for task, one in seen.items()}
            if other := next((task for task in sites if sites[task] != sites[next(iter(sites))]), None):
                raise BadBatches(other, f"has statistics of other sites of {path[:-1]} than {next(iter(sites))!r}")
            with exact_products():
                merged = {name: tensor.to(job.base.dtype(name)) for name, tensor in solve(path, block, on(job, seen))}
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
