"""The pinned versions support the oldest Python of the project and agree with the locks."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(*files: str) -> dict[str, str]:
    """Return the versions by name that these files pin."""
    text = "\n".join((ROOT / file).read_text() for file in files)
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M)
    return {canonicalize_name(name): version for name, version in pins}


def test_no_pinned_version_needs_a_newer_python_than_the_project():
    oldest, pins = Version(PROJECT["requires-python"].removeprefix(">=")), pinned("constraints.txt")
    here = [d for d in distributions() if pins.get(canonicalize_name(d.name)) == d.version]
    assert len(here) > 100
    needs = {d.name: d.metadata["Requires-Python"] or "" for d in here}
    newer = {name: python for name, python in needs.items() if oldest not in SpecifierSet(python)}
    assert not newer, f"constraints.txt: not for Python {oldest}: {newer}"


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_a_lock_has_the_pinned_version_of_all_that_the_project_asks_for(build):
    pins = pinned("constraints.txt")
    lock = pinned("requirements/linux.txt", f"requirements/linux-{build}.txt")
    assert not [name for name, version in lock.items() if pins.get(name, version) != version]
    extras = re.search(r"^EXTRAS := (\S+)", (ROOT / "Makefile").read_text(), re.M)[1].split(",")
    lines = sum((PROJECT["optional-dependencies"][e] for e in extras), PROJECT["dependencies"])
    versions = [(one := Requirement(line), lock.get(canonicalize_name(one.name))) for line in lines]
    assert not [str(one) for one, version in versions if (version or "0") not in one.specifier]
