"""The models and samples that a command computes on, drawn after the checks that read no weights."""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli import options
from featcal.cli.inputs import Inputs
from featcal.cli.terminal import note
from featcal.errors import BadPlan
from featcal.settings import require

if TYPE_CHECKING:
    from featcal.data.batches import Draw, DrawnBatches
    from featcal.models.plan import BlockPlan


@dataclass(frozen=True)
class Request:
    """Models and samples of one command.

    draw: how every task's samples are drawn.
    """

    inputs: Inputs
    keys: options.SamplingAndBlocks
    draw: "Draw"
    device: str

    @cached_property
    def student(self) -> Any:
        """Return the merged model without weights."""
        from featcal.models.stored import skeleton

        return skeleton(self.inputs.merged)

    @cached_property
    def plan(self) -> "BlockPlan":
        """Return the blocks to calibrate."""
        return plan_with(self.student, self.keys.stack)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return how many samples each task has; the data are read once."""
        from featcal.data.batches import count_samples

        data = self.inputs.data.items()
        return {task: count_samples(self.student, at, self.draw) for task, at in data}

    def rest(
        self, task: str, skip: int, most: int, spared: int = 0, fewest: int = 1, way_out: str = ""
    ) -> "Draw":
        """Return the draw of a task's samples after the first `skip`, at most `most`.

        spared: number of samples that are left for another use.
        Raises: BadSetting if fewer than `fewest` are left.
        """
        count, out = self.counts[task], skip + spared
        expected = f"must hold more than the {out} samples that are left out; it has {count}"
        source = str(self.inputs.data[task].source)
        require(count - out >= fewest, f"--data {task}", source, expected + way_out)
        return replace(self.draw, skip=skip, samples=min(most, count - out))

    def batches(self, draws: "Mapping[str, Draw]", *models: Path) -> "dict[str, DrawnBatches]":
        """Return the batches of these draws, sorted by task.

        models: further folders whose processor or tokenizer may be used.
        """
        from featcal.data.batches import drawn

        folders, made = (self.inputs.base, self.inputs.merged, *models), {}
        for task, draw in sorted(draws.items()):
            made |= drawn(self.student, folders, {task: self.inputs.data[task]}, draw)
        return made


@contextmanager
def whole_experts(inputs: Inputs, work: Path, mine: Collection[str]) -> Iterator[dict[str, Path]]:
    """Yield the experts' folders, with LoRA experts among `mine` as whole models in `work`.

    They are removed afterwards, unless `work` holds finished blocks: a run that continues needs
    the same files.
    """
    from featcal.models.lora import dense_folder

    made = {name: work / "experts" / name for name in inputs.adapter_bases if name in mine}
    try:
        for name, folder in made.items():
            note(f"{name}: adding the adapter to {inputs.adapter_bases[name]}")
            dense_folder(inputs.adapter_bases[name], inputs.experts[name], folder)
        yield {**inputs.experts, **made}
    finally:
        if not any(work.rglob("blocks/*")):
            for folder in made.values():
                shutil.rmtree(folder, ignore_errors=True)
            for folder in (work / "experts", work) if made else ():
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


def plan_with(model: Any, paths: Sequence[str] | None) -> "BlockPlan":
    """Return the model's plan, or one of the named lists of blocks."""
    from torch.nn import ModuleList

    from featcal.models.plan import BlockPlan, Stack, blocks_of, plan_for

    try:
        stacks = (Stack(path.replace(".", "_"), path) for path in paths or ())
        plan = BlockPlan(*stacks) if paths else plan_for(model)
        for stack in plan.stacks:
            blocks_of(model, stack)
    except BadPlan as error:
        lists = [n for n, part in model.named_modules() if isinstance(part, ModuleList) and part]
        choices = f"name one with --set stack=PATH: {', '.join(lists) or 'there is none'}"
        raise BadPlan(type(model).__name__, error.problem, choices) from None
    return plan
