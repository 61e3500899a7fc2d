"""How much each token counts."""

import pytest
import torch
from tiny import VISION, clip, make
from transformers import BeitConfig, BeitModel, ViTConfig, ViTModel

from featcal.core.moments import class_token_last, every_token, token_weights
from featcal.errors import BadSetting
from featcal.models.plan import plan_for

SHAPE = (2, 5)


@pytest.mark.parametrize(
    ("module", "last", "patch"),
    [
        *[(n, True, 0.01) for n in ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc2", "norm1")],
        *[(n, True, 1) for n in ("self_attn.k_proj", "self_attn.v_proj")],
        ("mlp.fc1", False, 1),
    ],
)
def test_patches_of_clips_last_block_count_a_hundredth_but_for_keys_and_values(module, last, patch):
    w = class_token_last(module, last, SHAPE)
    expected = torch.full(SHAPE, patch, dtype=torch.float64)
    expected[:, 0] = 1
    assert torch.equal(w, expected)


def test_padding_counts_nothing_whatever_the_rule():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    for rule in (every_token, class_token_last):
        w = token_weights(rule, "mlp.fc1", True, torch.zeros(2, 5, 3, dtype=torch.float64), mask)
        assert w.dtype == torch.float64
        assert torch.equal(w.eq(0), mask.eq(0))


@pytest.mark.parametrize("rule", [lambda name: 1, lambda *_: 1.0, lambda *_: torch.ones(2, 4)])
def test_a_rule_that_gives_no_weights_of_the_tokens_is_refused(rule):
    with pytest.raises(BadSetting, match=r"calibrate\.token_weights.*must be a function"):
        token_weights(rule, "mlp.fc1", True, torch.zeros(2, 5, 3), None)


def test_vision_towers_have_the_class_token_rule_and_an_inferred_plan_counts_every_token():
    vit = make(lambda: ViTModel(ViTConfig(**VISION, intermediate_size=64)))
    beit = make(lambda: BeitModel(BeitConfig(**VISION, intermediate_size=64)))
    assert plan_for(clip()).token_rule is class_token_last
    assert plan_for(vit).token_rule is class_token_last
    assert plan_for(beit).token_rule is every_token
