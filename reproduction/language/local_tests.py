"""Tests on rows of our own, as configurations of lm-evaluation-harness: prompt in, one line out,
checked by a function.

A row has "prompt" and "target", and what its check needs: "tests" and "header" (programs),
"instructions" (JSON).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from featcal.errors import BadData, UnknownKey
from reproduction.language.answers import arithmetic, instructions, letter
from reproduction.language.harness import Loaded, configured
from reproduction.language.sandbox import Program, run_programs

Row = Mapping[str, Any]
METRIC = "correct"
STOP = "\n"


def local_test(key: str, rows: Sequence[Row], check: str, new_tokens: int) -> Loaded:
    """One test on these rows, to be given to `score_tests`.

    check:      "arithmetic", "letter", "instructions" or "program".
    new_tokens: after which an answer is cut; it ends at its first line break or end token.
    Raises:     BadData without rows or columns; UnknownKey for a check that does not exist;
                BadEnvironment.
    """
    from datasets import Dataset

    if check not in NEEDED:
        raise UnknownKey("checks of answers", check, list(NEEDED))
    lacking = [name for name in ("prompt", *NEEDED[check]) if not rows or name not in rows[0]]
    if lacking:
        raise BadData(
            f"test {key}",
            f"no {'rows' if not rows else ', '.join(lacking)}",
            "make its file again: prepare writes it",
        )
    judge = CHECKS.get(check)
    share_passed, passed = judged_together()
    config = {
        "task": key,
        "custom_dataset": lambda **_: {"test": Dataset.from_list([dict(row) for row in rows])},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda row: row["prompt"],
        "doc_to_target": lambda row: "",  # the check below reads the row itself
        "generation_kwargs": {"until": [STOP], "max_gen_toks": new_tokens, "do_sample": False},
        "process_results": lambda row, answers: {
            METRIC: judge(row, answers[0]) if judge else program(row, answers[0])
        },
        # programs wait until all are there: one interpreter for all of them
        "metric_list": [
            {
                "metric": METRIC,
                "aggregation": "mean" if judge else share_passed,
                "higher_is_better": True,
            }
        ],
        "metadata": {},
    }
    return Loaded(configured(config), f"{METRIC},none", right=None if judge else passed)


CHECKS: dict[str, Callable[[Row, str], bool]] = {
    "arithmetic": lambda row, answer: arithmetic(answer, row["target"]),
    "letter": lambda row, answer: letter(answer, row["target"]),
    "instructions": lambda row, answer: instructions(answer, row["instructions"]),
}
NEEDED = {
    "arithmetic": ("target",),
    "letter": ("target",),
    "instructions": ("instructions",),
    "program": ("tests", "header"),
}


def program(row: Row, answer: str) -> Program:
    """What was generated behind the code that the row begins with, and the row's tests."""
    return Program(row["header"] + answer + "\n", row["tests"])


def judged_together() -> tuple[
    Callable[[Sequence[Program]], float], Callable[[Sequence[Program]], list[bool]]
]:
    """Which share of the programs pass their tests (pass@1 of one greedy answer each), and then,
    run only once, which of them.
    """
    last: list[bool] = []

    def share_passed(programs: Sequence[Program]) -> float:
        last[:] = [outcome.passed for outcome in run_programs(programs)]
        return sum(last) / len(last)

    return share_passed, lambda programs: list(last)
