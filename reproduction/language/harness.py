"""Score causal language models with lm-evaluation-harness (extra `language`), by greedy answers.

The tests of a suite are on drawn texts, or public ones. Those need modules, the antlr4 of sympy,
nltk's punkt_tab, and leave to run programs: what this machine lacks of it is reported at once.
Uses `lm_eval.evaluate`: `simple_evaluate` does the same, but seeds the global generators, looks for
a git commit and lists the machine's packages, two seconds a call.
"""

import importlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from huggingface_hub import constants
from torch import Tensor, nn

from featcal.errors import BadData, BadEnvironment, UnknownKey
from featcal.models.load import quiet_transformers
from reproduction.language.answers import CHECKS, TestRow
from reproduction.language.generation import Change
from reproduction.prepare.suite import Language
from reproduction.prepare.tasks import PUBLIC, PublicTest
from reproduction.prepare.texts import open_rows, read_text_sources

INSTALL = "install the extra: pip install -c constraints.txt -e '.[language]'"
ALLOW_PROGRAMS = "HF_ALLOW_CODE_EVAL"  # the harness's own switch
FEW_SHOT_SEED = 1234  # the harness's own; the paper's tests draw no examples, they are fixed
METRIC, STOP = "correct", "\n"
# sympy reads LaTeX with antlr4 4.11 only; omegaconf, which DVC installs, imports with 4.9 only. No
# process needs both, so `make setup` puts the one of sympy into a folder of its own.
ANTLR, ANTLR_PACKAGE, ANTLR_PIN = "4.11", "antlr4-python3-runtime", "4.11.1"
ANTLR_FOLDER = Path(sys.prefix, "share", "featcal", "antlr4")
ANTLR_WAY_OUT = (
    f"antlr4: make setup, or {sys.executable} -m pip install --no-deps --target {ANTLR_FOLDER} {ANTLR_PACKAGE}=={ANTLR_PIN} "
    "(next to the 4.9 that DVC's omegaconf needs); or take math500_plain"
)
PUNKT = "tokenizers/punkt_tab/english"  # below a folder of nltk's data
PUNKT_WAY_OUT = "nltk's punkt_tab: python -m nltk.downloader punkt_tab, with a network; NLTK_DATA names another folder to look in"
LANGUAGE_SEED = 0
FETCHED = "data sets, the metric code_eval and nltk's punkt_tab are fetched on first use: run once with HF_HUB_OFFLINE=0 and a network"


@dataclass(frozen=True)
class LoadedTest:
    """A task of lm_eval with the key of its score, "metric,filter".

    runs: whether it runs generated programs, which HF_ALLOW_CODE_EVAL=1 must allow.
    """

    task: Any
    metric: str
    runs: bool = False


def score_tests(
    model: nn.Module,
    tokenizer: Any,
    tests: Mapping[str, LoadedTest],
    batch: int,
    change: Change | None = None,
) -> dict[str, tuple[float, int, list[bool] | None]]:
    """Return by test the score in percent, the number of prompts, and which answers are right.

    change: applied to the model while it answers a test. The last item is None where a prompt can
    be partly right.   Raises: BadEnvironment; BadData for a prompt longer than the model reads.
    """
    require_harness()
    scores = {}
    with silent():
        reader = _language_model(model, tokenizer, batch)
        for key, test in tests.items():
            with change(model, key) if change else nullcontext():
                results, values = _evaluated(reader, key, test)
            right = [bool(value) for value in values] if all(v in (0, 1) for v in values) else None
            scores[key] = 100 * float(results[test.metric]), len(test.task.eval_docs), right
    return scores


def local_test(key: str, rows: Sequence[TestRow], check: str, new_tokens: int) -> LoadedTest:
    """Return one test on rows of our own: prompt in, one line out, judged by a check of answers.

    new_tokens: after which an answer is cut; it ends at its first line break or end token.
    Raises: BadEnvironment without the package.
    """
    require_harness()
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    config = {
        "task": key,
        "custom_dataset": lambda **_: {"test": Dataset.from_list([dict(row) for row in rows])},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda row: row["prompt"],
        "doc_to_target": lambda row: "",  # the check reads the row itself
        "generation_kwargs": {"until": [STOP], "max_gen_toks": new_tokens, "do_sample": False},
        "process_results": lambda row, answers: {METRIC: CHECKS[check](row, answers[0])},
        "metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}],
        "metadata": {},
    }
    with silent():
        return LoadedTest(prepared(ConfigurableTask(config=config)), f"{METRIC},none")


def prepared(task: Any) -> Any:
    """Return a task as `simple_evaluate` prepares it: seeded, with examples if it names a number."""
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEW_SHOT_SEED)
    return task


def require_harness() -> None:
    """Raise BadEnvironment unless lm-evaluation-harness is installed."""
    if not installed():
        problem = "the package that asks language models for answers is not installed"
        raise BadEnvironment("lm-evaluation-harness (lm_eval)", problem, INSTALL)


def installed() -> bool:
    return find_spec("lm_eval") is not None


@contextmanager
def silent() -> Iterator[None]:
    """Silence the harness's log and its progress bars."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _evaluated(reader: Any, key: str, test: LoadedTest) -> tuple[Mapping[str, Any], list[Any]]:
    """Return the results of one test, and the metric of each prompt in the order of the data."""
    import lm_eval

    allowed = test.runs and os.environ.get(ALLOW_PROGRAMS) == "1"
    options = {"bootstrap_iters": 0, "log_samples": True, "confirm_run_unsafe_code": allowed}
    output = lm_eval.evaluate(reader, {"tasks": {key: test.task}}, **options)
    metric, _, filter_name = test.metric.partition(",")
    records = [record for record in output["samples"][key] if record["filter"] == filter_name]
    records.sort(key=lambda record: record["doc_id"])
    return output["results"][key], [record[metric] for record in records]


def _language_model(model: nn.Module, tokenizer: Any, batch: int) -> Any:
    """Return the model as the harness's class for transformers, which pads prompts on the left."""
    from lm_eval.models.huggingface import HFLM

    class Reader(HFLM):  # type: ignore[misc]
        def tok_batch_encode(
            self,
            strings: list[str],
            padding_side: str = "left",
            left_truncate_len: int | None = None,
            truncation: bool = False,
        ) -> tuple[Tensor, Tensor]:
            """Refuse a prompt that the harness would cut from the left."""
            ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
            if left_truncate_len and ids.shape[1] > left_truncate_len:
                prompt = f"prompt {max(strings, key=len)[:40]!r}…"
                longest = f"a prompt of {ids.shape[1]} tokens, but the model reads {left_truncate_len} before its answer"
                raise BadData(prompt, longest, "leave it out, or take a model that reads more")
            return ids, mask

    return Reader(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch)


def load_tests(texts: Path, language: Language, split: str = "test") -> Mapping[str, LoadedTest]:
    """Return every test of a suite by its key: on drawn texts, or the public ones.

    Raises: BadEnvironment with everything that is lacking; whatever opening the rows raises.
    """
    if language.texts is None or language.texts.source != "mini":
        sources = read_text_sources(texts)
        revisions = {key: sources[key].revision or "" for key in language.tests if key in sources}
        return load_public(language.tests, revisions)
    from reproduction.mini.language.domains import TESTS

    loaded = {}
    for key in language.tests:
        rows = open_rows(texts, key, split)[0].to_list()
        loaded[key] = local_test(key, rows, TESTS[key].check, TESTS[key].new_tokens)
    return loaded


def load_public(
    tests: Mapping[str, str], revisions: Mapping[str, str] | None = None
) -> dict[str, LoadedTest]:
    """Load public tests with their data, so that a lack shows before a model has run for hours.

    tests: names of PUBLIC by key.   revisions: commits of their data sets by key. Default: newest.
    Raises: BadEnvironment with everything that all tests lack; UnknownKey.
    """
    for name in tests.values():
        if name not in PUBLIC:
            raise UnknownKey("public tests", name, list(PUBLIC))
    require_harness()
    loaded, problems, ways_out = {}, [], [FETCHED]
    for key, name in tests.items():
        test = PUBLIC[name]
        if lacks := unmet(test):
            problems.append(f"{test.task}: {', '.join(need for need, _ in lacks)}")
            ways_out += [way_out for _, way_out in lacks]
            continue
        try:
            task = public_task(test, (revisions or {}).get(key))
            loaded[key] = LoadedTest(task, f"{test.metric},{test.filter}", test.runs)
        except Exception as error:  # the harness, its tasks and their data sets raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            problems.append(f"{test.task}: {reason.rstrip('.;')[:160]}")
    if problems:
        raise BadEnvironment("public tests", ";\n".join(problems), *dict.fromkeys(ways_out))
    return loaded


def public_task(test: PublicTest, revision: str | None) -> Any:
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
    with silent(), TemporaryDirectory() as folder:
        file = Path(folder, "pinned.yaml")
        file.write_text(yaml.safe_dump(included), "utf-8")
        manager = TaskManager(include_defaults=False)  # indexing all tasks takes ten seconds
        task = prepared(manager.load([str(file)])["tasks"][test.task])
    if "nltk" in test.needs and not punkt_installed():  # the harness has asked for it
        raise LookupError("nltk's punkt_tab could not be fetched")
    return task


def unmet(test: PublicTest) -> list[tuple[str, str]]:
    """Return the needs of a test that this machine lacks, each with a way out; fetch nothing."""
    missing = [name for name in test.needs if name != "antlr4" and find_spec(name) is None]
    lacks = [(f"{', '.join(missing)} not installed", INSTALL)] if missing else []
    if "antlr4" in test.needs and not (version := antlr_version()).startswith(ANTLR):
        lacks.append((f"antlr4 {ANTLR} is needed, {version or 'none'} is installed", ANTLR_WAY_OUT))
    reads_sentences = "nltk" in test.needs and "nltk" not in missing
    if reads_sentences and constants.HF_HUB_OFFLINE and not punkt_installed():
        lacks.append(("nltk's punkt_tab is not here", PUNKT_WAY_OUT))
    if test.runs and os.environ.get(ALLOW_PROGRAMS) != "1":
        way_out = f"{ALLOW_PROGRAMS}=1 lets the harness run generated programs by its own metric, without limits"
        lacks.append(("runs generated programs, which is not allowed here", way_out))
    return lacks


def antlr_version() -> str:
    """Return the version that a test will find, that of its own folder first, or ''."""
    path = [str(ANTLR_FOLDER), *sys.path]
    return next((package.version for package in distributions(name=ANTLR_PACKAGE, path=path)), "")


def punkt_installed() -> bool:
    """Return whether nltk finds punkt_tab, which the harness fetches when it loads the test."""
    import nltk

    try:
        nltk.data.find(PUNKT)
    except LookupError:
        return False
    return True
