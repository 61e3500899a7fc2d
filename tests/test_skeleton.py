"""Makefile, versions, locks, citation and links agree with the package."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
VERSIONS = {  # where the version is written, for whom
    "featcal/__init__.py": r'__version__ = "(.+)"',
    "pyproject.toml": r'^version = "(.+)"',
    "reproduction/pyproject.toml": r'^version = "(.+)"',
    "CITATION.cff": r"^version: (.+)",
    ".zenodo.json": r'"version": "(.+)"',
    "CHANGELOG.md": r"^## ([\d.]+), ",
}


def text(name: str) -> str:
    return (ROOT / name).read_text()


def tracked() -> list[Path]:
    """Return the files in git; in an unpacked archive, all that are not computed or installed."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    listed = [ROOT / line for line in done.stdout.splitlines()]
    computed = {".venv", "outputs", "_build", ".featcal", "cache", "tmp", "__pycache__", ".git"}
    computed |= {"featcal.egg-info", "featcal_reproduction.egg-info"}
    found = (p for p in ROOT.rglob("*") if not computed & set(p.relative_to(ROOT).parts))
    return [path for path in listed or found if path.is_file()]


def test_every_target_of_the_makefile_installs_first_what_it_needs():
    for target in re.search(r"^\.PHONY: (.+)", text("Makefile"), re.M)[1].split():
        command = ["make", "--dry-run", target, "VENV=not-there"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode == 0, done.stderr
        assert ("pip install" in done.stdout) == (target not in ("help", "clean")), target


def test_a_version_is_the_same_wherever_it_is_written_and_the_changelog_begins_with_it():
    found = {name: re.search(pattern, text(name), re.M)[1] for name, pattern in VERSIONS.items()}
    assert len(set(found.values())) == 1, found


def pinned(*files: str) -> dict[str, str]:
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", "\n".join(map(text, files)), re.M)
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_a_lock_has_the_pinned_version_of_all_that_the_project_asks_for(build):
    project, pins = tomllib.loads(text("pyproject.toml"))["project"], pinned("constraints.txt")
    lock = pinned("requirements/linux.txt", f"requirements/linux-{build}.txt")
    assert not [name for name, version in lock.items() if pins.get(name, version) != version]
    extras = re.search(r"^EXTRAS := (\S+)", text("Makefile"), re.M)[1].split(",")
    lines = sum((project["optional-dependencies"][e] for e in extras), project["dependencies"])
    versions = [(one := Requirement(line), lock.get(canonicalize_name(one.name))) for line in lines]
    assert not [str(one) for one, version in versions if (version or "0") not in one.specifier]


def test_zenodo_and_the_citation_agree():
    zenodo, cited = json.loads(text(".zenodo.json")), yaml.safe_load(text("CITATION.cff"))
    assert zenodo["description"] == cited["abstract"]
    assert all(zenodo[key] == cited[key] for key in ("title", "keywords", "license"))
    assert [one["name"] for one in zenodo["creators"]] == [one["name"] for one in cited["authors"]]


def test_every_file_that_the_readme_links_is_there():
    for link in re.findall(r"\]\(([^)#]+)\)", text("README.md")):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_tracked_files_name_neither_this_machine_nor_a_registry():
    folders = (ROOT, ROOT.parent, Path.home())
    here = [re.escape(str(path)) for path in folders if len(path.parts) > 1]
    local = rf"(?<![\w.}}/-])({'|'.join(here)}|/home/\w+)/|file:///|find-links|index-url"
    names_local = re.compile(local).search
    binary = {".safetensors", ".png", ".parquet", ".js"}
    found = []
    for path in tracked():
        if path.suffix not in binary and path != Path(__file__):
            lines = enumerate(path.read_text(errors="replace").splitlines(), start=1)
            found += [f"{path.relative_to(ROOT)}:{n}" for n, line in lines if names_local(line)]
    assert not found
