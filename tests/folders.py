"""Model folders of the families under test, and what they compute when loaded whole."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES
from tiny import make

from featcal.models.blocks import model_call
from featcal.models.load import load_model, load_vision, save_model
from featcal.models.streamed import StreamedModel

WAYS = {"transformers": lambda model, folder: model.save_pretrained(folder), "featcal": save_model}


def folder_of(path, family, dtype=torch.float32, way="featcal"):
    WAYS[way](make(FAMILIES[family].build, dtype=dtype), path)
    return path


def whole(folder, family, dtype=torch.float32):
    """The module from_pretrained makes, in its own memory: kernels may add in an order by address."""
    model = (load_vision if family == "clip" else load_model)(folder, dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def batch_for(family, dtype=torch.float32):
    """One batch; of a whole CLIP's folder the vision tower is taken, which wants images alone."""
    batch = FAMILIES[family].batches(3)[0]
    batch = {"pixel_values": batch["pixel_values"]} if family == "clip" else batch
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}


@contextmanager
def loaded_bytes():
    """Count the bytes of parameters that streamed models load or read ahead, now and at most."""
    count, own = SimpleNamespace(now=0, peak=0), vars(StreamedModel).copy()

    def add(size):
        count.now += size
        count.peak = max(count.peak, count.now)

    def swapped(self, names, parameter):
        add(-parameter.nbytes if parameter.is_meta else parameter.nbytes)
        own["_set"](self, names, parameter)

    def prefetch(self, *given):
        own["prefetch"](self, *given)
        add(sum(tensor.nbytes for tensor in self._ahead.result().values()))

    def cancel(self):
        ready = own["cancel"](self)
        add(-sum(tensor.nbytes for tensor in ready.result().values()) if ready else 0)
        return ready

    with pytest.MonkeyPatch.context() as patch:
        for name, counted in (("_set", swapped), ("prefetch", prefetch), ("cancel", cancel)):
            patch.setattr(StreamedModel, name, counted)
        yield count


@torch.no_grad()
def outputs(model, batch):
    results = model(**model_call(model, batch))
    return {name: value for name, value in results.items() if isinstance(value, torch.Tensor)}


def same(one, other):
    one, other = (m.state_dict() if isinstance(m, torch.nn.Module) else m for m in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def present(held: StreamedModel):
    """Names of the parameters that are in memory, of a tied one the first."""
    return {name for name, parameter in held.module.named_parameters() if not parameter.is_meta}


def nothing_left(held: StreamedModel):
    """Whether a streamed model is as if nothing had run."""
    parts = held.module.modules()
    hooked = any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in parts)
    return not present(held) and not hooked and held.cancel() is None
