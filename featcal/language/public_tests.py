"""The paper's six tests as lm-evaluation-harness loads them, and whether this machine has what they need."""

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from featcal.data.public import PUBLIC, PublicTest
from featcal.errors import NoHarness, UnknownKey
from featcal.language.harness import ALLOW_PROGRAMS, Loaded, prepared, require_harness, silent

# by the columns of the paper's tables
PAPER = {key: key for key in ("math500", "gsm8k", "humaneval_plus", "mbpp_plus", "ifeval", "arc_challenge")}
# sympy reads LaTeX with antlr4 4.11 only, while omegaconf, which DVC installs, imports with 4.9 only. No process needs both, so
# the one of sympy lies in a folder of its own, which comes first where a test asks for it.
ANTLR, ANTLR_FOLDER = "4.11", Path(sys.prefix, "share", "featcal", "antlr4")
WAYS_OUT = [
    "data sets, the metric code_eval and nltk's punkt_tab are fetched on first use: run once with HF_HUB_OFFLINE=0 and a network",
    "ifeval: pip install 'lm_eval[ifeval]'",
    f"minerva_math500: pip install math-verify, and pip install --no-deps --target {ANTLR_FOLDER} "
    "'antlr4-python3-runtime==4.11.*' (beside the 4.9 that DVC's omegaconf needs), or take math500_plain",
    f"{ALLOW_PROGRAMS}=1 lets the harness run generated programs by its own metric, without the limits that the mini suite has",
]


def load_public(tests: Mapping[str, str] = PAPER, revisions: Mapping[str, str] | None = None) -> dict[str, Loaded]:
    """The tests as the harness loads them, data included: what is lacking is found here, before a model has run for hours.

    tests:     by what the results call the test, a name of PUBLIC.
    revisions: the commits of their data sets, by the same keys; left out, whatever is there now.
    Raises: NoHarness naming everything that is lacking, of all tests at once; UnknownKey.
    """
    unknown = next((name for name in tests.values() if name not in PUBLIC), None)
    if unknown:
        raise UnknownKey("public tests", unknown, list(PUBLIC))
    require_harness()
    loaded, problems = {}, []
    for key, name in tests.items():
        test = PUBLIC[name]
        try:
            _require(test)
            loaded[key] = Loaded(_load(test, (revisions or {}).get(key)), f"{test.metric},{test.filter}", test.runs)
        except Exception as error:  # the harness, its tasks and their data sets raise anything
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            problems.append(f"{test.task}: {said.rstrip('.;')[:160]}")
    if problems:
        raise NoHarness(problems, WAYS_OUT)
    return loaded


def _require(test: PublicTest) -> None:
    """Look for what the harness itself would miss late, or tell in many lines."""
    missing = [name for name in test.needs if name != "antlr4" and find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} not installed")
    if "antlr4" in test.needs:
        require_antlr()
    if test.runs and os.environ.get(ALLOW_PROGRAMS) != "1":
        raise PermissionError(f"runs generated programs, which {ALLOW_PROGRAMS}=1 would allow")
    if "nltk" in test.needs:
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            if not nltk.download("punkt_tab", quiet=True):
                raise LookupError("nltk's punkt_tab is not here and cannot be fetched") from None


def require_antlr() -> None:
    """Bring antlr4 4.11 to the front where it lies in its own folder. Raises: ImportError where another one would be imported."""
    if not _antlr_version().startswith(ANTLR) and ANTLR_FOLDER.is_dir() and "antlr4" not in sys.modules:
        sys.path.insert(0, str(ANTLR_FOLDER))
        importlib.invalidate_caches()
    if not _antlr_version().startswith(ANTLR):
        raise ImportError(f"antlr4 {ANTLR} is needed, {_antlr_version() or 'none'} is installed")


def _antlr_version() -> str:
    try:
        return version("antlr4-python3-runtime")
    except PackageNotFoundError:
        return ""


def _load(test: PublicTest, revision: str | None) -> Any:
    """The harness's task, its data set at one commit: a task file that includes the harness's own."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    included: dict[str, Any] = {"include": str(Path(lm_eval.__file__).parent / "tasks" / test.file), "task": test.task}
    if revision:
        included["dataset_kwargs"] = {"revision": revision}
    with silent(), TemporaryDirectory() as folder:
        file = Path(folder, "pinned.yaml")
        file.write_text(yaml.safe_dump(included), "utf-8")
        manager = TaskManager(include_defaults=False)  # to index all of the harness's tasks takes ten seconds
        return prepared(manager.load([str(file)])["tasks"][test.task])
