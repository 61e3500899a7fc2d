"""Checkpoints of the Hugging Face hub for the paper's suite: every name pinned to a commit, fetched once, readable offline after.

Pins live in one JSON file that belongs in git: {"models": {id: commit}, "datasets": {id: commit}}.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from featcal.errors import BadFile, BadSetting, HubUnreachable
from featcal.storage.results import read_json, write_json

PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # weights, configuration, tokenizer; never a pickle
Kind = Literal["model", "dataset"]
_COMMIT = re.compile(r"[0-9a-f]{40}")
# no connection, offline mode, no such repository, not in the cache
_FAILURES = (OSError, hub_errors.HTTPError)  # type: ignore[attr-defined]
_CONVERTER = "SFconvertbot"  # the hub's own account that offers safetensors of older pickled repositories as a pull request


def fetch(name: str, pins: str | Path) -> Path:
    """The local folder of a hub model at its pinned commit, downloaded when it is not in the cache.

    Raises: HubUnreachable with how to provide a local copy; BadFile for a pin that is not a commit.
    """
    return download(name, pinned(pins, name))


def download(name: str, commit: str) -> Path:
    """The local folder of a hub model at one commit. Raises: BadSetting unless 40 hex digits; HubUnreachable."""
    if not _COMMIT.fullmatch(commit):
        raise BadSetting(f"{name}: revision", commit, "must be a commit of 40 hexadecimal digits; a branch can change")
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=PATTERNS))
    except _FAILURES as error:
        raise HubUnreachable(name, commit, _first_line(error)) from None


def pinned(pins: str | Path, name: str, kind: Kind = "model") -> str:
    """The commit of a hub id: the pinned one, or the present one, which is then pinned.

    Raises: HubUnreachable when it is neither pinned nor cached nor reachable; BadFile for a pins file that cannot be read.
    """
    known = _read_pins(pins)
    if name not in known[f"{kind}s"]:
        known[f"{kind}s"][name] = _resolved(name, kind)
        write_json(pins, {section: dict(sorted(entries.items())) for section, entries in known.items()})
    commit = known[f"{kind}s"][name]
    if not _COMMIT.fullmatch(str(commit)):
        raise BadFile(pins, f"{name} is pinned to {commit!r}, not to a commit of 40 hexadecimal digits", "remove that line")
    return commit


def resolve_pins(pins: str | Path, models: Iterable[str], datasets: Iterable[str] = ()) -> dict[str, str]:
    """The commits of many ids, new ones added to the pins file. Raises: as pinned."""
    commits = {name: pinned(pins, name) for name in models}
    return commits | {name: pinned(pins, name, "dataset") for name in datasets}


def _read_pins(pins: str | Path) -> dict[str, dict[str, str]]:
    content = read_json(pins) if Path(pins).is_file() else {}
    sections = {section: content.get(section, {}) for section in ("models", "datasets")} if isinstance(content, dict) else {}
    if not sections or not all(isinstance(entries, dict) for entries in sections.values()):
        raise BadFile(pins, "not a pins file", 'it holds {"models": {id: commit}, "datasets": {id: commit}}')
    return sections


def _resolved(name: str, kind: Kind) -> str:
    """The commit a name stands for now: asked of the hub, else what the local cache last saw as main."""
    try:
        api = huggingface_hub.HfApi()
        info = api.repo_info(name, repo_type=kind)
        return str(info.sha) if kind == "dataset" or _has_safetensors(info) else _converted(api, name)
    except _FAILURES as error:
        cached = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "refs" / "main"
        if cached.is_file():
            return cached.read_text().strip()
        raise HubUnreachable(name, None, _first_line(error)) from None


def _converted(api: huggingface_hub.HfApi, name: str) -> str:
    """The commit of the hub's own safetensors conversion (openai/clip-vit-base-patch32 has its weights only there)."""
    for request in api.get_repo_discussions(name, author=_CONVERTER, discussion_type="pull_request"):
        info = api.repo_info(name, revision=f"refs/pr/{request.num}")
        if _has_safetensors(info):
            return str(info.sha)
    raise BadFile(name, "this repository has no safetensors weights", "pin a commit that has, or give a local folder instead")


def _has_safetensors(info: Any) -> bool:
    return any(sibling.rfilename.endswith(".safetensors") for sibling in info.siblings or [])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
