"""Checkpoints of the Hugging Face hub for the paper's suite: every name pinned to a commit, fetched once, readable offline after.

Pins live in one JSON file that belongs in git: {"models": {id: commit}, "datasets": {id: commit}}.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub

from featcal.data.hub_cache import COMMIT, Kind, cached_commit, reaching
from featcal.errors import BadFile, BadSetting, HubUnreachable
from featcal.storage.results import read_json, write_json

PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # weights, configuration, tokenizer; never a pickle
_CONVERTER = "SFconvertbot"  # the hub's own account that offers safetensors of older pickled repositories as a pull request


def fetch(name: str, pins: str | Path) -> Path:
    """The local folder of a hub model at its pinned commit, downloaded when it is not in the cache.

    Raises: NotOnHub; HubUnreachable with how to provide a local copy; BadFile for a pin that is not a commit.
    """
    return download(name, pinned(pins, name))


def download(name: str, commit: str) -> Path:
    """The local folder of a hub model at one commit. Raises: BadSetting unless 40 hex digits; NotOnHub, HubUnreachable."""
    if not COMMIT.fullmatch(commit):
        raise BadSetting(f"{name}: revision", commit, "must be a commit of 40 hexadecimal digits; a branch can change")
    with reaching(name, commit):
        return Path(huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=PATTERNS))


def pinned(pins: str | Path, name: str, kind: Kind = "model") -> str:
    """The commit of a hub id: the pinned one, or the present one, which is then pinned.

    Raises: NotOnHub; HubUnreachable when it is neither pinned nor cached nor reachable; BadFile for an unreadable pins file.
    """
    known = _read_pins(pins)
    if name not in known[f"{kind}s"]:
        known[f"{kind}s"][name] = _resolved(name, kind)
        write_json(pins, {section: dict(sorted(entries.items())) for section, entries in known.items()})
    commit = known[f"{kind}s"][name]
    if not COMMIT.fullmatch(str(commit)):
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
        with reaching(name, None):
            api = huggingface_hub.HfApi()
            info = api.repo_info(name, repo_type=kind)
            return str(info.sha) if kind == "dataset" or _has_safetensors(info) else _converted(api, name)
    except HubUnreachable:
        cached = cached_commit(name, kind, "main")
        if cached is None:
            raise
        return cached


def _converted(api: huggingface_hub.HfApi, name: str) -> str:
    """The commit of the hub's own safetensors conversion (openai/clip-vit-base-patch32 has its weights only there)."""
    for request in api.get_repo_discussions(name, author=_CONVERTER, discussion_type="pull_request"):
        info = api.repo_info(name, revision=f"refs/pr/{request.num}")
        if _has_safetensors(info):
            return str(info.sha)
    raise BadFile(name, "this repository has no safetensors weights", "pin a commit that has, or give a local folder instead")


def _has_safetensors(info: Any) -> bool:
    return any(sibling.rfilename.endswith(".safetensors") for sibling in info.siblings or [])
