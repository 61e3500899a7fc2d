"""The pinned versions run on the oldest Python that the project names, its first release included."""

import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def test_no_pinned_version_needs_a_newer_python_than_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = Version(project["requires-python"].removeprefix(">="))
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    pinned = [d for d in distributions() if pins.get(canonicalize_name(d.name)) == d.version]
    assert len(pinned) > 100
    newer = {d.name: needs for d in pinned if oldest not in SpecifierSet(needs := d.metadata["Requires-Python"] or "")}
    assert not newer, f"constraints.txt: not for Python {oldest}: {newer}"
