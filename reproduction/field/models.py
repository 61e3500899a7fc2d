"""A merged model, its base and its experts, read tensor by tensor by SVC and ProDistill."""

from collections.abc import Mapping
from dataclasses import dataclass

from featcal.merging.merge import Form
from featcal.merging.sources import Tensors, require_alike, source
from featcal.models.batch import Model


@dataclass(frozen=True)
class Models:
    """The models' tensors.   form: what a result is like."""

    merged: Tensors
    base: Tensors
    experts: dict[str, Tensors]  # by task, sorted
    form: Form

    @classmethod
    def opened(cls, merged: Model, base: Model, experts: Mapping[str, Model]) -> "Models":
        """Open modules or checkpoint folders. Raises: MissingTensor, TensorsDiffer."""
        form, ours = Form.of(base, experts), source(merged, "merged").tensors
        theirs = {t: source(experts[t], f"expert {t!r}").tensors for t in sorted(experts)}
        require_alike(form.source.tensors, {**theirs, "merged": ours})
        return cls(ours, form.source.tensors, theirs, form)
