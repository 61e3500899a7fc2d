"""Checkpoints of the Hugging Face hub for the paper's suite: every name pinned to a commit, fetched
once, readable offline after.

Pins live in one JSON file that belongs in git: {"models": {id: commit}, "datasets": {id: commit},
"files": {id@commit: {file: check-sum}}}. Whoever uses a name first writes its entries; from then on
they are held against what there is.
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

PATTERNS = [
    "*.safetensors",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
]  # weights, configuration, tokenizer; never a pickle
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
    """The local folder of a hub model at its pinned commit, downloaded when it is not in the cache.

    Its files are those of the first use: sha256 of weights, configuration and tokenizer.
    Raises: NotOnHub, for a gated repository with the page of its terms; HubUnreachable with how to
    provide a local copy;
            BadFile for a pin that is not a commit, a commit that the hub does not have, or a file
            that is not the pinned one.
    """
    commit = pinned(pins, name)
    try:
        folder = download(name, commit)
    except NoRevision:
        raise _wrong_pin(pins, name, commit) from None
    _hold(pins, name, commit, _sums(pins, name, folder))
    return folder


def model_folder(root: Path, model: str, pins: Path) -> Path:
    """The local folder of a model given as a folder below the project or as a hub id. Raises: as
    fetch.
    """
    return root / model if (root / model).is_dir() else fetch(model, pins)


def pinned_data(pins: str | Path, name: str) -> str:
    """The commit of a hub data set, whose files the hub still lists with the check-sums of the
    first use.

    Without a connection the commit alone is pinned: what is cached is found by it (data/hub.py).
    Raises: as fetch.
    """
    commit = pinned(pins, name, "dataset")
    try:
        with reaching(name, commit, kind="dataset"):
            listed = huggingface_hub.HfApi().list_repo_tree(
                name, recursive=True, revision=commit, repo_type="dataset"
            )
            told = {
                entry.path: entry for entry in listed if isinstance(entry, huggingface_hub.RepoFile)
            }
    except NoRevision:
        raise _wrong_pin(pins, name, commit) from None
    except HubUnreachable:
        return commit
    _hold(
        pins,
        name,
        commit,
        {path: entry.lfs.sha256 if entry.lfs else entry.blob_id for path, entry in told.items()},
    )
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
    """The local folder of a hub model at one commit. Raises: BadSetting unless 40 hex digits;
    NotOnHub, HubUnreachable.
    """
    if not COMMIT.fullmatch(commit):
        raise BadSetting(
            f"{name}: revision",
            commit,
            "must be a commit of 40 hexadecimal digits; a branch can change",
        )
    with reaching(name, commit):
        return Path(
            huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=PATTERNS)
        )


def pinned(pins: str | Path, name: str, kind: Kind = "model") -> str:
    """The commit of a hub id: the pinned one, or the present one, which is then pinned.

    Raises: NotOnHub; HubUnreachable when it is neither pinned nor cached nor reachable; BadFile for
    an unreadable pins file.
    """
    known = _read_pins(pins)
    if name not in known[f"{kind}s"]:
        known[f"{kind}s"][name] = _resolved(name, kind)
        _write(pins, known)
    commit = known[f"{kind}s"][name]
    if not COMMIT.fullmatch(str(commit)):
        raise BadFile(
            pins,
            f"{name} is pinned to {commit!r}, not to a commit of 40 hexadecimal digits",
            "remove that line",
        )
    return commit


def _hold(pins: str | Path, name: str, commit: str, found: Mapping[str, str]) -> None:
    """Check-sums of files of one commit against those of their first use; new ones are added.
    Raises: BadFile.
    """
    known = _read_pins(pins)
    held = known["files"].setdefault(f"{name}@{commit}", {})
    for file, expected in held.items():
        if found.get(file) != expected:
            raise _changed_file(
                pins, name, file, found.get(file, "none: it is not there"), str(expected)
            )
    if found.keys() - held.keys():
        held |= dict(sorted(found.items()))
        _write(pins, known)


def _sums(pins: str | Path, name: str, folder: Path) -> dict[str, str]:
    """The sha256 of every file that was asked for. Raises: BadFile for one that is not what the
    cache calls it.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        file = path.relative_to(folder).as_posix()
        if path.is_file() and any(fnmatch(file, pattern) for pattern in PATTERNS):
            with path.open("rb") as content:
                found[file] = file_digest(content, "sha256").hexdigest()
            named = (
                path.resolve().name
            )  # a large file is kept in the cache under the check-sum that the hub told
            if _SHA256.fullmatch(named) and named != found[file]:
                raise _changed_file(pins, name, file, found[file], named)
    return found


def _read_pins(pins: str | Path) -> dict[str, dict[str, Any]]:
    content = read_json(pins) if Path(pins).is_file() else {}
    names = ("models", "datasets", "files")
    sections = (
        {section: content.get(section, {}) for section in names}
        if isinstance(content, dict)
        else {}
    )
    sums = sections.get("files")
    entered = [*sections.values(), *(sums.values() if isinstance(sums, dict) else ())]
    if not sections or not all(isinstance(entries, dict) for entries in entered):
        raise BadFile(
            pins, "not a pins file", 'it holds {"models": {id: commit}, "datasets": {id: commit}}'
        )
    return sections


def _write(pins: str | Path, known: Mapping[str, Mapping[str, Any]]) -> None:
    write_json(pins, {section: dict(sorted(entries.items())) for section, entries in known.items()})


def _resolved(name: str, kind: Kind) -> str:
    """The commit a name stands for now: asked of the hub, else what the local cache last saw as
    main.
    """
    try:
        with reaching(name, None, kind=kind):
            api = huggingface_hub.HfApi()
            info = api.repo_info(name, repo_type=kind)
            return (
                str(info.sha)
                if kind == "dataset" or _has_safetensors(info)
                else _converted(api, name)
            )
    except HubUnreachable:
        cached = cached_commit(name, kind, "main")
        if cached is None:
            raise
        return cached


def _converted(api: huggingface_hub.HfApi, name: str) -> str:
    """The commit of the hub's own safetensors conversion (openai/clip-vit-base-patch32 has its
    weights only there).
    """
    for request in api.get_repo_discussions(
        name, author=_CONVERTER, discussion_type="pull_request"
    ):
        info = api.repo_info(name, revision=f"refs/pr/{request.num}")
        if _has_safetensors(info):
            return str(info.sha)
    raise BadFile(
        name,
        "this repository has no safetensors weights",
        "pin a commit that has, or give a local folder instead",
    )


def _has_safetensors(info: Any) -> bool:
    return any(sibling.rfilename.endswith(".safetensors") for sibling in info.siblings or [])
