"""Mixtures of experts: experts that lie in one tensor, as linears that calibration can solve, and
who takes which tokens.

transformers 5 keeps the experts of a layer as gate_up_proj (E, 2i, d) and down_proj (E, d, i) and
hands them tokens with the router's choice. The linears here are views of these tensors: what is
written into them is written there, and nothing is copied."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from featcal.errors import BadPlan
from featcal.models.capture import hooked

PARTS = ("gate_up_proj", "down_proj")
ROUNDING = 1e-5  # of the largest feature, of products that are the same but for their order


class View(nn.Linear):
    """A linear whose weight (o, d) is part of another module's parameter; it has no parameter
    itself.
    """

    def __init__(self, weight: Tensor):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, None  # type: ignore[assignment]


class Expert(nn.Module):
    """One expert: down(act(gate x) · up x)."""

    def __init__(self, gate_up: Tensor, down: Tensor, act: nn.Module):
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            View(gate),
            View(up),
            View(down),
            act,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]

    def unseen(self, x: Tensor) -> Tensor:
        """The same without a call of its linears, which nobody watches then."""
        hidden = self.act_fn(F.linear(x, self.gate_proj.weight)) * F.linear(x, self.up_proj.weight)
        return F.linear(hidden, self.down_proj.weight)


class Unpacked(nn.Module):
    """Packed experts as modules "0", "1", ...; their parameters stay the packed ones, under their
    own names.

    rows: of each expert the tokens (row numbers of (batch · tokens, d)) that came to it last.
    lead: rows of another model to run the experts on for who watches them; what is put out follows
    the own router all the same.
    """

    def __init__(self, packed: nn.Module):
        super().__init__()
        for name in PARTS:
            self.register_parameter(name, packed.get_parameter(name))
        weights = zip(self.gate_up_proj.detach(), self.down_proj.detach(), strict=True)  # type: ignore[operator]
        for number, (gate_up, down) in enumerate(weights):
            self.add_module(str(number), Expert(gate_up, down, packed.act_fn))  # type: ignore[arg-type]
        self.rows: list[Tensor] = []
        self.lead: list[Tensor] | None = None

    @property
    def experts(self) -> list[Expert]:
        return [part for part in self.children() if isinstance(part, Expert)]

    @property
    def work(self) -> int:
        """Floating point operations of the last pass."""
        tokens, values = (
            sum(len(rows) for rows in self.rows),
            sum(p.numel() for p in self.parameters(recurse=False)),
        )
        return 2 * tokens * (values // max(len(self.rows), 1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = taken(top_k_index, len(self.experts))
        self.rows = [rows for rows, _ in chosen]
        out = torch.zeros_like(hidden_states)
        for expert, (rows, place) in zip(self.experts, chosen, strict=True):
            run = expert if self.lead is None else expert.unseen
            out.index_add_(
                0, rows, (run(hidden_states[rows]) * top_k_weights[rows, place, None]).to(out.dtype)
            )
        for expert, rows in zip(self.experts, self.lead or (), strict=False):
            expert(hidden_states[rows])
        return out


def taken(choice: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Of each of `count` experts the tokens that it is given and which of their choices it is; on
    meta an even share of them all.

    choice: (tokens, experts of a token), as the router puts it out.
    """
    if choice.device.type != "meta":
        return [torch.where(choice == number) for number in range(count)]
    return [
        (share, share)
        for share in choice.new_empty(choice.numel(), dtype=torch.long).tensor_split(count)
    ]


def is_packed(module: nn.Module) -> bool:
    """Whether a module holds experts in the two tensors this file knows."""
    parts = [getattr(module, name, None) for name in PARTS]
    if isinstance(module, Unpacked) or not all(
        isinstance(part, Tensor) and part.dim() == 3 for part in parts
    ):
        return False
    (count, twice, d), (same, out, inner) = (part.shape for part in parts)  # type: ignore[union-attr]
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return (
        own == set(PARTS)
        and (count, twice, d) == (same, 2 * inner, out)
        and isinstance(getattr(module, "act_fn", None), nn.Module)
    )


def packed_experts(block: nn.Module) -> dict[str, nn.Module]:
    """The packed experts of a block by path."""
    return {path: part for path, part in block.named_modules() if is_packed(part)}


def unpacked_experts(block: nn.Module) -> dict[str, Unpacked]:
    """Those that are modules now, by path."""
    return {path: part for path, part in block.named_modules() if isinstance(part, Unpacked)}


@contextmanager
def unpacked(block: nn.Module) -> Iterator[None]:
    """Inside, packed experts of the block are linears; a block without any is left alone."""
    found = packed_experts(block)
    for path, packed in found.items():
        block.set_submodule(path, Unpacked(packed))
    try:
        yield
    finally:
        for path, packed in found.items():
            block.set_submodule(path, packed)


@contextmanager
def following(block: nn.Module, leader: nn.Module) -> Iterator[None]:
    """Inside, the block's experts are also run on the tokens that came to the leader's last, for
    who watches them.
    """
    leading = unpacked_experts(leader)
    own = unpacked_experts(block)
    for path, part in own.items():
        part.lead = leading[path].rows
    try:
        yield
    finally:
        for part in own.values():
            part.lead = None


def routed(block: nn.Module) -> dict[str, Tensor]:
    """The tokens that came last to each expert, by the expert's path in the block."""
    found = unpacked_experts(block).items()
    return {
        f"{path}.{number}": rows for path, part in found for number, rows in enumerate(part.rows)
    }


def expert_of(name: str, known: Mapping[str, object]) -> str | None:
    """The expert that a linear of a block belongs to; None for a linear that every token
    reaches.
    """
    expert = name.rpartition(".")[0]
    return expert if expert in known else None


@contextmanager
def checked(model: nn.Module) -> Iterator[None]:
    """While the model runs, its packed experts must put out what they put out as linears. Raises:
    BadPlan.
    """

    def compare(path: str, packed: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        bound = max(ROUNDING, 4 * torch.finfo(out.dtype).eps)
        difference = float((Unpacked(packed)(*args) - out).abs().max())
        if not difference <= bound * float(out.abs().max()):
            raise BadPlan(
                type(model).__name__,
                f"the experts of {path} compute otherwise than as linears, by {difference:.3g}",
            )

    found = packed_experts(model).items()
    handles = [
        part.register_forward_hook(lambda m, a, o, path=path: compare(path, m, a, o))
        for path, part in found
    ]
    with hooked(handles):
        yield
