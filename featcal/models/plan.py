"""Describe a model as stacks of blocks and what they exchange.

A plan is checked by replaying it: the blocks, run one by one, must equal the model's own forward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from featcal.core.moments import TokenRule, every_token
from featcal.errors import BadPlan

# a list of blocks with this share of the largest one's parameters is a second stack
SECOND_STACK_SHARE = 0.2
CHOOSE_BLOCKS = (
    "this model cannot be calibrated as a whole; choose blocks with plan=featcal.BlockPlan(...)"
)


@dataclass(frozen=True)
class Stack:
    """An ordered list of blocks.

    Args:
        name: its name in records.
        blocks: path of the ModuleList, as in `model.get_submodule(path)`.
        entry: path of the module whose forward runs the blocks; needed if stacks feed each other.
        exit: path of the module after the last block, applied to what is fed to the next stack.
        carry: index in a block's output -> keyword of the next block, for blocks that pass on
            more than the hidden states.
        feeds: keyword under which the next stack's entry and blocks receive this stack's output.
        mask: key of the padding mask (0 at padding) in a batch. Default for a stack that is fed:
            "decoder_attention_mask".
        mixed: blocks take different masks or positions by kind of layer, and return hidden states
            only.
        token_rule: token weights of this stack. Default: the plan's.
    """

    name: str
    blocks: str
    entry: str = ""
    exit: str = ""
    carry: Mapping[int, str] = field(default_factory=dict)
    feeds: str = ""
    mask: str = "attention_mask"
    mixed: bool = False
    token_rule: TokenRule | None = None


@dataclass(frozen=True, init=False)
class BlockPlan:
    """The stacks of a model in forward order, with the rule for token weights.

    Args:
        stacks: at least one `Stack`.
        token_rule: (module, whether in the last block, (batch, tokens)) -> weights (batch, tokens).

    Raises:
        BadPlan: there is no stack, or stacks that feed each other lack an entry.
    """

    stacks: tuple[Stack, ...]
    token_rule: TokenRule

    def __init__(self, *stacks: Stack, token_rule: TokenRule = every_token):
        if not stacks:
            raise BadPlan("BlockPlan", "needs at least one stack")
        if other := [type(stack).__name__ for stack in stacks if not isinstance(stack, Stack)]:
            way_out = "give featcal.Stack('name', blocks='path.to.the.ModuleList')"
            raise BadPlan("BlockPlan", f"is given a {other[0]}", way_out)
        if feeds := stacks[-1].feeds:
            problem = f"the last stack, {stacks[-1].name!r}, feeds {feeds!r}, but no stack follows"
            raise BadPlan("BlockPlan", problem)
        own = [stacks[0]]
        for stack, fed in zip(stacks, stacks[1:], strict=False):
            if stack.feeds and not (stack.entry and fed.entry):
                problem = f"{stack.name!r} feeds {fed.name!r}, so both need their entry"
                raise BadPlan("BlockPlan", problem)
            if stack.feeds and fed.mask == Stack.mask:  # the mask of the stack that feeds it
                fed = replace(fed, mask="decoder_attention_mask")
            own.append(fed)
        object.__setattr__(self, "stacks", tuple(own))
        object.__setattr__(self, "token_rule", token_rule)

    @property
    def in_order(self) -> list[tuple[Stack | None, Stack]]:
        """Return (the stack that feeds it or None, stack) for every stack."""
        sources = (None, *(stack if stack.feeds else None for stack in self.stacks))
        return list(zip(sources, self.stacks, strict=False))

    def rule(self, stack: Stack) -> TokenRule:
        """Return the rule for the token weights of a stack."""
        return stack.token_rule or self.token_rule


def part_of(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path. Raises: BadPlan if there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BadPlan(type(model).__name__, f"has no module {path!r}") from None


def blocks_of(model: nn.Module, stack: Stack) -> nn.ModuleList:
    """Return the blocks of a stack in forward order. Raises: BadPlan if there are none."""
    blocks = part_of(model, stack.blocks)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise BadPlan(type(model).__name__, f"{stack.blocks!r} is no list of blocks")
    return blocks


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def infer_plan(model: nn.Module) -> BlockPlan:
    """Return a plan of the largest ModuleList whose children share one class.

    Raises: BadPlan if there is none, or another of comparable size.
    """
    sizes = {
        name: parameter_count(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    }
    if not any(sizes.values()):
        raise BadPlan(type(model).__name__, "no ModuleList of blocks of one class was found")
    path = max(sizes, key=lambda name: sizes[name])  # the outer list if sizes are equal
    others = [
        name
        for name, size in sizes.items()
        if size >= SECOND_STACK_SHARE * sizes[path]
        and not f"{name}.".startswith(f"{path}.")
        and not path.startswith(f"{name}.")
    ]
    if others:
        problem = f"several lists of blocks ({path}, {', '.join(others)}); one must be chosen"
        raise BadPlan(type(model).__name__, problem)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ())  # e.g. sliding and full attention
    return BlockPlan(Stack("blocks", path, mixed=len(kinds) > 1))
