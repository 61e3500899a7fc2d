"""Load the tests of a suite's language models; of the public ones check what this machine lacks.

Public tests need modules, the antlr4 of sympy, nltk's punkt_tab, and leave to run programs.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from huggingface_hub import constants

from featcal.errors import BadEnvironment, UnknownKey
from reproduction.language import harness
from reproduction.language.harness import Loaded
from reproduction.prepare.suite import Language
from reproduction.prepare.tasks import PUBLIC, PublicTest
from reproduction.prepare.texts import open_rows, read_text_sources

# sympy reads LaTeX with antlr4 4.11 only; omegaconf, which DVC installs, imports with 4.9 only. No
# process needs both, so `make setup` puts the one of sympy into a folder of its own.
ANTLR, ANTLR_PACKAGE, ANTLR_PIN = "4.11", "antlr4-python3-runtime", "4.11.1"
ANTLR_FOLDER = Path(sys.prefix, "share", "featcal", "antlr4")
ANTLR_WAY_OUT = (
    f"antlr4: make setup, or {sys.executable} -m pip install --no-deps --target {ANTLR_FOLDER} {ANTLR_PACKAGE}=={ANTLR_PIN} "
    "(beside the 4.9 that DVC's omegaconf needs); or take math500_plain"
)
PUNKT = "tokenizers/punkt_tab/english"  # below a folder of nltk's data
PUNKT_WAY_OUT = "nltk's punkt_tab: python -m nltk.downloader punkt_tab, with a network; NLTK_DATA names another folder to look in"
LANGUAGE_SEED = 0
FETCHED = "data sets, the metric code_eval and nltk's punkt_tab are fetched on first use: run once with HF_HUB_OFFLINE=0 and a network"


def load_tests(texts: Path, language: Language, split: str = "test") -> Mapping[str, Loaded]:
    """Return every test of a suite by its key: on drawn texts, or the public ones.

    Raises: BadEnvironment with everything that is lacking; whatever opening the rows raises.
    """
    if language.texts is None or language.texts.source != "mini":
        sources = read_text_sources(texts)
        revisions = {key: sources[key].revision or "" for key in language.tests if key in sources}
        return load_public(language.tests, revisions)
    from reproduction.mini.language.domains import TESTS

    found = {}
    for key in language.tests:
        rows = open_rows(texts, key, split)[0].to_list()
        found[key] = harness.local_test(key, rows, TESTS[key].check, TESTS[key].new_tokens)
    return found


def load_public(
    tests: Mapping[str, str], revisions: Mapping[str, str] | None = None
) -> dict[str, Loaded]:
    """Load public tests with their data, so that a lack shows before a model has run for hours.

    tests: names of PUBLIC by key.   revisions: commits of their data sets by key. Default: newest.
    Raises: BadEnvironment with everything that all tests lack; UnknownKey.
    """
    for name in tests.values():
        if name not in PUBLIC:
            raise UnknownKey("public tests", name, list(PUBLIC))
    harness.require_harness()
    loaded, problems, ways_out = {}, [], [FETCHED]
    for key, name in tests.items():
        test = PUBLIC[name]
        if lacks := lacking(test):
            problems.append(f"{test.task}: {', '.join(what for what, _ in lacks)}")
            ways_out += [way_out for _, way_out in lacks]
            continue
        try:
            task = _load(test, (revisions or {}).get(key))
            loaded[key] = Loaded(task, f"{test.metric},{test.filter}", test.runs)
        except Exception as error:  # the harness, its tasks and their data sets raise anything
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            problems.append(f"{test.task}: {said.rstrip('.;')[:160]}")
    if problems:
        raise BadEnvironment("public tests", ";\n".join(problems), *dict.fromkeys(ways_out))
    return loaded


def _load(test: PublicTest, revision: str | None) -> Any:
    """Return the harness's task with its data set at one commit, by a file that includes its own."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    if "antlr4" in test.needs and "antlr4" not in sys.modules:
        sys.path.insert(0, str(ANTLR_FOLDER))
        importlib.invalidate_caches()
    if "langdetect" in test.needs:  # it guesses by chance: without a seed scores change
        import langdetect

        langdetect.DetectorFactory.seed = LANGUAGE_SEED
    file = Path(lm_eval.__file__).parent / "tasks" / test.file
    included: dict[str, Any] = {"include": str(file), "task": test.task}
    if revision:
        included["dataset_kwargs"] = {"revision": revision}
    with harness.silent(), TemporaryDirectory() as folder:
        file = Path(folder, "pinned.yaml")
        file.write_text(yaml.safe_dump(included), "utf-8")
        manager = TaskManager(include_defaults=False)  # indexing all tasks takes ten seconds
        task = harness.prepared(manager.load([str(file)])["tasks"][test.task])
    if "nltk" in test.needs and not punkt_is_here():  # the harness has asked for it
        raise LookupError("nltk's punkt_tab could not be fetched")
    return task


def lacking(test: PublicTest) -> list[tuple[str, str]]:
    """Return what a test needs and this machine lacks, each with how to get it; fetch nothing."""
    missing = [name for name in test.needs if name != "antlr4" and find_spec(name) is None]
    found = [(f"{', '.join(missing)} not installed", harness.INSTALL)] if missing else []
    if "antlr4" in test.needs and not (version := antlr_version()).startswith(ANTLR):
        found.append((f"antlr4 {ANTLR} is needed, {version or 'none'} is installed", ANTLR_WAY_OUT))
    reads_sentences = "nltk" in test.needs and "nltk" not in missing
    if reads_sentences and constants.HF_HUB_OFFLINE and not punkt_is_here():
        found.append(("nltk's punkt_tab is not here", PUNKT_WAY_OUT))
    if test.runs and os.environ.get(harness.ALLOW_PROGRAMS) != "1":
        way_out = f"{harness.ALLOW_PROGRAMS}=1 lets the harness run generated programs by its own metric, without limits"
        found.append(("runs generated programs, which is not allowed here", way_out))
    return found


def antlr_version() -> str:
    """Return the version that a test will find, that of its own folder first, or ''."""
    path = [str(ANTLR_FOLDER), *sys.path]
    return next((one.version for one in distributions(name=ANTLR_PACKAGE, path=path)), "")


def punkt_is_here() -> bool:
    """Return whether nltk finds punkt_tab, which the harness fetches when it loads the test."""
    import nltk

    try:
        nltk.data.find(PUNKT)
    except LookupError:
        return False
    return True
