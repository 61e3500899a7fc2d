"""What must hold before the first block: the same tensors everywhere, only numbers in them, a batch list for every expert."""

from collections.abc import Mapping

from featcal.models.residency import Held, require_alike


def check_models(models: Mapping[str, Held]) -> None:
    """Raise unless all models (by the name errors use, the reference first) share names and shapes and hold only numbers."""
    require_alike(models)
    for name, model in models.items():
        model.check_finite(name)
