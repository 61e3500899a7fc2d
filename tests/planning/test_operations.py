"""Operations without numbers: one that was met before is not worked out again, and what is
remembered is what torch does.
"""

import pytest
import torch
from families import FAMILIES, KINDS
from tiny import make
from torch.utils._python_dispatch import TorchDispatchMode

from featcal.planning import operations
from featcal.planning.meta_profiler import MetaProfiler, rehearsing, to_meta
from featcal.planning.operations import makes_one_tensor, performed, remembered, worked_out

ATEN = torch.ops.aten


def rehearsed(name):
    """Work and memory of one forward."""
    model, batch = to_meta(make(FAMILIES[name].build)), FAMILIES[name].batches(1)[0]
    with rehearsing(padded=True) as counted:
        model(**{k: v.to("meta") for k, v in batch.items()})
    return counted.flops, counted.peak, counted.live


@pytest.mark.parametrize("family", KINDS)
def test_a_forward_counts_the_same_remembered_as_worked_out_anew(family, monkeypatch):
    remembered.cache_clear()
    first, again = rehearsed(family), rehearsed(family)
    monkeypatch.setattr("featcal.planning.meta_profiler.performed", worked_out)
    assert first == again == rehearsed(family) and first[0] > 0


class Compared(TorchDispatchMode):
    """Holds what is remembered of every operation against what torch makes of it here."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ATEN._local_scalar_dense.default:
            return MetaProfiler(padded=True).answer(args[0])
        out, flops = worked_out(func, args, kwargs or {})
        if makes_one_tensor(func):
            like, counted = performed(func, args, kwargs or {})
            assert (like.shape, like.stride(), like.dtype, like.device) == (
                out.shape,
                out.stride(),
                out.dtype,
                out.device,
            )
            assert counted == flops
            self.seen += 1
        return out


@pytest.mark.parametrize("family", KINDS)
def test_every_operation_of_a_model_puts_out_what_torch_does(family):
    model, batch = to_meta(make(FAMILIES[family].build)), FAMILIES[family].batches(1)[0]
    with torch.no_grad(), Compared() as compared:
        model(**{k: v.to("meta") for k, v in batch.items()})
    assert compared.seen > 10


def test_views_changes_in_place_and_real_tensors_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(operations, "remembered", None)  # would fail if asked
    x = torch.empty(3, 4, device="meta")
    assert (
        performed(ATEN.t.default, (x,), {})[0].untyped_storage()._cdata
        == x.untyped_storage()._cdata
    )
    assert performed(ATEN.add_.Tensor, (x, 1), {})[0] is x
    assert performed(ATEN.add.Tensor, (torch.ones(2), 1), {})[0].tolist() == [2, 2]
