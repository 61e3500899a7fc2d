"""The paper's six tests of language models: where their data lie on the hub, and what
lm-evaluation-harness calls them.

The paper names the tests, not their settings. The counts behind its numbers (multiples of 1/500,
1/164, 1/378, 1/541) fix the data, one greedy answer each, and IFEval by prompt; prompts, filters
and metrics are assumptions, so that each has a name.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PublicTest:
    """A task of the harness.

    data, config, split: its data set on the hub.   task, metric, filter: by the harness's names.
    file: below its tasks.
    needs: modules that the task imports and the harness does not install.   runs: whether it runs
    generated programs.
    """

    data: str
    split: str
    task: str
    metric: str
    filter: str
    file: str
    config: str | None = None
    needs: tuple[str, ...] = ()
    runs: bool = False


_MATH, _GSM8K, _HUMAN, _MBPP = (
    "HuggingFaceH4/MATH-500",
    "openai/gsm8k",
    "evalplus/humanevalplus",
    "evalplus/mbppplus",
)
_IFEVAL, _ARC = ("google/IFEval", "train", "ifeval"), ("allenai/ai2_arc", "test")
_ORDERS = ("langdetect", "immutabledict", "nltk")
_LATEX = ("sympy", "math_verify", "antlr4")
_MINERVA = "minerva_math/minerva_math500.yaml"
_LLAMA = "llama3/instruct/arc_challenge/arc_challenge_llama.yaml"
PUBLIC: Mapping[str, PublicTest] = {
    "math500": PublicTest(
        _MATH, "test", "minerva_math500", "exact_match", "none", _MINERVA, "default", _LATEX
    ),
    "gsm8k": PublicTest(
        _GSM8K,
        "test",
        "gsm8k_cot",
        "exact_match",
        "flexible-extract",
        "gsm8k/gsm8k-cot.yaml",
        "main",
    ),
    "humaneval_plus": PublicTest(
        _HUMAN,
        "test",
        "humaneval_plus",
        "pass@1",
        "create_test",
        "humaneval/humaneval_plus.yaml",
        runs=True,
    ),
    "mbpp_plus": PublicTest(
        _MBPP, "test", "mbpp_plus", "pass_at_1", "none", "mbpp/mbpp_plus.yaml", runs=True
    ),
    "ifeval": PublicTest(
        *_IFEVAL, "prompt_level_strict_acc", "none", "ifeval/ifeval.yaml", needs=_ORDERS
    ),
    "arc_challenge": PublicTest(
        *_ARC,
        "arc_challenge_chat",
        "exact_match",
        "remove_whitespace",
        "arc/arc_challenge_chat.yaml",
        "ARC-Challenge",
    ),
    # the same data asked or counted otherwise
    "math500_verified": PublicTest(
        _MATH, "test", "minerva_math500", "math_verify", "none", _MINERVA, "default", _LATEX
    ),
    "math500_plain": PublicTest(
        _MATH,
        "test",
        "hendrycks_math500",
        "exact_match",
        "none",
        "hendrycks_math/hendrycks_math500.yaml",
        "default",
    ),
    "gsm8k_strict": PublicTest(
        _GSM8K, "test", "gsm8k_cot", "exact_match", "strict-match", "gsm8k/gsm8k-cot.yaml", "main"
    ),
    "mbpp_plus_instruct": PublicTest(
        _MBPP,
        "test",
        "mbpp_plus_instruct",
        "pass_at_1",
        "extract_code",
        "mbpp/mbpp_plus_instruct.yaml",
        runs=True,
    ),
    "ifeval_loose": PublicTest(
        *_IFEVAL, "prompt_level_loose_acc", "none", "ifeval/ifeval.yaml", needs=_ORDERS
    ),
    "arc_challenge_llama": PublicTest(
        *_ARC, "arc_challenge_llama", "exact_match", "strict_match", _LLAMA, "ARC-Challenge"
    ),
}
