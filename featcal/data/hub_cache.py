"""The local cache of the Hugging Face hub, and what the hub's client raises, as errors that name a
way out.

Knows commits and failures; what is downloaded, and what for, is told elsewhere.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from featcal.errors import DiskFull, HubUnreachable, NoRevision, NotOnHub

Kind = Literal["model", "dataset"]
COMMIT = re.compile(r"[0-9a-f]{40}")
_HTTP: type[Exception] = hub_errors.HTTPError  # type: ignore[attr-defined]  # a broken connection among others
_XET: type[Exception] = getattr(
    hub_errors, "XetDownloadError", OSError
)  # older clients have none of their own


@contextmanager
def reaching(
    name: str, revision: str | None, more: str = "", kind: Kind = "model"
) -> Iterator[None]:
    """Downloads inside. `more` is added to the reason. Raises: NotOnHub, NoRevision,
    HubUnreachable, DiskFull.
    """
    place = f"{name}@{revision}" if revision else name
    try:
        yield
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        said = f"{type(error).__name__}{more}"
        if isinstance(error, hub_errors.GatedRepoError):
            page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
            raise NotOnHub(
                place,
                f"the hub gives this repository only to those who have accepted its terms ({said})",
                f"open {page}, log in, accept the terms and wait until access is granted,",
                "then run `hf auth login` on this machine, with a token that may read gated repositories (or set HF_TOKEN), or",
                "leave its role out: write `null` for it in the suite file",
            ) from None
        missing = NoRevision if isinstance(error, hub_errors.RevisionNotFoundError) else NotOnHub
        raise missing(
            place,
            f"the hub has no such repository or revision, or does not give it to you ({said})",
            "check owner, name and revision on its page at https://huggingface.co, and",
            "where it is private or has terms to accept, accept them there and run `hf auth login`",
        ) from None
    except (OSError, _HTTP, _XET) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise DiskFull(constants.HF_HUB_CACHE) from None
        raise unreachable(place, first_line(error) + more) from None


def unreachable(place: str, reason: str) -> HubUnreachable:
    """The error of a repository (`name@revision`) that neither the cache nor the hub gives."""
    return HubUnreachable(
        place,
        f"not in the local Hugging Face cache, and downloading it failed ({reason})",
        "run again with network access (what was downloaded before is kept), or",
        "copy a filled cache here and set HF_HOME to it (HF_HUB_OFFLINE=1 then forbids any connection)",
    )


def cached_commit(name: str, kind: Kind, revision: str) -> str | None:
    """The commit that a branch or tag was when the hub was last asked; a commit itself; None for
    what was never asked for.
    """
    if COMMIT.fullmatch(revision):
        return revision
    noted = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "refs" / revision
    return noted.read_text("utf-8").strip() if noted.is_file() else None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
