"""What public tests need beside lm-evaluation-harness: modules, the antlr4 of sympy, nltk's
punkt_tab, leave to run programs.
"""

import importlib
import os
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from reproduction.data.public import PublicTest
from reproduction.language.harness import ALLOW_PROGRAMS, INSTALL

# sympy reads LaTeX with antlr4 4.11 only, while omegaconf, which DVC installs, imports with 4.9
# only. No process needs both, so
# the one of sympy lies in a folder of its own, which comes first where a test asks for it; `make
# setup` puts it there.
ANTLR, ANTLR_PACKAGE, ANTLR_PIN = "4.11", "antlr4-python3-runtime", "4.11.1"
ANTLR_FOLDER = Path(sys.prefix, "share", "featcal", "antlr4")
PUNKT = "tokenizers/punkt_tab/english"  # below a folder of nltk's data
PUNKT_WAY_OUT = "nltk's punkt_tab: python -m nltk.downloader punkt_tab, with a network; NLTK_DATA names another folder to look in"


@dataclass(frozen=True)
class Lack:
    """What is not there, and what brings it."""

    what: str
    way_out: str


def lacking(test: PublicTest) -> list[Lack]:
    """Everything that a test needs and this machine has not; nothing is fetched, and no path of
    imports changes.
    """
    missing = [name for name in test.needs if name != "antlr4" and find_spec(name) is None]
    found = [Lack(f"{', '.join(missing)} not installed", INSTALL)] if missing else []
    if "antlr4" in test.needs and not (version := antlr_version()).startswith(ANTLR):
        found.append(
            Lack(f"antlr4 {ANTLR} is needed, {version or 'none'} is installed", antlr_way_out())
        )
    if "nltk" in test.needs and "nltk" not in missing and not punkt_is_here():
        found.append(Lack("nltk's punkt_tab is not here", PUNKT_WAY_OUT))
    if test.runs and os.environ.get(ALLOW_PROGRAMS) != "1":
        way_out = f"{ALLOW_PROGRAMS}=1 lets the harness run generated programs by its own metric, without the mini suite's limits"
        found.append(Lack("runs generated programs, which is not allowed here", way_out))
    return found


def antlr_way_out() -> str:
    """How sympy's antlr4 comes here without `make setup`, or the test does without it."""
    pip = f"{sys.executable} -m pip install --no-deps --target {ANTLR_FOLDER} {ANTLR_PACKAGE}=={ANTLR_PIN}"
    return f"antlr4: make setup, or {pip} (beside the 4.9 that DVC's omegaconf needs); or take math500_plain"


def antlr_version() -> str:
    """The version that `require_antlr` finds: that of its own folder, else the installed one; ''
    without any.
    """
    installed, own = (_antlr_in(path) for path in (sys.path, [str(ANTLR_FOLDER)]))
    return own if own and not installed.startswith(ANTLR) else installed


def require_antlr() -> None:
    """Bring antlr4 4.11 to the front where it lies in its own folder. Raises: ImportError where
    another one would be imported.
    """
    if (
        not _antlr_in(sys.path).startswith(ANTLR)
        and ANTLR_FOLDER.is_dir()
        and "antlr4" not in sys.modules
    ):
        sys.path.insert(0, str(ANTLR_FOLDER))
        importlib.invalidate_caches()
    if not (version := _antlr_in(sys.path)).startswith(ANTLR):
        raise ImportError(f"antlr4 {ANTLR} is needed, {version or 'none'} is installed")


def _antlr_in(path: list[str]) -> str:
    """Its version in the first of these folders that has it."""
    return next((found.version for found in distributions(name=ANTLR_PACKAGE, path=path)), "")


def punkt_is_here() -> bool:
    """Whether nltk finds what it splits English sentences by; the harness fetches it while it
    imports the test.
    """
    import nltk

    try:
        nltk.data.find(PUNKT)
    except LookupError:
        return False
    return True


def fetch_punkt(test: PublicTest) -> None:
    """Fetch nltk's punkt_tab where a test needs it, it is not here and a connection is allowed;
    else leave it at that.
    """
    from huggingface_hub import constants

    if (
        "nltk" in test.needs
        and find_spec("nltk")
        and not constants.HF_HUB_OFFLINE
        and not punkt_is_here()
    ):
        import nltk

        nltk.download("punkt_tab", quiet=True)
