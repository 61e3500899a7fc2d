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


def test_no_pinned_version_needs_a_newer_python_than_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = Version(project["requires-python"].removeprefix(">="))
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonicalize_name(name): version for name, version in (line.split("==") for line in lines)
    }
    pinned = [d for d in distributions() if pins.get(canonicalize_name(d.name)) == d.version]
    assert len(pinned) > 100
    needs = {d.name: d.metadata["Requires-Python"] or "" for d in pinned}
    newer = {name: python for name, python in needs.items() if oldest not in SpecifierSet(python)}
    assert not newer, f"constraints.txt: not for Python {oldest}: {newer}"


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_a_lock_has_the_pinned_version_of_all_that_the_project_asks_for(build):
    lines = [
        (ROOT / "requirements" / f"{name}.txt").read_text() for name in ("linux", f"linux-{build}")
    ]
    lock = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", "\n".join(lines), re.M)
    }
    pins = re.findall(r"^(.+)==(.+)", (ROOT / "constraints.txt").read_text(), re.M)
    pins = {canonicalize_name(name): version for name, version in pins}
    assert not [name for name, version in lock.items() if pins.get(name, version) != version]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"^EXTRAS := (\S+)", (ROOT / "Makefile").read_text(), re.M)[1].split(",")
    lines = sum((project["optional-dependencies"][e] for e in extras), project["dependencies"])
    versions = [(one := Requirement(line), lock.get(canonicalize_name(one.name))) for line in lines]
    assert not [str(one) for one, version in versions if (version or "0") not in one.specifier]
