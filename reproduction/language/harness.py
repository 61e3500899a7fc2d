"""Causal language models through lm-evaluation-harness, by its Python interface: greedy answers,
scored test by test.

Uses `lm_eval.evaluate`, the inner one of its two calls: `simple_evaluate` does the same, but seeds
the global generators, looks for a git commit and lists the machine's packages, two seconds a call.
The harness comes with the extra `language`.
"""

import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from featcal.errors import BadData, BadEnvironment
from featcal.models.load import quiet_transformers
from reproduction.language.generation import Change

INSTALL = "install the extra: pip install -c constraints.txt -e '.[language]'"
ALLOW_PROGRAMS = "HF_ALLOW_CODE_EVAL"  # the harness's own switch
FEW_SHOT_SEED = 1234  # the harness's own; the paper's tests draw no examples, they are fixed


@dataclass(frozen=True)
class Loaded:
    """A test that the harness has loaded.

    task: its object of lm_eval.  metric: the key of the score in the harness's results,
    "metric,filter".
    runs: whether the harness itself runs what was generated, which HF_ALLOW_CODE_EVAL=1 must allow.
    right: where the metric is judged over all prompts together, what then tells which of them are
    right.
    """

    task: Any
    metric: str
    runs: bool = False
    right: Callable[[Sequence[Any]], list[bool]] | None = None


def score_tests(
    model: nn.Module,
    tokenizer: Any,
    tests: Mapping[str, Loaded],
    batch: int,
    change: Change | None = None,
    chat: bool = False,
    progress: bool = False,
) -> dict[str, tuple[float, int, list[bool] | None]]:
    """Score in percent, number of prompts, and of each whether its answer is right, by test.

    change:   what is done to the model while it answers one test, given model and test.
    chat:     whether prompts, worked examples among them, are put as a chat by the tokenizer's own
              template.
    progress: whether the harness shows its bars; its warnings are not shown.
    Returns:  None in place of the last where a prompt can be partly right.
    Raises:   BadEnvironment without the package; BadData for a prompt longer than the model can
              read.
    """
    require_harness()
    found = {}
    with silent(bars=progress):
        reader = _language_model(model, tokenizer, batch)
        for key, test in tests.items():
            with change(model, key) if change else nullcontext():
                results, each = _evaluated(reader, key, test, chat)
            found[key] = (
                100 * float(results[test.metric]),
                len(test.task.eval_docs),
                _right(test, each),
            )
    return found


def configured(config: dict[str, Any]) -> Any:
    """A task of lm_eval from its configuration. Raises: BadEnvironment without the package."""
    require_harness()
    from lm_eval.api.task import ConfigurableTask

    with silent():
        return prepared(ConfigurableTask(config=config))


def prepared(task: Any) -> Any:
    """A task as `simple_evaluate` prepares it: no examples where it names no number, and drawn, if
    at all, from a seed.
    """
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
def silent(bars: bool = False) -> Iterator[None]:
    """The harness logs every step and draws a bar a test; errors still come as exceptions."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet_transformers(), nullcontext() if bars else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _evaluated(
    reader: Any, key: str, test: Loaded, chat: bool
) -> tuple[Mapping[str, Any], list[Any]]:
    """Results of one test, and the metric's value of each prompt in the order of the data."""
    import lm_eval

    allowed = test.runs and os.environ.get(ALLOW_PROGRAMS) == "1"
    options = {"bootstrap_iters": 0, "log_samples": True, "confirm_run_unsafe_code": allowed}
    options |= {"apply_chat_template": chat, "fewshot_as_multiturn": chat}
    found = lm_eval.evaluate(reader, {"tasks": {key: test.task}}, **options)
    metric, _, chosen = test.metric.partition(",")
    kept = sorted(
        (one for one in found["samples"][key] if one["filter"] == chosen),
        key=lambda one: one["doc_id"],
    )
    return found["results"][key], [one[metric] for one in kept]


def _right(test: Loaded, each: list[Any]) -> list[bool] | None:
    if test.right:
        return test.right(each)
    return [bool(value) for value in each] if all(value in (0, 1) for value in each) else None


def _language_model(model: nn.Module, tokenizer: Any, batch: int) -> Any:
    """The model as the harness's own class for transformers, which pads prompts on the left and
    masks the padding.
    """
    from lm_eval.models.huggingface import HFLM

    class Reader(HFLM):  # type: ignore[misc]
        def tok_batch_encode(
            self,
            strings: list[str],
            padding_side: str = "left",
            left_truncate_len: int | None = None,
            truncation: bool = False,
        ) -> tuple[Tensor, Tensor]:
            """The harness would cut a prompt from the left and go on."""
            ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
            if left_truncate_len and ids.shape[1] > left_truncate_len:
                longest = f"a prompt of {ids.shape[1]} tokens, but the model reads {left_truncate_len} before its answer"
                raise BadData(
                    f"prompt {max(strings, key=len)[:40]!r}…",
                    longest,
                    "leave it out, or take a model that reads more",
                )
            return ids, mask

    return Reader(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch)
