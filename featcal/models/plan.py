"""A block plan: which stacks of blocks a model has and what they exchange, as data; inferred where
none is given.

The proof that a plan is right is a check, not a review: replaying its blocks must equal the model's
own forward."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from featcal.core.moments import TokenRule, every_token
from featcal.errors import BadPlan

RIVAL_SHARE = (
    0.2  # a second list of blocks with this share of the first one's parameters is a second stack
)


@dataclass(frozen=True)
class Stack:
    """An ordered list of blocks.

    name:    how records call it.
    blocks:  path of the ModuleList, as in `model.get_submodule(path)`.
    entry:   path of the module whose forward runs the blocks; needed of stacks that feed or are
             fed.
    exit:    path of what follows the last block, applied to what is fed on.
    carry:   output index of a block -> keyword of the next block, for blocks that hand on more than
             the hidden states.
    feeds:   keyword by which the next stack's entry and its blocks receive this stack's result.
    mask:    keyword of the batch that tells padding (0) from tokens (1); of a stack that is fed,
             "decoder_attention_mask".
    mixed:   the model hands its blocks masks or positions by kind of layer; such blocks put out
             hidden states alone.
    token_rule: this stack's own rule for token weights, where it differs from the plan's.
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
    """The stacks of a model in forward order and the family's rule for token weights."""

    stacks: tuple[Stack, ...]
    token_rule: TokenRule

    def __init__(self, *stacks: Stack, token_rule: TokenRule = every_token):
        if not stacks:
            raise BadPlan("BlockPlan", "needs at least one stack")
        if other := [type(stack).__name__ for stack in stacks if not isinstance(stack, Stack)]:
            raise BadPlan(
                "BlockPlan",
                f"is given a {other[0]}",
                "give featcal.Stack('name', blocks='path.to.the.ModuleList')",
            )
        if stacks[-1].feeds:
            raise BadPlan(
                "BlockPlan",
                f"the last stack, {stacks[-1].name!r}, feeds {stacks[-1].feeds!r} of no other stack",
            )
        for stack, fed in zip(stacks, stacks[1:], strict=False):
            if stack.feeds and not (stack.entry and fed.entry):
                raise BadPlan(
                    "BlockPlan", f"{stack.name!r} feeds {fed.name!r}, so both need their entry"
                )
        object.__setattr__(
            self,
            "stacks",
            tuple(with_own_mask(b, s) for b, s in zip((None, *stacks), stacks, strict=False)),
        )
        object.__setattr__(self, "token_rule", token_rule)

    @property
    def in_order(self) -> list[tuple[Stack | None, Stack]]:
        """Every stack behind the one that feeds it, None where none does."""
        before = (None, *self.stacks)
        return [
            (b if b and b.feeds else None, stack)
            for b, stack in zip(before, self.stacks, strict=False)
        ]

    def rule(self, stack: Stack) -> TokenRule:
        """How the tokens of one stack count."""
        return stack.token_rule or self.token_rule


def with_own_mask(before: Stack | None, stack: Stack) -> Stack:
    """The stack; one that is fed does not take the mask of what feeds it for its own."""
    taken = before is not None and before.feeds and stack.mask == Stack.mask
    return replace(stack, mask="decoder_attention_mask") if taken else stack


def part_of(model: nn.Module, path: str) -> nn.Module:
    """The module at a path of a plan. Raises: BadPlan where there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BadPlan(type(model).__name__, f"has no module {path!r}") from None


def blocks_of(model: nn.Module, stack: Stack) -> nn.ModuleList:
    """The blocks of one stack in forward order. Raises: BadPlan where the path leads to no list of
    blocks.
    """
    found = part_of(model, stack.blocks)
    if not isinstance(found, nn.ModuleList) or len(found) == 0:
        raise BadPlan(type(model).__name__, f"{stack.blocks!r} is no list of blocks")
    return found


def parameter_count(module: nn.Module) -> int:
    """Number of values of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def infer_plan(model: nn.Module) -> BlockPlan:
    """The largest ModuleList whose children share one class. Raises: BadPlan where there is none or
    a second one of size.
    """
    sizes = {
        name: parameter_count(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    }
    if not sizes or max(sizes.values()) == 0:
        raise BadPlan(type(model).__name__, "no ModuleList of like blocks was found")
    path = max(
        sizes, key=lambda name: sizes[name]
    )  # the first of equals, so an outer list wins over a list inside it
    rivals = [
        name
        for name in sizes
        if not name.startswith(f"{path}.") and not path.startswith(f"{name}.")
    ]
    rivals = [name for name in rivals if name != path and sizes[name] >= RIVAL_SHARE * sizes[path]]
    if rivals:
        raise BadPlan(
            type(model).__name__,
            f"several lists of blocks ({path}, {', '.join(rivals)}); one must be chosen",
        )
    return BlockPlan(Stack(name="blocks", blocks=path, mixed=len(layer_kinds(model)) > 1))


def layer_kinds(model: nn.Module) -> set[str]:
    """The kinds of layers a transformers model tells of, such as sliding and full attention; none
    for other models.
    """
    config = getattr(model, "config", None)
    text = (
        config.get_text_config()
        if config is not None and hasattr(config, "get_text_config")
        else config
    )
    return set(getattr(text, "layer_types", None) or ())
