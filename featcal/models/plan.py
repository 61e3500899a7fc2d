"""A block plan: the stacks of blocks of a model and what they exchange, as data, given or inferred.

A plan is proven right by a check: replaying its blocks must equal the model's own forward."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from featcal.core.moments import TokenRule, every_token
from featcal.errors import BadPlan

# a second list of blocks with this share of the largest one's parameters is a second stack
SECOND_STACK_SHARE = 0.2


@dataclass(frozen=True)
class Stack:
    """An ordered list of blocks.

    Args:
        name: its name in records.
        blocks: path of the ModuleList, as in `model.get_submodule(path)`.
        entry: path of the module whose forward runs the blocks; needed if stacks feed each other.
        exit: path of the module after the last block, applied to what is fed to the next stack.
        carry: output index of a block -> keyword of the next block, for blocks that pass on more
            than the hidden states.
        feeds: keyword by which the next stack's entry and blocks receive this stack's result.
        mask: the batch's key for the padding mask (0 at padding); the default of a stack that is
            fed is "decoder_attention_mask".
        mixed: the model passes its blocks masks or positions by kind of layer; such blocks return
            hidden states only.
        token_rule: this stack's token weights, if they differ from the plan's.
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
    """The stacks of a model in forward order and the family's rule for token weights.

    Args:
        stacks: at least one `Stack`.
        token_rule: (module, whether in the last block, (batch, tokens)) -> weights (batch, tokens).

    Raises:
        BadPlan: no stacks, or stacks that feed each other without entries.
    """

    stacks: tuple[Stack, ...]
    token_rule: TokenRule

    def __init__(self, *stacks: Stack, token_rule: TokenRule = every_token):
        if not stacks:
            raise BadPlan("BlockPlan", "needs at least one stack")
        if other := [type(stack).__name__ for stack in stacks if not isinstance(stack, Stack)]:
            way_out = "give featcal.Stack('name', blocks='path.to.the.ModuleList')"
            raise BadPlan("BlockPlan", f"is given a {other[0]}", way_out)
        last = stacks[-1]
        if last.feeds:
            problem = f"the last stack, {last.name!r}, feeds {last.feeds!r}, but no stack follows"
            raise BadPlan("BlockPlan", problem)
        own = [stacks[0]]
        for stack, fed in zip(stacks, stacks[1:], strict=False):
            if stack.feeds and not (stack.entry and fed.entry):
                problem = f"{stack.name!r} feeds {fed.name!r}, so both need their entry"
                raise BadPlan("BlockPlan", problem)
            # a stack that is fed must not take its source's mask for its own
            renamed = stack.feeds and fed.mask == Stack.mask
            own.append(replace(fed, mask="decoder_attention_mask") if renamed else fed)
        object.__setattr__(self, "stacks", tuple(own))
        object.__setattr__(self, "token_rule", token_rule)

    @property
    def in_order(self) -> list[tuple[Stack | None, Stack]]:
        """Return every stack after the one that feeds it, or after None."""
        sources = (None, *(stack if stack.feeds else None for stack in self.stacks))
        return list(zip(sources, self.stacks, strict=False))

    def rule(self, stack: Stack) -> TokenRule:
        """Return the rule for one stack's token weights."""
        return stack.token_rule or self.token_rule


def part_of(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path. Raises: BadPlan if there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BadPlan(type(model).__name__, f"has no module {path!r}") from None


def blocks_of(model: nn.Module, stack: Stack) -> nn.ModuleList:
    """Return the blocks of one stack in forward order. Raises: BadPlan if there are none."""
    blocks = part_of(model, stack.blocks)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise BadPlan(type(model).__name__, f"{stack.blocks!r} is no list of blocks")
    return blocks


def parameter_count(module: nn.Module) -> int:
    """Return the number of values in a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def infer_plan(model: nn.Module) -> BlockPlan:
    """Return the plan of the largest ModuleList whose children share one class.

    Raises: BadPlan if there is none, or a second one of comparable size.
    """
    sizes = {
        name: parameter_count(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    }
    if not any(sizes.values()):
        raise BadPlan(type(model).__name__, "no ModuleList of blocks of one class was found")
    path = max(sizes, key=lambda name: sizes[name])  # of equals the first, so outer before inner
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
    kinds = set(getattr(text, "layer_types", None) or ())  # such as sliding and full attention
    return BlockPlan(Stack(name="blocks", blocks=path, mixed=len(kinds) > 1))
