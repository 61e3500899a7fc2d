"""The paper's six tests as tasks that lm-evaluation-harness defines, and whether this machine has what they need.

The paper names the tests, not their settings. The counts behind its numbers (multiples of 1/500, 1/164, 1/378, 1/541) fix the
data, one greedy answer each, and IFEval by prompt; prompts, filters and metrics are assumptions, so that each has a name.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from featcal.errors import NoHarness, UnknownKey
from featcal.language.harness import ALLOW_PROGRAMS, Loaded, prepared, require_harness, silent


@dataclass(frozen=True)
class PublicTest:
    """A task of the harness.

    task, metric, filter: by the harness's names.   folder: below its tasks.
    needs: modules that the task imports and the harness does not install.   runs: whether it runs generated programs.
    """

    task: str
    metric: str
    filter: str
    folder: str
    needs: tuple[str, ...] = ()
    runs: bool = False


IFEVAL = ("langdetect", "immutabledict", "nltk")
PUBLIC = {
    # sympy reads LaTeX with antlr4 4.11 only, while omegaconf, which DVC installs, asks for 4.9
    "math500": PublicTest("minerva_math500", "exact_match", "none", "minerva_math", ("sympy", "math_verify")),
    "gsm8k": PublicTest("gsm8k_cot", "exact_match", "flexible-extract", "gsm8k"),
    "humaneval_plus": PublicTest("humaneval_plus", "pass@1", "create_test", "humaneval", runs=True),
    "mbpp_plus": PublicTest("mbpp_plus", "pass_at_1", "none", "mbpp", runs=True),
    "ifeval": PublicTest("ifeval", "prompt_level_strict_acc", "none", "ifeval", IFEVAL),
    "arc_challenge": PublicTest("arc_challenge_chat", "exact_match", "remove_whitespace", "arc"),
    # the same data asked or counted otherwise
    "math500_verified": PublicTest("minerva_math500", "math_verify", "none", "minerva_math", ("sympy", "math_verify")),
    "math500_plain": PublicTest("hendrycks_math500", "exact_match", "none", "hendrycks_math"),
    "gsm8k_strict": PublicTest("gsm8k_cot", "exact_match", "strict-match", "gsm8k"),
    "mbpp_plus_instruct": PublicTest("mbpp_plus_instruct", "pass_at_1", "extract_code", "mbpp", runs=True),
    "ifeval_loose": PublicTest("ifeval", "prompt_level_loose_acc", "none", "ifeval", IFEVAL),
    "arc_challenge_llama": PublicTest("arc_challenge_llama", "exact_match", "strict_match", "llama3/instruct/arc_challenge"),
}
# by the columns of the paper's tables
PAPER = {key: key for key in ("math500", "gsm8k", "humaneval_plus", "mbpp_plus", "ifeval", "arc_challenge")}
WAYS_OUT = [
    "data sets, the metric code_eval and nltk's punkt_tab are fetched on first use: run once with HF_HUB_OFFLINE=0 and a network",
    "ifeval: pip install 'lm_eval[ifeval]'",
    "minerva_math500: pip install 'lm_eval[math]' (omegaconf then misses its antlr4; DVC uses it for Hydra files only), "
    "or take math500_plain",
    f"{ALLOW_PROGRAMS}=1 lets the harness run generated programs by its own metric, without the limits that the mini suite has",
]


def load_public(tests: Mapping[str, str] = PAPER) -> dict[str, Loaded]:
    """The tests as the harness loads them, data included: what is lacking is found here, before a model has run for hours.

    tests:  by what the results call the test, a name of PUBLIC.
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
            loaded[key] = Loaded(_load(test), f"{test.metric},{test.filter}", test.runs)
        except Exception as error:  # the harness, its tasks and their data sets raise anything
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            problems.append(f"{test.task}: {said.rstrip('.;')[:160]}")
    if problems:
        raise NoHarness(problems, WAYS_OUT)
    return loaded


def _require(test: PublicTest) -> None:
    """Look for what the harness itself would miss late, or tell in many lines."""
    missing = [name for name in test.needs if find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} not installed")
    if test.runs and os.environ.get(ALLOW_PROGRAMS) != "1":
        raise PermissionError(f"runs generated programs, which {ALLOW_PROGRAMS}=1 would allow")
    if "nltk" in test.needs:
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            if not nltk.download("punkt_tab", quiet=True):
                raise LookupError("nltk's punkt_tab is not here and cannot be fetched") from None


def _load(test: PublicTest) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.__file__).parent / "tasks" / test.folder
    with silent():  # its own folder alone: to index all of the harness's tasks takes ten seconds
        manager = TaskManager(include_defaults=False, include_path=str(folder))
        return prepared(manager.load([test.task])["tasks"][test.task])
