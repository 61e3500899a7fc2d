"""Repositories that the suite `paper` reads from the Hugging Face hub."""

from pathlib import Path

from rehearsal_images import image_data, image_models
from rehearsal_rows import metric, text_data
from rehearsal_texts import LLAMAS, T5_SIZES, text_models

from reproduction.prepare.tasks import TASKS

Repositories = dict[str, Path | dict[str, Path]]
SIZES = ("base-patch32", "large-patch14")
GATED = "meta-llama/"  # behind terms that must be accepted


def paper_hub(
    folder: Path,
    tasks: tuple[str, ...] = tuple(TASKS),
    sizes: tuple[str, ...] = SIZES,
    t5: tuple[str, ...] = tuple(T5_SIZES),
    llamas: tuple[str, ...] = tuple(LLAMAS),
) -> Repositories:
    """Folders by repository, as HubServer takes them; all of the suite unless fewer are named."""
    found = image_models(folder / "vision", sizes, tasks) | image_data(folder / "pictures", tasks)
    found |= text_models(folder / "language", t5, llamas) | text_data(folder / "texts")
    return found | metric(folder / "metric")


def gated(repositories: Repositories) -> list[str]:
    """Those that need an account."""
    return [name for name in repositories if name.startswith(GATED)]
