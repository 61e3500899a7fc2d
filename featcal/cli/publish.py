"""Push model folders to the Hugging Face hub: checked before a run, done after it."""

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from featcal.cli.terminal import note
from featcal.errors import BadSetting, HubUnreachable, NotOnHub

if TYPE_CHECKING:
    from pathlib import Path

    from huggingface_hub import EvalResult

    from featcal.data.places import Location

PUSH = "Upload the written folder to the hub under this name; the repository is created if needed."
Push = Annotated[str | None, Option("--push-to-hub", metavar="OWNER/NAME", help=PUSH)]
CARD = "Write the results into the model card (README.md), as text and as the hub's model-index."
Card = Annotated[bool, Option("--card", help=CARD)]


def require_hub(name: str | None) -> None:
    """Check before any work that the hub can be reached, takes the name and knows the user.

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
        expected = "must be owner/name: letters, digits, dots, dashes, underscores"
        raise BadSetting("--push-to-hub", name, expected) from None
    except LocalTokenNotFoundError:
        way_out = "run `hf auth login`, or set HF_TOKEN"
        raise NotOnHub(name, "nobody is logged in on this machine", way_out) from None
    except (HTTPError, OSError) as error:
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            problem = "the hub does not know the token of this machine"
            way_out = "run `hf auth login` with a token that may write, or set HF_TOKEN"
            raise NotOnHub(name, problem, way_out) from None
        way_out = "run again with network access and without HF_HUB_OFFLINE, or without the push"
        problem = f"the hub cannot be reached ({first_line(error)})"
        raise HubUnreachable(name, problem, way_out) from None


def push(folder: "Path", name: str | None) -> None:
    """Upload the folder if a name is given. Raises: HubUnreachable; the folder is complete then."""
    if name is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from featcal.data.places import first_line

    try:
        url = HfApi().create_repo(name, exist_ok=True)
        message = f"featcal: {folder.name}"
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        problem = f"{folder} is complete, but the hub did not take it ({first_line(error)})"
        way_out = f"upload it without computing it again: hf upload {name} {folder}"
        raise HubUnreachable(name, problem, way_out) from None
    note(f"on the hub: {url}")


def model_index_entry(dataset: "Location", task: str, split: str, **measure: Any) -> "EvalResult":
    """Return one result for the hub's model-index.

    measure: task_type, metric_type, metric_name, metric_value, as the hub names them.
    """
    from huggingface_hub import EvalResult

    return EvalResult(
        dataset_type=str(dataset.source) if dataset.on_hub else task,
        dataset_name=task,
        dataset_revision=dataset.revision,
        dataset_config=dataset.config,
        dataset_split=split,
        **measure,
    )
