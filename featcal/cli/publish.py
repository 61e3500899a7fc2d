"""Model folders on the Hugging Face hub, by the hub's own client: asked before a run whether it can
be, done behind it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.cli.terminal import note
from featcal.errors import BadSetting, HubUnreachable, NotOnHub

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from featcal.data.places import Place

PUSH = "Put the written folder on the hub under this name; made there if need be, as private as your account makes new ones."
Push = Annotated[str | None, Option("--push-to-hub", metavar="OWNER/NAME", help=PUSH)]
CARD = (
    "Write the numbers into the model's card (README.md), for people and as the hub's model-index."
)
Card = Annotated[bool, Option("--card", help=CARD)]


def require_hub(name: str | None) -> None:
    """Before any work: a name that the hub takes, the hub in reach, and who is known there. Nothing
    is made there yet.

    Raises: BadSetting, HubUnreachable, NotOnHub.
    """
    if name is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalTokenNotFoundError  # type: ignore[attr-defined]
    from huggingface_hub.utils import validate_repo_id

    from featcal.data.places import first_line

    try:
        validate_repo_id(name)
        HfApi().whoami()
    except HFValidationError:
        raise BadSetting(
            "--push-to-hub", name, "must be owner/name: letters, digits, dots, dashes, underscores"
        ) from None
    except LocalTokenNotFoundError:
        raise NotOnHub(
            name, "nobody is logged in on this machine", "run `hf auth login`, or set HF_TOKEN"
        ) from None
    except (HTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            way_out = "run `hf auth login` with a token that may write, or set HF_TOKEN"
            raise NotOnHub(
                name, "the hub does not know the token of this machine", way_out
            ) from None
        way_out = (
            "run again with network access and without HF_HUB_OFFLINE, or leave --push-to-hub out"
        )
        raise HubUnreachable(
            name, f"the hub cannot be reached ({first_line(error)})", way_out
        ) from None


def push(folder: Path, name: str | None) -> None:
    """The folder on the hub, in one go; nothing where no name is given. Raises: HubUnreachable, the
    folder being whole.
    """
    if name is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from featcal.data.places import first_line

    try:
        url = HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message=f"featcal: {folder.name}"
        )
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        problem = (
            f"{folder} is written and whole, but the hub did not take it ({first_line(error)})"
        )
        raise HubUnreachable(
            name, problem, f"put it there without computing it again: hf upload {name} {folder}"
        ) from None
    note(f"on the hub: {url}")


def result(
    place: "Place", task: str, split: str, kind: str, metric: str, value: float, of: str
) -> "EvalResult":
    """One number of the hub's model-index. kind: of task, as the hub calls it.   of: the metric's
    name for people.
    """
    from huggingface_hub import EvalResult

    where: Mapping[str, Any] = {
        "dataset_type": str(place.source) if place.on_hub else task,
        "dataset_name": task,
    }
    where = {
        **where,
        "dataset_revision": place.revision,
        "dataset_config": place.config,
        "dataset_split": split,
    }
    return EvalResult(
        task_type=kind, metric_type=metric, metric_value=value, metric_name=of, **where
    )
