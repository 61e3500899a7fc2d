"""The Containerfile's steps in a copy of the checkout, in an environment that sees this one's."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from pipeline import ROOT

OUT_OF_REACH = ("No matching distribution", "Could not find a version", "Connection", "resolution")


def instructions(file):
    """Return pairs of an instruction and its text, continued lines joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", file.read_text())).splitlines()
    return [line.split(maxsplit=1) for line in lines if line]


def values(steps, kind):
    """Return the variables of all ENV or ARG instructions."""
    return dict(pair.split("=", 1) for word, text in steps if word == kind for pair in text.split())


@pytest.mark.skipif(
    (sys.platform, *sys.version_info[:2]) != ("linux", 3, 11),
    reason="locks are of Linux and Python 3.11",
)
def test_the_containers_steps_install_an_environment_that_starts(tmp_path):
    steps_of_file = instructions(ROOT / "Containerfile")
    work, home, venv = tmp_path / "featcal", tmp_path / "home", tmp_path / "venv"
    computed = ".git .venv* .dvc .featcal outputs _build __pycache__ *.egg-info".split()
    shutil.copytree(ROOT, work, ignore=shutil.ignore_patterns(*computed))
    home.mkdir()
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env |= values(steps_of_file, "ARG") | values(steps_of_file, "ENV") | {"HOME": str(home)}
    env |= {"VENV": str(venv), "PYTHON": sys.executable, "PATH": f"{venv}/bin:{os.environ['PATH']}"}
    how = {"cwd": work, "env": env, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (lent,) = venv.glob("lib/python*/site-packages")
    (lent / "lent.pth").write_text(sysconfig.get_path("purelib"))
    steps = [text for word, text in steps_of_file if word == "RUN" and "apt-get" not in text]
    assert steps
    for step in steps:
        own = step.replace("PIP_EXTRA_INDEX_URL=$TORCH_INDEX ", "")  # this machine's pip first
        for one in (own, step):
            run = subprocess.run(["sh", "-c", one], **how)
            out_of_reach = run.returncode and any(reason in run.stderr for reason in OUT_OF_REACH)
            if not out_of_reach:
                break
        if out_of_reach:
            pytest.skip(f"no package index: {run.stderr.strip()[-300:]}")
        assert run.returncode == 0, run.stdout + run.stderr
    version = subprocess.run(["featcal", "--version"], **how)
    assert version.returncode == 0 and version.stdout.strip(), version.stderr
    assert "directory = /featcal" in (home / ".gitconfig").read_text()
