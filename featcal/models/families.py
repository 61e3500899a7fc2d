"""Block plans of known model classes. Plans of other classes are inferred.

To add a family, add one entry to `KNOWN`.
"""

from torch import nn

from featcal.core.moments import class_token_last
from featcal.models.plan import BlockPlan, Stack, infer_plan

# neither tower feeds the other, and the attention mask belongs to the text
CLIP = BlockPlan(
    Stack("vision", "vision_model.encoder.layers", mask="", token_rule=class_token_last),
    Stack("text", "text_model.encoder.layers"),
)
SIGLIP = BlockPlan(
    Stack("vision", "vision_model.encoder.layers", mask=""),
    Stack("text", "text_model.encoder.layers"),
)


def t5(encoder: dict[int, str], decoder: dict[int, str]) -> BlockPlan:
    """Return the plan of T5. encoder, decoder: position biases that their blocks pass on."""
    norm, feeds = "final_layer_norm", "encoder_hidden_states"
    return BlockPlan(
        Stack("encoder", "encoder.block", "encoder", f"encoder.{norm}", encoder, feeds),
        Stack("decoder", "decoder.block", "decoder", f"decoder.{norm}", decoder),
    )


def bart(prefix: str = "model.", norm: bool = False) -> BlockPlan:
    """Return the plan of a BART-like model. norm: a norm follows the encoder's last block."""
    encoder, decoder = f"{prefix}encoder", f"{prefix}decoder"
    norm_path = f"{encoder}.layer_norm" if norm else ""
    feeds = "encoder_hidden_states"
    return BlockPlan(
        Stack("encoder", f"{encoder}.layers", entry=encoder, exit=norm_path, feeds=feeds),
        Stack("decoder", f"{decoder}.layers", entry=decoder),
    )


def class_token(blocks: str) -> BlockPlan:
    """Return the plan of a vision model whose last block is read at the class token only."""
    return BlockPlan(Stack("vision", blocks), token_rule=class_token_last)


T5_ENCODER = BlockPlan(Stack("encoder", "encoder.block", carry={1: "position_bias"}))
T5 = t5({1: "position_bias"}, {1: "position_bias", 2: "encoder_decoder_position_bias"})
UMT5 = t5({}, {})  # every block has its own position bias
NORMED = ("Pegasus", "MBart", "M2M100")  # like BART, with a norm after the encoder

KNOWN = {
    "CLIPVisionModel": class_token("encoder.layers"),
    "CLIPVisionModelWithProjection": class_token("vision_model.encoder.layers"),
    "CLIPTextModel": BlockPlan(Stack("text", "encoder.layers")),
    "CLIPTextModelWithProjection": BlockPlan(Stack("text", "text_model.encoder.layers")),
    "CLIPModel": CLIP,
    **dict.fromkeys(("T5EncoderModel", "MT5EncoderModel"), T5_ENCODER),
    **dict.fromkeys(("T5Model", "T5ForConditionalGeneration"), T5),
    **dict.fromkeys(("MT5Model", "MT5ForConditionalGeneration"), T5),
    "UMT5EncoderModel": BlockPlan(Stack("encoder", "encoder.block")),
    **dict.fromkeys(("UMT5Model", "UMT5ForConditionalGeneration"), UMT5),
    **dict.fromkeys(("BartModel", "MarianModel"), bart("")),
    **dict.fromkeys(("BartForConditionalGeneration", "MarianMTModel"), bart()),
    **{f"{name}Model": bart("", norm=True) for name in NORMED},
    **{f"{name}ForConditionalGeneration": bart(norm=True) for name in NORMED},
    "SiglipModel": SIGLIP,
    "ViTModel": class_token("layers"),
    "ViTForImageClassification": class_token("vit.layers"),
    "DeiTModel": class_token("layers"),
    "DeiTForImageClassification": class_token("deit.layers"),
    "Dinov2Model": class_token("encoder.layer"),  # not its classifier, which reads patches
    "Dinov2WithRegistersModel": class_token("encoder.layer"),
    "DINOv3ViTModel": class_token("model.layer"),
    "LlamaModel": BlockPlan(Stack("decoder", "layers")),
    "LlamaForCausalLM": BlockPlan(Stack("decoder", "model.layers")),
}


def plan_for(model: nn.Module, plan: BlockPlan | None = None) -> BlockPlan:
    """Return `plan` if given, else the known plan of the model's class, else an inferred one."""
    return plan or KNOWN.get(type(model).__name__) or infer_plan(model)
