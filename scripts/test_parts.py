"""Run pytest on parts of the tests, several at a time, each in a fork of one that has
loaded torch.

    python -m scripts.test_parts [--jobs N] PART...

A part is a folder or a file, without the parts below it, or a page of the book, which nbval executes
in a kernel. The first begins while torch is loaded, so it should need none. Prints now and then how
far each part is, and at its end the report without the tests that passed. Exit code 1: a part failed.
"""

import argparse
import gc
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

ENVIRONMENT = {  # as tests/conftest.py has it; and no plugins of dependencies, which load for a second
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}  # fmt: skip
LOADED = (
    "datasets", "featcal.calibration.calibrate", "featcal.cli.main", "featcal.evaluation.compare", "featcal.merging.merge",
    "peft", "pytest", "sentence_transformers", "transformers.models.bert.modeling_bert", "transformers.models.clip.modeling_clip",
    "transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5",
)  # fmt: skip
REACHED = re.compile(r"\[ *\d+%\]$", re.MULTILINE)
PASSED = re.compile(r" PASSED +\[ *\d+%\]$")
PAUSE = 20  # seconds between two looks at how far a part is
PATIENCE = 600  # seconds without a line in its report after which a part is aborted


def arguments_of(part: str, parts: Sequence[str]) -> list[str]:
    """Return pytest's arguments for a part."""
    if part.endswith(".ipynb"):
        return [part, "-p", "nbval.plugin", "--nbval-lax", "--nbval-current-env"]
    return [part, *(f"--ignore={other}" for other in parts if other.startswith(f"{part}/"))]


def run(arguments: Sequence[str], report: Path) -> None:
    """Run pytest in this process, all that it prints in a file."""
    import pytest

    with report.open("w", buffering=1) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.stdout = sys.stderr = out
        # with -q in pyproject.toml: a line for each test
        sys.exit(int(pytest.main(["-vv", *arguments])))


class Part:
    """A part that runs."""

    def __init__(self, name: str, parts: Sequence[str], folder: Path):
        self.name, self.report = name, folder / name.replace("/", "-")
        self.looked, self.reached = time.monotonic(), ""
        arguments = arguments_of(name, parts), self.report
        self.process = get_context("fork").Process(target=run, args=arguments)
        print(f"{name} started", flush=True)
        self.process.start()

    def ended(self) -> bool:
        """Return whether it has; say how far it is, or show its report."""
        self.process.join(0.1)
        if self.process.is_alive():
            if time.monotonic() > self.looked + PAUSE:
                self.looked, before = time.monotonic(), self.reached
                self.reached = (REACHED.findall(self.report.read_text()) or [""])[-1]
                if self.reached != before:
                    print(f"{self.name} {self.reached}", flush=True)
                elif time.time() > self.report.stat().st_mtime + PATIENCE:
                    print(f"{self.name} hangs", flush=True)
                    os.kill(self.process.pid, signal.SIGABRT)  # the report then shows where
            return False
        lines = self.report.read_text().splitlines()
        print("\n".join(["", f"pytest {self.name}", *(x for x in lines if not PASSED.search(x))]))
        sys.stdout.flush()
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, begun in their order, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("parts", nargs="+")
    args = parser.parse_args(argv)
    os.environ |= ENVIRONMENT
    waiting, code = list(args.parts), 0
    with tempfile.TemporaryDirectory() as folder:
        running = [Part(waiting.pop(0), args.parts, Path(folder))]
        try:
            for module in LOADED:
                import_module(module)
            gc.freeze()
            while waiting or running:
                while waiting and len(running) < args.jobs:
                    running.append(Part(waiting.pop(0), args.parts, Path(folder)))
                for part in [part for part in running if part.ended()]:
                    running.remove(part)
                    code = code or int(part.process.exitcode != 0)
        finally:
            for part in running:
                part.process.terminate()
    return code


if __name__ == "__main__":
    sys.exit(main())
