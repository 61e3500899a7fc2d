"""Whether a repository of the hub is here, can be had, or what stands in the way; asks for names
and sizes, downloads nothing.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from featcal.data.places import first_line
from reproduction.doctor.repositories import Repository
from reproduction.prepare.hub import PATTERNS, cached_commit

State = Literal["cached", "reachable", "gated", "missing", "unreachable", "offline"]
AT_ONCE = 8  # repositories asked for beside each other


@dataclass(frozen=True)
class Found:
    """What is known of a repository. bytes: still to download; None where neither the hub nor the
    facts tell.

    reason: why it cannot be had, as the hub or the connection said it.
    """

    repository: Repository
    state: State
    bytes: int | None
    reason: str = ""

    @property
    def usable(self) -> bool:
        return self.state in ("cached", "reachable")


def look(repositories: Iterable[Repository], pins: Mapping[str, Mapping[str, str]]) -> list[Found]:
    """All of them, in order. pins: {"models": {name: commit}, "datasets": ...}, as far as they are
    pinned.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(
            pool.map(
                lambda one: _look(one, pins.get(f"{one.kind}s", {}).get(one.name)), repositories
            )
        )


def _look(one: Repository, commit: str | None) -> Found:
    if _cached(one, commit):
        return Found(one, "cached", 0)
    if constants.HF_HUB_OFFLINE:
        return Found(one, "offline", one.bytes, "it is not in the cache, and HF_HUB_OFFLINE=1")
    try:
        return Found(one, "reachable", _size(one, commit))
    except hub_errors.GatedRepoError:
        return Found(
            one,
            "gated",
            one.bytes,
            f"ask for access at {constants.ENDPOINT}/{one.name}, then `hf auth login`",
        )
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        return Found(one, "missing", one.bytes, type(error).__name__)
    except (OSError, hub_errors.HTTPError) as error:  # type: ignore[attr-defined]
        return Found(one, "unreachable", one.bytes, first_line(error))


def _cached(one: Repository, commit: str | None) -> bool:
    """Whether a snapshot with weights, or with any file of a data set, lies in the cache."""
    known = commit or cached_commit(one.name, one.kind, "main")
    folder = (
        Path(constants.HF_HUB_CACHE) / f"{one.kind}s--{one.name.replace('/', '--')}" / "snapshots"
    )
    # an unpinned model may have been taken from the pull request that converts it
    places = [folder / known] if known else []
    places += [] if commit else sorted(folder.glob("*"))
    wanted = "*.safetensors" if one.kind == "model" else "*"
    return any(
        path.is_file() and path.name != "README.md"
        for place in places
        for path in place.rglob(wanted)
    )


def _size(one: Repository, commit: str | None) -> int | None:
    """Bytes that would be downloaded. The first question is for a file, since a gated repository
    lets its list be read.
    """
    asked = "config.json" if one.kind == "model" else "README.md"
    # an adapter's configuration has another name, and a data set may have no card
    with suppress(hub_errors.EntryNotFoundError):
        huggingface_hub.get_hf_file_metadata(
            huggingface_hub.hf_hub_url(one.name, asked, repo_type=one.kind, revision=commit)
        )
    listed = huggingface_hub.HfApi().list_repo_tree(
        one.name, repo_type=one.kind, revision=commit, recursive=True
    )
    sizes = {file.path: file.size for file in listed if hasattr(file, "size")}
    if one.kind == "dataset":
        return sum(sizes.values())
    if not any(name.endswith(".safetensors") for name in sizes):
        return one.bytes  # its weights lie in a pull request
    return sum(
        size
        for name, size in sizes.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)
    )
