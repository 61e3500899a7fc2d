"""Writes requirements/: constraints.txt with the hash of every file, for Linux with PyTorch's CPU
build and with its CUDA build.

    python scripts/lock.py     needs `uv`, and UV_EXTRA_INDEX_URL or UV_FIND_LINKS where PyTorch's
    CPU wheels are

linux.txt has what both builds share; the other two include it.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# packages that build this project and the few packages that come as source
BUILD = "setuptools==84.2.1\nwheel==0.48.0"
# of one number, the CPU build would count as the newer torch
CPU_WHEELS = ("UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
COMPILE = (
    "uv pip compile --quiet --generate-hashes --python-version 3.11 --no-header --no-annotate"
).split()


def locked(*arguments: str, requirement: str = "", elsewhere: bool = False) -> dict[str, str]:
    """Return each pinned package, in order, with its lines in a requirements file; only from PyPI
    unless `elsewhere`.
    """
    command = [*COMPILE, *arguments, *(["-"] if requirement else [])]
    left_out = () if elsewhere else CPU_WHEELS
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(command, input=requirement or None, **options)
    if done.returncode:
        sys.exit(done.returncode)  # uv has said why
    return {entry.split()[0]: entry for entry in re.split(r"\n(?=\S)", done.stdout.strip())}


def write(name: str, about: str, entries: dict[str, str]) -> None:
    """Write one file of requirements/."""
    lines = [f"# Written by scripts/lock.py: {about}.", *entries.values(), ""]
    (ROOT / "requirements" / name).write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = re.search(r"^EXTRAS := (\S+)", makefile, re.M)[1].split(",")
    antlr = re.search(r"^ANTLR  := (\S+)", makefile, re.M)[1]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    with tempfile.TemporaryDirectory() as folder:
        entries_of = {}
        for build, torch_pin in {"cuda": torch, "cpu": f"{torch}+cpu"}.items():
            path = Path(folder) / f"{build}.txt"
            lines = [torch_pin if pin == torch else pin for pin in pins]
            path.write_text("\n".join(lines), encoding="utf-8")
            names = [*extras, "gpu"] if build == "cuda" else extras
            options = [f"--extra={name}" for name in names]
            arguments = ("pyproject.toml", *options, "-c", str(path))
            entries_of[build] = locked(*arguments, elsewhere=build == "cpu")
    cuda, cpu = entries_of.values()
    shared = {pin: entry for pin, entry in cpu.items() if cuda.get(pin) == entry}
    write("linux.txt", "what PyTorch's CPU build and its CUDA build need alike", shared)
    for build, entries in entries_of.items():
        own = {pin: entry for pin, entry in entries.items() if pin not in shared}
        about = f"PyTorch's {build.upper()} build, Linux, Python 3.11"
        write(f"linux-{build}.txt", about, {"": "-r linux.txt"} | own)
    write("build.txt", "what builds the packages that come as source", locked(requirement=BUILD))
    antlr_entries = locked("--no-deps", requirement=antlr)
    write("antlr4.txt", "for a folder of its own (Makefile)", antlr_entries)


if __name__ == "__main__":
    main()
