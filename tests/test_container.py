"""The steps of the Containerfile without a container engine: what it runs behind apt-get, in a copy
of the checkout.

The packages of this environment are lent to the new one, so that pip installs what of the lock is
not among them: nothing, where this environment is the lock's. That every file has the hash of the
lock is asked by pip, whenever `make locked` installs.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUT_OF_REACH = (
    "No matching distribution found",
    "Could not find a version",
    "Connection",
    "failure in name resolution",
)


def instructions(file):
    """Pairs of an instruction and its text, continued lines joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", file.read_text())).splitlines()
    return [line.split(maxsplit=1) for line in lines if line]


def values(told, kind):
    """What its ENV or ARG instructions set."""
    return dict(pair.split("=", 1) for word, text in told if word == kind for pair in text.split())


@pytest.mark.skipif(
    (sys.platform, *sys.version_info[:2]) != ("linux", 3, 11),
    reason="locks are of Linux and Python 3.11",
)
def test_the_containers_steps_install_an_environment_that_starts(tmp_path):
    told = instructions(ROOT / "Containerfile")
    work, home, venv = tmp_path / "featcal", tmp_path / "home", tmp_path / "venv"
    ours = shutil.ignore_patterns(
        ".git", ".venv*", ".dvc", ".featcal", "outputs", "_build", "__pycache__", "*.egg-info"
    )
    shutil.copytree(ROOT, work, ignore=ours)
    home.mkdir()
    kept = [
        name
        for name in os.environ
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
    ]
    env = {name: os.environ[name] for name in kept}
    env |= values(told, "ARG") | values(told, "ENV") | {"HOME": str(home)}
    env |= {"VENV": str(venv), "PYTHON": sys.executable, "PATH": f"{venv}/bin:{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (lent,) = venv.glob("lib/python*/site-packages")
    (lent / "lent.pth").write_text(sysconfig.get_path("purelib"))
    steps = [text for word, text in told if word == "RUN" and "apt-get" not in text]
    assert steps
    for step in steps:
        own = step.replace(
            "PIP_EXTRA_INDEX_URL=$TORCH_INDEX ", ""
        )  # first as this machine's pip is set up
        for one in (own, step):
            run = subprocess.run(
                ["sh", "-c", one], cwd=work, env=env, capture_output=True, text=True
            )
            out_of_reach = run.returncode and any(reason in run.stderr for reason in OUT_OF_REACH)
            if not out_of_reach:
                break
        if out_of_reach:
            pytest.skip(f"no package index: {run.stderr.strip()[-300:]}")
        assert run.returncode == 0, run.stdout + run.stderr
    version = subprocess.run(
        ["featcal", "--version"], cwd=work, env=env, capture_output=True, text=True
    )
    assert version.returncode == 0 and version.stdout.strip(), version.stderr
    assert "directory = /featcal" in (home / ".gitconfig").read_text()
