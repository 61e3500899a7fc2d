"""The files around the package: what a newcomer reads and types agrees with what there is."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = {"setup", "locked", "repro", "real", "test", "processors", "book", "pretrain", "verify", "accept", "clean", "rehearsal"}


def text(name: str) -> str:
    return (ROOT / name).read_text()


def tracked() -> list[Path]:
    """What git holds; of an unpacked archive, everything but what is computed or installed."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode == 0 and done.stdout:
        return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file()]
    computed = {".venv", "outputs", "_build", ".featcal", "cache", "tmp", "__pycache__", ".git"}
    computed |= {"featcal.egg-info", "featcal_reproduction.egg-info"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not computed & set(path.relative_to(ROOT).parts)]


def dry_run(target: str) -> str:
    """What make would run; nothing is run."""
    done = subprocess.run(
        ["make", "--dry-run", target, "VENV=not-there"], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_of_the_makefile_is_there_and_installs_first(target):
    planned = dry_run(target)
    assert ("pip install" in planned) == (target != "clean")


def test_dvc_calls_nobody_and_needs_no_remote():
    import configobj

    config = configobj.ConfigObj(str(ROOT / ".dvc" / "config"), list_values=False)
    assert config["core"] == {"analytics": "false", "check_update": "false", "autostage": "false"}
    assert not [section for section in config if section.startswith("'remote") or section.startswith("remote")]
    assert set(text(".dvc/.gitignore").split()) == {"/config.local", "/tmp", "/cache"}


def test_every_file_that_the_readme_links_is_there():
    readme = text("README.md")
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_tracked_files_name_neither_this_machine_nor_a_registry():
    here = [re.escape(str(path)) for path in (ROOT, ROOT.parent, Path.home()) if len(path.parts) > 1]
    machine = re.compile(rf"(?<![\w.}}/-])({'|'.join(here)}|/home/\w+)/|file:///|find-links|index-url")
    found = []
    for path in tracked():
        if path.suffix in {".safetensors", ".png", ".parquet", ".js"} or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if machine.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert not found
