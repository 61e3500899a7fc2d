"""A block plan: which blocks a model has, as data; inferred where none is given.

The proof that a plan is right is a check, not a review: replaying its blocks must equal the model's own forward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from featcal.core.weighting import TokenRule, every_token
from featcal.errors import BadPlan

RIVAL_SHARE = 0.2  # a second list of blocks with this share of the first one's parameters is a second stack


@dataclass(frozen=True)
class Stack:
    """An ordered list of blocks.

    name:    how records call it.
    blocks:  path of the ModuleList, as in `model.get_submodule(path)`.
    carry:   output index of a block -> keyword of the next block, for blocks that hand on more than the hidden states.
    """

    name: str
    blocks: str
    carry: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockPlan:
    """The stack of a model and the family's rule for token weights."""

    stack: Stack
    token_rule: TokenRule = every_token

    def blocks(self, model: nn.Module) -> nn.ModuleList:
        """The model's blocks in forward order. Raises: BadPlan where the path leads to no list of blocks."""
        try:
            found = model.get_submodule(self.stack.blocks)
        except AttributeError:
            raise BadPlan(type(model).__name__, f"has no module {self.stack.blocks!r}") from None
        if not isinstance(found, nn.ModuleList) or len(found) == 0:
            raise BadPlan(type(model).__name__, f"{self.stack.blocks!r} is no list of blocks")
        return found


def parameter_count(module: nn.Module) -> int:
    """Number of values of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def infer_plan(model: nn.Module) -> BlockPlan:
    """The largest ModuleList whose children share one class. Raises: BadPlan where there is none or a second one of size."""
    sizes = {
        name: parameter_count(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    }
    if not sizes or max(sizes.values()) == 0:
        raise BadPlan(type(model).__name__, "no ModuleList of like blocks was found")
    path = max(sizes, key=lambda name: sizes[name])  # the first of equals, so an outer list wins over a list inside it
    rivals = [name for name in sizes if not name.startswith(f"{path}.") and not path.startswith(f"{name}.")]
    rivals = [name for name in rivals if name != path and sizes[name] >= RIVAL_SHARE * sizes[path]]
    if rivals:
        raise BadPlan(type(model).__name__, f"several lists of blocks ({path}, {', '.join(rivals)}); one must be chosen")
    return BlockPlan(Stack(name="blocks", blocks=path))
