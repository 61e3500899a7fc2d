"""Score causal language models with lm-evaluation-harness (extra `language`), by greedy answers.

Uses `lm_eval.evaluate`: `simple_evaluate` does the same, but seeds the global generators, looks for
a git commit and lists the machine's packages, two seconds a call.
"""

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from featcal.errors import BadData, BadEnvironment
from featcal.models.load import quiet_transformers
from reproduction.language.answers import CHECKS, TestRow
from reproduction.language.generation import Change

INSTALL = "install the extra: pip install -c constraints.txt -e '.[language]'"
ALLOW_PROGRAMS = "HF_ALLOW_CODE_EVAL"  # the harness's own switch
FEW_SHOT_SEED = 1234  # the harness's own; the paper's tests draw no examples, they are fixed
METRIC, STOP = "correct", "\n"


@dataclass(frozen=True)
class Loaded:
    """A task of lm_eval with the key of its score, "metric,filter".

    runs: whether it runs generated programs, which HF_ALLOW_CODE_EVAL=1 must allow.
    """

    task: Any
    metric: str
    runs: bool = False


def score_tests(
    model: nn.Module,
    tokenizer: Any,
    tests: Mapping[str, Loaded],
    batch: int,
    change: Change | None = None,
) -> dict[str, tuple[float, int, list[bool] | None]]:
    """Return by test the score in percent, the number of prompts, and which answers are right.

    change: applied to the model while it answers a test. The last item is None where a prompt can
    be partly right.   Raises: BadEnvironment; BadData for a prompt longer than the model reads.
    """
    require_harness()
    found = {}
    with silent():
        reader = _language_model(model, tokenizer, batch)
        for key, test in tests.items():
            with change(model, key) if change else nullcontext():
                results, each = _evaluated(reader, key, test)
            right = [bool(value) for value in each] if all(v in (0, 1) for v in each) else None
            found[key] = 100 * float(results[test.metric]), len(test.task.eval_docs), right
    return found


def local_test(key: str, rows: Sequence[TestRow], check: str, new_tokens: int) -> Loaded:
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
        return Loaded(prepared(ConfigurableTask(config=config)), f"{METRIC},none")


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


def _evaluated(reader: Any, key: str, test: Loaded) -> tuple[Mapping[str, Any], list[Any]]:
    """Return the results of one test, and the metric of each prompt in the order of the data."""
    import lm_eval

    allowed = test.runs and os.environ.get(ALLOW_PROGRAMS) == "1"
    options = {"bootstrap_iters": 0, "log_samples": True, "confirm_run_unsafe_code": allowed}
    found = lm_eval.evaluate(reader, {"tasks": {key: test.task}}, **options)
    metric, _, chosen = test.metric.partition(",")
    kept = [one for one in found["samples"][key] if one["filter"] == chosen]
    kept.sort(key=lambda one: one["doc_id"])
    return found["results"][key], [one[metric] for one in kept]


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
