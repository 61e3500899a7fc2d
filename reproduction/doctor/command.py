"""`featcal doctor`: whether this machine has what the project and a suite need. Looks, changes
nothing, downloads nothing.
"""

import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

from packaging.requirements import Requirement
from typer import Exit, Option

from featcal.cli.options import Json
from featcal.cli.terminal import note, say, say_json, table
from featcal.errors import MissingPath
from featcal.settings import project_root

PACKAGES = (
    "featcal", "torch", "torchvision", "transformers", "datasets", "open_clip_torch", "lm_eval", "peft", "mergekit",
    "optuna", "dvc", "jupyter-book",
)  # fmt: skip
LACKING = 2  # exit code
EPILOG = """Examples:

featcal doctor

featcal doctor --suite paper --tflops 20

HF_HUB_OFFLINE=1 featcal doctor --suite paper --json   (is everything in the cache?)

Exit code 2 when something is missing, told in a list at the end."""


def doctor(
    suite: Annotated[
        str | None, Option(help="mini, paper or files; the one of params.yaml where left out.")
    ] = None,
    tflops: Annotated[
        float, Option(min=0.001, help="Sustained speed that hours are told for.")
    ] = 10.0,
    as_json: Json = False,
) -> None:
    """Tell what this machine has, what a suite needs before hours are spent on it, and what is
    missing.
    """
    from reproduction.doctor.needs import Chosen
    from reproduction.doctor.suite import Checkup, checkup, show
    from reproduction.experiments.params import load_experiments
    from reproduction.prepare.suite import load_suite

    root = root_of(suite)
    machine, lacking = machine_rows(), wrong_versions()
    found = Checkup("")
    if root is not None:
        note("asking the hub and counting; nothing is downloaded")
        experiments = load_experiments(root / "params.yaml", suite)
        found = checkup(
            Chosen(root, experiments, load_suite(root, experiments.suite)), tflops * 1e12
        )
    found.missing = lacking + found.missing
    if as_json:
        content = asdict(found) | {"hours_at_tflops": tflops, "machine": dict(machine)}
        say_json(content)
    else:
        table("", ["what", "found"], machine, right=False)
        if root is not None:
            show(found, tflops * 1e12)
        elif lacking:
            say("\n  - ".join(["missing:", *lacking]))
    if found.missing:
        raise Exit(LACKING)


def root_of(suite: str | None) -> Path | None:
    """The project around the current folder; None outside of one, where no suite was asked for.
    Raises: MissingPath.
    """
    try:
        return project_root()
    except MissingPath:
        if suite is not None:
            raise
        return None


def machine_rows() -> list[list[str]]:
    """What this machine has, whatever is to be run."""
    rows = [["python", platform.python_version()]]
    rows += [[name, installed(name)] for name in PACKAGES]
    rows += [
        ["device", device()],
        ["torchvision runs", torchvision_state()],
        ["threads", threads()],
    ]
    rows += [["fonts of the mini suite", fonts()]]
    rows += [[name, program(name, why)] for name, why in PROGRAMS.items()]
    rows += [
        [name, os.environ.get(name, "not set")]
        for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_ALLOW_CODE_EVAL")
    ]
    return [*rows, ["free disk here", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB"]]


def wrong_versions() -> list[str]:
    """Packages that featcal cannot do without and that are missing, or of a version it was not made
    for.
    """
    found = []
    try:
        needed = [Requirement(text) for text in requires("featcal") or ()]
    except PackageNotFoundError:  # run from a folder, not installed
        return []
    for one in needed:
        here = installed(one.name)
        wanted = (
            one.marker is None or one.marker.evaluate()
        )  # extras have a marker that is false here
        if wanted and (
            here == "not installed" or not one.specifier.contains(here, prereleases=True)
        ):
            found.append(f"{one.name}{one.specifier} (found: {here})")
    return found


PROGRAMS = {
    "git": "only needed for make verify and make accept",
    "dvc": "needed by make repro; make setup installs it",
    "chromium": "only the tests that open the book need it",
    "chromedriver": "only the tests that open the book need it",
}


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "CPU only" + (
            " (this torch could use CUDA, but finds no device)" if torch.version.cuda else ""
        )
    return (
        ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        + f" (CUDA {torch.version.cuda})"
    )


def torchvision_state() -> str:
    """Return whether torchvision imports, and whether its compiled operators run."""
    import torch

    try:
        import torchvision
    except ImportError:
        return "no: not installed (open_clip needs it)"
    except RuntimeError as error:
        return f"no: {error}; python scripts/repair_torchvision.py makes it importable"
    try:
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (NotImplementedError, RuntimeError):
        return "it imports; its compiled operators do not run next to this torch and are not needed here"
    return "yes, compiled operators too"


def threads() -> str:
    import torch

    return f"{torch.get_num_threads()} of torch, {os.cpu_count()} processors"


def fonts() -> str:
    try:
        import matplotlib
    except ImportError:
        return "missing: matplotlib is not installed; make setup installs it"
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return f"{len(list(folder.glob('*.ttf')))} in matplotlib"


def program(name: str, why: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    return found or f"not found: {why}"
