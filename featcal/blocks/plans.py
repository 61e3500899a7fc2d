"""Block plans of known model classes; the others are inferred."""

from torch import nn

from featcal.blocks.plan import BlockPlan, Stack, infer_plan
from featcal.core.weighting import class_token_last

CLIP_VISION = BlockPlan(Stack("vision", "encoder.layers"), token_rule=class_token_last)
CLIP_VISION_PROJECTED = BlockPlan(Stack("vision", "vision_model.encoder.layers"), token_rule=class_token_last)

KNOWN = {"CLIPVisionModel": CLIP_VISION, "CLIPVisionModelWithProjection": CLIP_VISION_PROJECTED}


def plan_for(model: nn.Module, plan: BlockPlan | None = None) -> BlockPlan:
    """The given plan, else the known one of the model's class, else the inferred one."""
    return plan or KNOWN.get(type(model).__name__) or infer_plan(model)
