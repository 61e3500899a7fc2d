"""What RegMean and calibration take of a task's data, as a folder that its owner can hand on
instead: moments of each site.

Sums over all tokens, never a sample; how much they still tell of the data is not bounded here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.plans import plan_for
from featcal.calibration.observe import BlockView, Expert, Observation, add_linears, add_norm
from featcal.calibration.sites import calibrated_modules
from featcal.calibration.tokens import Tokens
from featcal.core.moments import mirror
from featcal.merging.features import Seen, Track, Watch
from featcal.merging.forward_order import ForwardOrder
from featcal.merging.job import Job, Named, silent
from featcal.merging.sources import source
from featcal.merging.towers import prefix_of
from featcal.models.load import VISION, load_as_calibrated, model_class
from featcal.storage.model_card import card, table, write_card
from featcal.storage.results import write_json
from featcal.storage.writer import ShardWriter

RECORD = "statistics.json"
GRAM, TOKENS = "gram.", "tokens."  # of RegMean, by what each site reads
# of calibration: of a site Σ w x / Σ w, and Σ w xxᵀ / Σ w where its tokens do not all count 1; of a
# norm both means of z, z²
MEAN, WEIGHED, NORM = "mean.", "weighed.", "norm."


def statistics(
    expert: str | Path,
    batches: Iterable[Mapping[str, Any]],
    out: str | Path,
    *,
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = silent,
) -> Path:
    """Write (1/n) Σ x xᵀ of every site of an expert's blocks, (d, d) in float32, and n, the tokens
    that count; and the means.

    expert:  the folder of the model that was fine-tuned on the task.   batches: of the task, for
             its own forward.
    Returns: the folder `out`, which `merge("regmean", ...)` and `calibrate` take as Statistics(out)
    in the place of the task's
             batches.
    Raises:  BadBatches; DiskFull; what opening the model raises.
    """
    part = VISION if model_class(expert).__name__ == "CLIPModel" else None
    own = source(expert, "expert", part)
    job = Job(
        own,
        {"task": own},
        None,
        lambda: load_as_calibrated(expert),
        device=torch.device(device),
        progress=progress,
    )
    job.batches = {"task": batches}
    rows: list[list[str]] = []
    tower = prefix_of(expert, own)  # models of other heads call it otherwise
    seen_by_calibration: dict[str, Observation] = {}  # of the block at work

    def also(path: str, block: nn.Module, stack: Stack, track: Track) -> Watch:
        plan, modules = plan_for(order.worker), calibrated_modules(block, norm=True)
        last, own = blocks_of(order.worker, stack)[-1] is block, Observation()
        view = BlockView(path[:-1], stack, last, modules, plan.rule(stack), track.fed)
        seen_by_calibration.clear()
        seen_by_calibration[path] = own

        def add(
            x: dict[str, Tensor],
            hidden: Tensor,
            mask: Tensor | None,
            fed: Any,
            fed_mask: Tensor | None,
        ) -> None:
            tokens = Tokens(hidden, mask, fed, fed_mask)
            add_linears(own, x, Expert(block, x, {}, {}), view, tokens)
            for name in modules.norms:
                add_norm(own, name, x[name], block.get_submodule(name), view, tokens)

        return add

    with ShardWriter(out) as writer:

        def keep(path: str, block: nn.Module, seen: dict[str, Seen]) -> Iterator[Named]:
            own, path = seen_by_calibration[path], path.removeprefix(tower)
            for site, G in seen["task"].grams.items():
                name, tokens = path + "+".join(site), seen["task"].tokens[site]
                writer.write(GRAM + name, (G / max(tokens, 1)).float())
                writer.write(TOKENS + name, torch.tensor(tokens))
                rows.append([name, str(len(G)), f"{tokens:,}"])
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
        write_json(
            writer.folder / RECORD, {"architecture": kind, "tokens": job.record["tokens"]["task"]}
        )
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
