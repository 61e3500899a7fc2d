"""mergekit's recipe as a merge of ours: only those whose result is the same, the others are
mergekit's to do.
"""

from typing import Any

from featcal.cli.recipe import Named
from featcal.errors import BadFile
from featcal.interchange.mergekit import Recipe

THEIRS = "merge with mergekit-yaml itself, then `featcal calibrate --recipe` reads the same recipe"
TOKENIZER = ("tokenizer_source", "tokenizer", "chat_template")


def method_of(named: Named) -> tuple[str, dict[str, Any]]:
    """Method and settings of a recipe: `linear` with one weight is an average, `task_arithmetic`
    with one weight is ours.

    Raises: BadFile for any other recipe, naming what stands in the way.
    """
    recipe = named.recipe
    assert recipe is not None
    for name, model in named.under.items():
        if model != named.base:
            raise BadFile(
                recipe.file, f"{name} is a LoRA on top of {model}, which is not the base", THEIRS
            )
    for key in TOKENIZER:
        if recipe.asked.get(key) not in (None, "base"):
            raise BadFile(
                recipe.file,
                f"its {key} is not that of the base, which is all that featcal merge writes",
                THEIRS,
            )
    require_dtype(recipe, named)
    if (
        recipe.method == "linear"
        and not recipe.base_listed
        and recipe.parameters.get("normalize", True) is True
    ):
        weight(recipe)
        return "average", {}
    if recipe.method == "task_arithmetic":
        scale = weight(recipe) * number(recipe, "lambda", recipe.parameters.get("lambda", 1.0))
        if recipe.parameters.get("normalize", False) is True:  # by the sum of the weights
            scale /= weight(recipe) * len(recipe.experts)
        return "task_arithmetic", {"scale": scale}
    raise BadFile(
        recipe.file,
        f"featcal merge has no method that gives the same as its merge_method {recipe.method}",
        THEIRS,
    )


def weight(recipe: Recipe) -> float:
    """The one weight of all experts. Raises: BadFile for none, for several, and for gradients and
    filters.
    """
    weights = {
        number(recipe, "weight", own.get("weight", recipe.parameters.get("weight")))
        for own in recipe.settings
    }
    if len(weights) > 1:
        raise BadFile(recipe.file, "its experts have different weights", THEIRS)
    return weights.pop()


def number(recipe: Recipe, key: str, value: Any) -> float:
    """A plain number. Raises: BadFile."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadFile(recipe.file, f"its {key} is {value!r}, not one number", THEIRS)
    return float(value)


def require_dtype(recipe: Recipe, named: Named) -> None:
    """The result is stored as the base is. Raises: BadFile where the recipe asks for another
    type.
    """
    from featcal.storage.checkpoint import LazyCheckpoint

    base = LazyCheckpoint(named.base)
    stored = {
        str(base.dtype(name)).removeprefix("torch.")
        for name in base.names
        if base.dtype(name).is_floating_point
    }
    for key in ("dtype", "out_dtype"):
        wanted = recipe.asked.get(key)
        if wanted is not None and stored != {str(wanted).removeprefix("torch.")}:
            raise BadFile(
                recipe.file,
                f"asks for {key} {wanted}, but the base is stored as {', '.join(sorted(stored))}",
                THEIRS,
            )
