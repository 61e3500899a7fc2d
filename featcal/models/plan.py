"""Describe a model as stacks of blocks and what they exchange; plans of known model classes.

A plan is checked by replaying it: the blocks, run one by one, must equal the model's own forward.
To add a family, add one entry to `KNOWN`; plans of other classes are inferred."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import nn

from featcal.core.moments import TokenRule, class_token_last, every_token
from featcal.errors import BadPlan

# a list of blocks with this share of the largest one's parameters is a second stack
SECOND_STACK_SHARE = 0.2
CHOOSE_BLOCKS = "it cannot be calibrated as a whole; choose blocks with plan=featcal.BlockPlan(...)"


@dataclass(frozen=True)
class Stack:
    """An ordered list of blocks.

    Args:
        name: its name in records.
        blocks: path of the ModuleList or Sequential, as in `model.get_submodule(path)`.
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

    def block_name(self, index: int) -> str:
        """Return the name of a block in records and files."""
        return f"{self.name}.{index:02d}"


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
        if len({stack.name for stack in stacks}) < len(stacks):
            raise BadPlan("BlockPlan", "has two stacks of one name", "name each differently")
        if feeds := stacks[-1].feeds:
            problem = f"the last stack, {stacks[-1].name!r}, feeds {feeds!r}, but no stack follows"
            raise BadPlan("BlockPlan", problem)
        checked = [stacks[0]]
        for stack, fed in pairwise(stacks):
            if stack.feeds and not (stack.entry and fed.entry):
                problem = f"{stack.name!r} feeds {fed.name!r}, so both need their entry"
                raise BadPlan("BlockPlan", problem)
            if stack.feeds and fed.mask == Stack.mask:  # the mask of the stack that feeds it
                fed = replace(fed, mask="decoder_attention_mask")
            checked.append(fed)
        object.__setattr__(self, "stacks", tuple(checked))
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


def blocks_of(model: nn.Module, stack: Stack) -> nn.ModuleList | nn.Sequential:
    """Return the blocks of a stack in forward order. Raises: BadPlan if there are none."""
    blocks = part_of(model, stack.blocks)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or len(blocks) == 0:
        raise BadPlan(type(model).__name__, f"{stack.blocks!r} is no list of blocks")
    return blocks


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def infer_plan(model: nn.Module) -> BlockPlan:
    """Return a plan of the largest ModuleList whose children share one class. Raises: BadPlan."""
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    sizes = {name: parameter_count(p) for name, p in lists.items() if len({*map(type, p)}) == 1}
    if not any(sizes.values()):
        raise BadPlan(type(model).__name__, "no ModuleList of blocks of one class was found")
    path = max(sizes, key=lambda name: sizes[name])  # the outer list if sizes are equal
    large = [name for name, size in sizes.items() if size >= SECOND_STACK_SHARE * sizes[path]]
    others = [n for n in large if not (f"{n}.".startswith(f"{path}.") or path.startswith(f"{n}."))]
    if others:
        problem = f"several lists of blocks ({path}, {', '.join(others)}); one must be chosen"
        raise BadPlan(type(model).__name__, problem)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ())  # e.g. sliding and full attention
    return BlockPlan(Stack("blocks", path, mixed=len(kinds) > 1))


# neither tower feeds the other, and the attention mask belongs to the text
TOWER, TEXT = "vision_model.encoder.layers", Stack("text", "text_model.encoder.layers")
SIGLIP2 = Stack("vision", TOWER, mask="pixel_attention_mask")  # pictures of many shapes are padded


def t5(prefix: str = "", biases: bool = True) -> BlockPlan:
    """Return the plan of T5. biases: blocks pass on their position biases."""
    encoder, decoder, feeds = f"{prefix}encoder", f"{prefix}decoder", "encoder_hidden_states"
    norm, own = "final_layer_norm", {1: "position_bias"} if biases else {}
    cross = own | ({2: "encoder_decoder_position_bias"} if biases else {})
    return BlockPlan(
        Stack("encoder", f"{encoder}.block", encoder, f"{encoder}.{norm}", own, feeds),
        Stack("decoder", f"{decoder}.block", decoder, f"{decoder}.{norm}", cross),
    )


def bart(prefix: str = "model.", norm: bool = False) -> BlockPlan:
    """Return the plan of a BART-like model. norm: a norm follows the encoder's last block."""
    encoder, decoder = f"{prefix}encoder", f"{prefix}decoder"
    norm_path, feeds = f"{encoder}.layer_norm" if norm else "", "encoder_hidden_states"
    first = Stack("encoder", f"{encoder}.layers", encoder, norm_path, feeds=feeds)
    return BlockPlan(first, Stack("decoder", f"{decoder}.layers", decoder))


def class_token(blocks: str) -> BlockPlan:
    """Return the plan of a vision model whose last block is read at the class token only."""
    return BlockPlan(Stack("vision", blocks), token_rule=class_token_last)


T5_ENCODER = BlockPlan(Stack("encoder", "encoder.block", carry={1: "position_bias"}))
T5_TAGGER = BlockPlan(replace(T5_ENCODER.stacks[0], blocks="transformer.encoder.block"))
NORMED = ("Pegasus", "MBart", "M2M100")  # like BART, with a norm after the encoder

KNOWN = {
    "CLIPVisionModel": class_token("encoder.layers"),
    "CLIPVisionModelWithProjection": class_token("vision_model.encoder.layers"),
    "CLIPTextModel": BlockPlan(Stack("text", "encoder.layers")),
    "CLIPTextModelWithProjection": BlockPlan(TEXT),
    "CLIPModel": BlockPlan(Stack("vision", TOWER, mask="", token_rule=class_token_last), TEXT),
    **dict.fromkeys(("T5EncoderModel", "MT5EncoderModel"), T5_ENCODER),
    **{f"{n}{end}": t5() for n in ("T5", "MT5") for end in ("Model", "ForConditionalGeneration")},
    **{f"{name}ForSequenceClassification": t5("transformer.") for name in ("T5", "MT5")},
    **{f"{name}ForTokenClassification": T5_TAGGER for name in ("T5", "MT5")},
    "UMT5EncoderModel": BlockPlan(Stack("encoder", "encoder.block")),
    # every block has its own biases
    **dict.fromkeys(("UMT5Model", "UMT5ForConditionalGeneration"), t5(biases=False)),
    **dict.fromkeys(("BartModel", "MarianModel"), bart("")),
    **dict.fromkeys(("BartForConditionalGeneration", "MarianMTModel"), bart()),
    **{f"{name}Model": bart("", norm=True) for name in NORMED},
    **{f"{name}ForConditionalGeneration": bart(norm=True) for name in NORMED},
    "SiglipModel": BlockPlan(Stack("vision", TOWER, mask=""), TEXT),
    "Siglip2Model": BlockPlan(SIGLIP2, TEXT),
    "Siglip2ForImageClassification": BlockPlan(SIGLIP2),
    "Siglip2VisionModel": BlockPlan(replace(SIGLIP2, blocks="encoder.layers")),
    **dict.fromkeys(("ViTModel", "DeiTModel"), class_token("layers")),
    **{f"{n}ForImageClassification": class_token(f"{n.lower()}.layers") for n in ("ViT", "DeiT")},
    "Dinov2Model": class_token("encoder.layer"),  # not its classifier, which reads patches
    "Dinov2WithRegistersModel": class_token("encoder.layer"),
    "DINOv3ViTModel": class_token("model.layer"),
    "LlamaModel": BlockPlan(Stack("decoder", "layers")),
    "LlamaForCausalLM": BlockPlan(Stack("decoder", "model.layers")),
}


def plan_for(model: nn.Module, plan: BlockPlan | None = None) -> BlockPlan:
    """Return `plan` if given, else the known plan of the model's class, else an inferred one."""
    name = type(model).__name__  # other packages have classes of these names
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}
    return plan or (("transformers", name) in kinds and KNOWN.get(name)) or infer_plan(model)
