"""The pinned versions run on the oldest Python that the project names, its first release included,
and are those of the locks.
"""

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
    newer = {
        d.name: needs
        for d in pinned
        if oldest not in SpecifierSet(needs := d.metadata["Requires-Python"] or "")
    }
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
    assert {
        name: version for name, version in lock.items() if pins.get(name, version) != version
    } == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"^EXTRAS := (\S+)", (ROOT / "Makefile").read_text(), re.M)[1].split(",")
    asked = [
        Requirement(one)
        for one in sum(
            (project["optional-dependencies"][extra] for extra in extras), project["dependencies"]
        )
    ]
    assert not [
        str(one) for one in asked if lock.get(canonicalize_name(one.name), "0") not in one.specifier
    ]
