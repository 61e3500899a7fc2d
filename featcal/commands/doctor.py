"""`featcal doctor`: whether this machine has what the project needs. Looks, changes nothing."""

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from featcal.commands.terminal import Json, say_json, table

PACKAGES = (
    "featcal", "torch", "torchvision", "transformers", "datasets", "open_clip_torch", "lm_eval", "peft", "mergekit",
    "dvc", "jupyter-book",
)  # fmt: skip
NEEDED = 10  # GB for outputs, DVC's cache and the book of the mini suite, with room


EPILOG = """Examples:

featcal doctor

featcal doctor --json"""


def doctor(as_json: Json = False) -> None:
    """Tell versions, devices, threads, programs and disk space; first thing to quote when something fails."""
    rows = [["python", platform.python_version()]]
    rows += [[name, installed(name)] for name in PACKAGES]
    rows += [["device", device()], ["torchvision runs", torchvision_state()], ["threads", threads()]]
    rows += [["fonts of the mini suite", fonts()], ["programs under test", fence()]]
    rows += [[name, program(name, why)] for name, why in PROGRAMS.items()]
    rows += [["free disk here", disk()]]
    if as_json:
        return say_json(dict(rows))
    table("", ["what", "found"], rows, numbers=False)


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
        return "CPU only" + (" (this torch could use CUDA, but finds no device)" if torch.version.cuda else "")
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) + f" (CUDA {torch.version.cuda})"


def torchvision_state() -> str:
    """Whether torchvision's compiled operators run, or only their names were declared so that it can be imported."""
    import torch

    try:
        import torchvision
    except ImportError:
        return "no: not installed (open_clip needs it)"
    try:
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (NotImplementedError, RuntimeError):
        return "imports, mended beside this torch (its compiled operators are not needed here)"
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


def fence() -> str:
    """Whether what a language model programs can be run behind limits."""
    from featcal.errors import CannotFence
    from featcal.language.sandbox import Program, run_programs

    try:
        outcome = run_programs([Program("answer = 42", ["assert answer == 42"])])[0]
    except CannotFence as error:
        return f"cannot be run: {str(error).splitlines()[0]}"
    return "run behind limits of time, memory and files" if outcome.passed else f"do not run: {outcome.detail}"


def program(name: str, why: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    return found or f"not found: {why}"


def disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    return f"{free:.0f} GB" + ("" if free >= NEEDED else f"; the mini suite with all its outputs wants {NEEDED} GB")
