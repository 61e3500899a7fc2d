"""A forward without numbers counts what a real one does, and takes as little memory as it says."""

import pytest
import torch
from families import FAMILIES, KINDS
from tiny import clip, images, make
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from featcal.calibration.tokens import same_memory
from featcal.errors import BadPlan
from featcal.planning.meta_profiler import rehearsing, shapes_suffice, to_meta

FUSED = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
)  # which torch's own counter leaves out
COUNTED = {FUSED: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_work_counted_without_numbers_is_that_of_the_real_forward_exactly(family, masked):
    model = make(FAMILIES[family].build, dtype=torch.float32)
    batch = {
        k: v.float() if v.is_floating_point() else v
        for k, v in FAMILIES[family].batches(1)[0].items()
    }
    batch = batch if masked else {k: v for k, v in batch.items() if k != "attention_mask"}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=COUNTED) as counted:
        model(**batch)
    with rehearsing(padded=masked) as rehearsed:
        to_meta(model)(**{k: v.to("meta") for k, v in batch.items()})
    assert rehearsed.flops == counted.get_total_flops() > 0


def test_a_copy_without_numbers_holds_none_and_leaves_the_model_as_it_was():
    model = clip()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = to_meta(model)
    assert all(t.is_meta for t in (*copy.parameters(), *copy.buffers()))
    assert [(n, p.shape, p.dtype) for n, p in copy.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in model.named_parameters()
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_memory_is_counted_while_a_tensor_lives_and_a_view_adds_nothing():
    x = torch.empty(10, 100, device="meta")  # 4,000 bytes, there before
    with rehearsing() as counted:
        a = x.T.reshape(-1)  # a copy
        b = a.view(10, 100)[2:]
        assert (counted.live, counted.peak) == (4000, 4000)
        c = b + 1  # 3,200 bytes
        del a, b
        assert (counted.live, counted.peak) == (3200, 7200)
        del c
        assert (counted.live, counted.peak) == (0, 7200)
        x.add_(1)
    assert counted.peak == 7200


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_the_same_values_of_the_same_memory_are_one_input(device):
    x = torch.empty(4, 6, device=device)
    assert same_memory(x, x.view(4, 6)) and same_memory(x, x[:4])
    assert (
        not same_memory(x, x.clone())
        and not same_memory(x[:2], x[2:])
        and not same_memory(x, x.view(6, 4))
    )


def test_a_forward_that_depends_on_numbers_is_refused():
    class Adaptive(nn.Module):
        def forward(self, x):
            return x[: int(x.sum())]

    model = Adaptive()
    with (
        pytest.raises(BadPlan, match="Adaptive: its forward depends on numbers"),
        shapes_suffice(model),
        rehearsing(),
    ):
        model(images(0)[0]["pixel_values"].to("meta"))
