"""Fetch checkpoints and data sets of the hub once, each pinned to a commit and its check-sums.

Pins are in one JSON file that belongs in git: {"models": {id: commit}, "datasets": {id: commit},
"files": {id@commit: {file: check-sum}}}. The first use of a name writes its entries, later ones
compare with them.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from hashlib import file_digest
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from featcal.data.places import Kind, reaching
from featcal.errors import BadFile, BadSetting, HubUnreachable, NoRevision
from featcal.files import read_json, write_json

# weights, configuration, tokenizer; never a pickle
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# the hub's own account that offers safetensors of older pickled repositories as a pull request
_CONVERTER = "SFconvertbot"


def cached_commit(name: str, kind: Kind, revision: str) -> str | None:
    """Return the commit of a branch or tag when the hub was last asked; None if it never was."""
    if COMMIT.fullmatch(revision):
        return revision
    ref = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "refs" / revision
    return ref.read_text("utf-8").strip() if ref.is_file() else None


def fetch(name: str, pins: str | Path) -> Path:
    """Return the local folder of a hub model at its pinned commit, downloaded if not cached.

    Raises: NotOnHub, for a gated repository with the page of its terms; HubUnreachable; BadFile for
    a pin that is no commit of the hub, or a file with another check-sum.
    """
    commit = pinned(pins, name)
    try:
        folder = download(name, commit)
    except NoRevision:
        raise _wrong_pin(pins, name, commit) from None
    _compare(pins, name, commit, _sums(pins, name, folder))
    return folder


def pinned_data(pins: str | Path, name: str) -> str:
    """Return the commit of a hub data set, after comparing the check-sums that the hub lists.

    Without a connection only the commit is pinned, by which the cache is found. Raises: as fetch.
    """
    commit = pinned(pins, name, "dataset")
    try:
        with reaching(name, commit, kind="dataset"):
            listed = huggingface_hub.HfApi().list_repo_tree(
                name, recursive=True, revision=commit, repo_type="dataset"
            )
            files = [entry for entry in listed if isinstance(entry, huggingface_hub.RepoFile)]
    except NoRevision:
        raise _wrong_pin(pins, name, commit) from None
    except HubUnreachable:
        return commit
    sums = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}
    _compare(pins, name, commit, sums)
    return commit


def _wrong_pin(pins: str | Path, name: str, commit: str) -> BadFile:
    return BadFile(
        pins,
        f"{name} is pinned to {commit}, a commit that the hub does not have",
        "if it was edited, put back what git holds of this file; or",
        "if the repository's history was rewritten, remove this line: the present commit is then pinned",
    )


def _changed_file(pins: str | Path, name: str, file: str, found: str, expected: str) -> BadFile:
    return BadFile(
        name,
        f"{file} is not the file that was pinned: check-sum {found[:16]}…, in {pins} {expected[:16]}…",
        "if it was damaged here, remove the repository from the cache (hf cache rm) and run again; or",
        f"if the hub's own copy has changed, ask its owner; to take it as it is, remove the entry of {name} from `files`",
    )


def download(name: str, commit: str) -> Path:
    """Return the local folder of a hub model at one commit of 40 hexadecimal digits.

    Raises: BadSetting; NotOnHub, HubUnreachable.
    """
    if not COMMIT.fullmatch(commit):
        expected = "must be a commit of 40 hexadecimal digits; a branch can change"
        raise BadSetting(f"{name}: revision", commit, expected)
    with reaching(name, commit):
        how = {"revision": commit, "allow_patterns": PATTERNS}
        return Path(huggingface_hub.snapshot_download(name, **how))


def pinned(pins: str | Path, name: str, kind: Kind = "model") -> str:
    """Return the pinned commit of a hub id, or pin the present one.

    Raises: NotOnHub; HubUnreachable if it is neither pinned nor cached nor reachable; BadFile for
    an unreadable pins file.
    """
    known = _read_pins(pins)
    if name not in known[f"{kind}s"]:
        known[f"{kind}s"][name] = _resolved(name, kind)
        _write(pins, known)
    commit = known[f"{kind}s"][name]
    if not COMMIT.fullmatch(str(commit)):
        problem = f"{name} is pinned to {commit!r}, not to a commit of 40 hexadecimal digits"
        raise BadFile(pins, problem, "remove that line")
    return commit


def _compare(pins: str | Path, name: str, commit: str, found: Mapping[str, str]) -> None:
    """Compare the check-sums of a commit's files with those of their first use, and add new ones.
    Raises: BadFile.
    """
    known = _read_pins(pins)
    pinned = known["files"].setdefault(f"{name}@{commit}", {})
    for file, expected in pinned.items():
        if found.get(file) != expected:
            there = found.get(file, "none: it is not there")
            raise _changed_file(pins, name, file, there, str(expected))
    if found.keys() - pinned.keys():
        pinned |= dict(sorted(found.items()))
        _write(pins, known)


def _sums(pins: str | Path, name: str, folder: Path) -> dict[str, str]:
    """Return the sha256 of every fetched file. Raises: BadFile for one that the cache names
    otherwise.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        file = path.relative_to(folder).as_posix()
        if path.is_file() and any(fnmatch(file, pattern) for pattern in PATTERNS):
            with path.open("rb") as content:
                found[file] = file_digest(content, "sha256").hexdigest()
            named = path.resolve().name  # the cache names a large file by the hub's check-sum
            if _SHA256.fullmatch(named) and named != found[file]:
                raise _changed_file(pins, name, file, found[file], named)
    return found


def _read_pins(pins: str | Path) -> dict[str, dict[str, Any]]:
    content = read_json(pins) if Path(pins).is_file() else {}
    sections: dict[str, dict[str, Any]] = {}
    if isinstance(content, dict):
        sections = {
            section: content.get(section, {}) for section in ("models", "datasets", "files")
        }
    sums = sections.get("files")
    entered = [*sections.values(), *(sums.values() if isinstance(sums, dict) else ())]
    if not sections or not all(isinstance(entries, dict) for entries in entered):
        holds = 'it holds {"models": {id: commit}, "datasets": {id: commit}}'
        raise BadFile(pins, "not a pins file", holds)
    return sections


def _write(pins: str | Path, known: Mapping[str, Mapping[str, Any]]) -> None:
    write_json(pins, {section: dict(sorted(entries.items())) for section, entries in known.items()})


def _resolved(name: str, kind: Kind) -> str:
    """Return a name's present commit: the hub's, else what the local cache last saw as main."""
    try:
        with reaching(name, None, kind=kind):
            api = huggingface_hub.HfApi()
            info = api.repo_info(name, repo_type=kind)
            ready = kind == "dataset" or _has_safetensors(info)
            return str(info.sha) if ready else _converted(api, name)
    except HubUnreachable:
        cached = cached_commit(name, kind, "main")
        if cached is None:
            raise
        return cached


def _converted(api: huggingface_hub.HfApi, name: str) -> str:
    """Return the commit of the hub's own safetensors conversion, where openai/clip-vit-base-patch32
    has its weights.
    """
    how = {"author": _CONVERTER, "discussion_type": "pull_request"}
    for request in api.get_repo_discussions(name, **how):
        info = api.repo_info(name, revision=f"refs/pr/{request.num}")
        if _has_safetensors(info):
            return str(info.sha)
    way_out = "pin a commit that has, or give a local folder instead"
    raise BadFile(name, "this repository has no safetensors weights", way_out)


def _has_safetensors(info: Any) -> bool:
    return any(sibling.rfilename.endswith(".safetensors") for sibling in info.siblings or [])
