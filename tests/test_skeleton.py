"""The files around the package: what a newcomer reads and types agrees with what there is."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from reproduction.language.requirements import ANTLR_FOLDER, ANTLR_PACKAGE, ANTLR_PIN, antlr_way_out

ROOT = Path(__file__).parents[1]
TARGETS = {"setup", "locked", "repro", "test", "processors", "book", "pretrain", "verify", "accept", "clean", "rehearsal"}


def text(name: str) -> str:
    return (ROOT / name).read_text()


def tracked() -> list[Path]:
    """What git holds; of an unpacked archive, everything but what is computed or installed."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode == 0 and done.stdout:
        return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file()]
    computed = {
        ".venv",
        "outputs",
        "_build",
        ".featcal",
        "cache",
        "tmp",
        "__pycache__",
        "featcal.egg-info",
        "featcal_reproduction.egg-info",
        ".git",
    }
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


def test_make_alone_lists_every_target():
    listed = subprocess.run(["make"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert set(re.findall(r"^make (\w+)", listed, re.M)) == TARGETS


def test_conda_installs_the_same_lines_as_make():
    environment = yaml.safe_load(text("environment.yml"))
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    line, beside = re.findall(r"pip install (.*)", dry_run("setup"))
    flags = re.findall(r"-[ce] \S+", line.replace("'", ""))
    assert pip == flags
    (told,) = re.findall(r"pip install (.*)", text("environment.yml"))
    package = f"{ANTLR_PACKAGE}=={ANTLR_PIN}"
    assert beside.endswith(f"--target not-there/share/featcal/antlr4 {package}")
    assert told == f'--no-deps --target "$CONDA_PREFIX/share/featcal/antlr4" {package}'
    assert ANTLR_FOLDER == Path(sys.prefix, "share/featcal/antlr4") and f"--target {ANTLR_FOLDER} {package}" in antlr_way_out()
    assert "python=3.11" in environment["dependencies"] and "pip" in environment["dependencies"]


def test_repro_computes_the_headline_chain_and_leaves_the_other_pages_upstream_alone():
    lines = [line for line in dry_run("repro").splitlines() if "/dvc repro" in line]
    assert [line.split("/dvc ")[1] for line in lines] == [
        "repro page@table01 page@figure1 playground headline",
        "repro --single-item --glob 'page*'",
        "repro --single-item book",
    ]


def test_make_test_needs_no_earlier_run():
    assert "dvc repro" not in dry_run("test")


def test_installing_again_after_git_touched_the_dates_is_not_needed(tmp_path):
    (tmp_path / "reproduction").mkdir()
    for name in ("Makefile", "pyproject.toml", "reproduction/pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (stamp,) = re.findall(r"touch (\S+)", planned_setup(tmp_path))
    (tmp_path / stamp).parent.mkdir()
    (tmp_path / stamp).touch()
    (tmp_path / "pyproject.toml").touch()
    assert "pip install" not in planned_setup(tmp_path)
    (tmp_path / "constraints.txt").write_text("torch==2.12.0\n")
    assert "pip install" in planned_setup(tmp_path)


def planned_setup(folder: Path) -> str:
    """What `make setup` would run there, whatever environment the tests themselves were started with."""
    words = ["make", "-n", "setup", "VENV=.venv"]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder).stdout


def test_gitignore_hides_no_folder_of_the_sources():
    anywhere = {line.rstrip("/") for line in text(".gitignore").split() if not line.startswith("/")}  # at any depth
    sources = [
        folder
        for top in ("featcal", "reproduction", "notebooks", "suites", "tests", "scripts")
        for folder in (ROOT / top).rglob("*/")
    ]
    assert not [str(folder) for folder in sources if folder.name in anywhere - {"__pycache__"}]


def test_license_is_mit_and_named_so_in_the_metadata():
    assert text("LICENSE").startswith("MIT License") and "the featcal authors" in text("LICENSE")
    assert 'license = "MIT"' in text("pyproject.toml")


def test_dvc_calls_nobody_and_needs_no_remote():
    import configobj

    config = configobj.ConfigObj(str(ROOT / ".dvc" / "config"), list_values=False)
    assert config["core"] == {"analytics": "false", "check_update": "false", "autostage": "false"}
    assert not [section for section in config if section.startswith("'remote") or section.startswith("remote")]
    assert set(text(".dvc/.gitignore").split()) == {"/config.local", "/tmp", "/cache"}


def test_every_command_the_readme_shows_exists():
    from typer.main import get_command

    from featcal.cli.main import app

    readme = text("README.md")
    commands = set(get_command(app).commands)
    made, called = set(re.findall(r"\bmake ([a-z]+)\b", readme)), set(re.findall(r"^featcal ([a-z]+)", readme, re.M))
    assert {"repro", "test"} <= made <= TARGETS
    assert {"merge", "calibrate", "evaluate"} <= called <= commands


def test_every_option_the_readme_shows_exists():
    from typer.main import get_command

    from featcal.cli.main import app

    commands = get_command(app).commands
    for command, rest in re.findall(r"^featcal ([a-z]+)((?:[^\n]*\\\n)*[^\n]*)", text("README.md"), re.M):
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"(--[a-z-]+)", rest)) <= known, command


def test_the_readme_stays_short_and_every_file_it_links_is_there():
    readme = text("README.md")
    assert len(readme.splitlines()) <= 200
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


def test_dvc_reads_yaml_by_libyaml():
    """After each of its stages it reads params.yaml and a lock of thousands of lines several times."""
    assert importlib.import_module("ruamel.yaml").__with_libyaml__


def test_constraints_pin_every_package_exactly_and_take_the_cpu_wheel_where_one_is_offered():
    pins = pins_of()
    assert not [name for name, version in pins.items() if "+" in version]
    assert [int(part) for part in pins["torch"].split(".")[:2]] < [2, 14]
    assert re.search(r"torch>=2\.6,<2\.14", text("pyproject.toml"))


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_locks_hold_the_pinned_versions_with_a_hash_each_and_nothing_else(build):
    locked = {}
    for name in ("linux.txt", f"linux-{build}.txt", "build.txt"):
        entries = re.findall(r"^([\w.-]+)==([^\s;]+)((?:.*\\\n)*.*)", text(f"requirements/{name}"), re.M)
        assert all("--hash=sha256:" in rest for _, _, rest in entries)
        locked |= {package.lower().replace("_", "-").replace(".", "-"): version for package, version, _ in entries}
    pins = {name.lower().replace("_", "-").replace(".", "-"): version for name, version in pins_of().items()}
    assert locked["torch"] == pins["torch"] + ("+cpu" if build == "cpu" else "")
    wanted = {name: version for name, version in locked.items() if name in pins and name != "torch"}
    assert wanted == {name: pins[name] for name in wanted}, "write them again: python scripts/lock.py"
    optional = {"nvidia-ml-py"} if build == "cpu" else set()  # of the extra `gpu`
    assert not pins.keys() - locked.keys() - optional


def pins_of() -> dict[str, str]:
    return dict(line.split("==") for line in text("constraints.txt").splitlines())
