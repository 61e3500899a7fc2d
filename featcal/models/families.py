"""Block plans of known model classes; the others are inferred."""

from torch import nn

from featcal.core.moments import class_token_last
from featcal.models.plan import BlockPlan, Stack, infer_plan

CLIP_VISION = BlockPlan(Stack("vision", "encoder.layers"), token_rule=class_token_last)
CLIP_VISION_PROJECTED = BlockPlan(
    Stack("vision", "vision_model.encoder.layers"), token_rule=class_token_last
)
CLIP_TEXT = BlockPlan(Stack("text", "encoder.layers"))
CLIP_TEXT_PROJECTED = BlockPlan(Stack("text", "text_model.encoder.layers"))
CLIP = (
    BlockPlan(  # neither tower feeds the other; the text's attention mask tells nothing of images
        Stack("vision", "vision_model.encoder.layers", mask="", token_rule=class_token_last),
        Stack("text", "text_model.encoder.layers"),
    )
)

T5_ENCODER = BlockPlan(Stack("encoder", "encoder.block", carry={1: "position_bias"}))
T5 = BlockPlan(
    Stack(
        "encoder",
        "encoder.block",
        entry="encoder",
        exit="encoder.final_layer_norm",
        carry={1: "position_bias"},
        feeds="encoder_hidden_states",
    ),
    Stack(
        "decoder",
        "decoder.block",
        entry="decoder",
        exit="decoder.final_layer_norm",
        carry={1: "position_bias", 2: "encoder_decoder_position_bias"},
    ),
)

LLAMA = BlockPlan(Stack("decoder", "layers"))
LLAMA_FOR_CAUSAL_LM = BlockPlan(Stack("decoder", "model.layers"))


def seq2seq(prefix: str = "model.", norm: bool = False) -> BlockPlan:
    """Encoder and decoder of the BART family; `norm`: whether a norm follows the encoder's last
    layer.
    """
    exit = f"{prefix}encoder.layer_norm" if norm else ""
    return BlockPlan(
        Stack(
            "encoder",
            f"{prefix}encoder.layers",
            f"{prefix}encoder",
            exit,
            feeds="encoder_hidden_states",
        ),
        Stack("decoder", f"{prefix}decoder.layers", f"{prefix}decoder"),
    )


UMT5_ENCODER = BlockPlan(Stack("encoder", "encoder.block"))
UMT5 = BlockPlan(
    Stack(
        "encoder",
        "encoder.block",
        "encoder",
        "encoder.final_layer_norm",
        feeds="encoder_hidden_states",
    ),
    Stack("decoder", "decoder.block", "decoder", "decoder.final_layer_norm"),
)
SIGLIP = BlockPlan(
    Stack("vision", "vision_model.encoder.layers", mask=""),
    Stack("text", "text_model.encoder.layers"),
)

KNOWN = {
    "CLIPVisionModel": CLIP_VISION,
    "CLIPVisionModelWithProjection": CLIP_VISION_PROJECTED,
    "CLIPTextModel": CLIP_TEXT,
    "CLIPTextModelWithProjection": CLIP_TEXT_PROJECTED,
    "CLIPModel": CLIP,
    "T5EncoderModel": T5_ENCODER,
    "T5Model": T5,
    "T5ForConditionalGeneration": T5,
    "MT5EncoderModel": T5_ENCODER,
    "MT5Model": T5,
    "MT5ForConditionalGeneration": T5,
    "UMT5EncoderModel": UMT5_ENCODER,
    "UMT5Model": UMT5,
    "UMT5ForConditionalGeneration": UMT5,
    "BartModel": seq2seq(""),
    "BartForConditionalGeneration": seq2seq(),
    "MarianModel": seq2seq(""),
    "MarianMTModel": seq2seq(),
    "PegasusModel": seq2seq("", norm=True),
    "PegasusForConditionalGeneration": seq2seq(norm=True),
    "MBartModel": seq2seq("", norm=True),
    "MBartForConditionalGeneration": seq2seq(norm=True),
    "M2M100Model": seq2seq("", norm=True),
    "M2M100ForConditionalGeneration": seq2seq(norm=True),
    "SiglipModel": SIGLIP,
    "LlamaModel": LLAMA,
    "LlamaForCausalLM": LLAMA_FOR_CAUSAL_LM,
}


def plan_for(model: nn.Module, plan: BlockPlan | None = None) -> BlockPlan:
    """The given plan, else the known one of the model's class, else the inferred one."""
    return plan or KNOWN.get(type(model).__name__) or infer_plan(model)
