"""Stage `evaluate` of texts: scores of every model of a role and pool of texts, from what it generates."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from featcal.storage.results import packed
from reproduction.experiments.runs import DOMAIN_POOL, Pool
from reproduction.stages.context import Context
from reproduction.stages.score_files import write_score_files
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import Counts, score_models
from reproduction.suites.language import DOMAINS

BATCH = 64  # texts; answers do not depend on it


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>/; no rows where nothing plays the role."""
    write_score_files(key, score)


def score(context: Context, label: str, role: str, pool: Pool, models: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """Result rows of every model by its name: one per task of GLUE, or per test of the domains."""
    tasks = list(context.suite.language.tests) if pool == DOMAIN_POOL else context.suite.tasks_of(role, pool)
    return score_models(evaluate_model, context, label, role, pool, models, tasks)


def evaluate_model(context: Context, role: str, pool: Pool, model: Scored, corrected: Sequence[Scored]) -> dict[str, Counts]:
    """Scores of one model (or each task's own expert), and of the same with adapters before its head."""
    from featcal.models.device import torch_device
    from featcal.models.load import load_model
    from featcal.rivals.adapters import Adapters

    def loaded(folder: Any) -> Any:
        return load_model(folder).to(torch_device(context.suite.device))  # type: ignore[arg-type]

    shared = loaded(model.folder) if model.folder else None
    changes: dict[str, Any] = {model.name: None}
    for one in corrected:
        assert one.folder is not None
        changes[one.name] = Adapters.load(one.folder).before_head
    return answers(context, role, pool, lambda task: shared or loaded(context.layout.expert(role, pool, task)), changes)


def answers(
    context: Context, role: str, pool: Pool, model_of: Callable[[str], Any], changes: Mapping[str, Any], split: str = "test"
) -> dict[str, Counts]:
    """Scores by task of GLUE or by test of the domains, for every name what is done to the model while it answers.

    changes: given model and task; None leaves it as it is.   model_of: the same for all tests of the domains.
    """
    from featcal.models.load import load_tokenizer
    from reproduction.language.glue import metric_of, score_glue
    from reproduction.language.harness import score_tests
    from reproduction.suites.language_tests import load_tests
    from reproduction.suites.texts import load_texts

    tokenizer, texts = load_tokenizer(context.layout.base(role, pool)), context.layout.texts
    found: dict[str, Counts] = {name: {} for name in changes}
    if pool == DOMAIN_POOL:
        tests, model = load_tests(texts, context.suite.language, split), model_of("")
        for name, change in changes.items():
            scores = score_tests(model, tokenizer, tests, BATCH, change and partial(_in_domain, change))
            found[name] = {test: counted("accuracy", *score) for test, score in scores.items()}
        return found
    for task in context.suite.tasks_of(role, pool):
        model = model_of(task)
        samples = [(sample.text, sample.target or "") for sample in load_texts(texts, task, split)]
        for name, change in changes.items():
            score = score_glue(model, tokenizer, task, samples, batch=BATCH, change=change)
            found[name][task] = counted(metric_of(task), *score)
    return found


def counted(metric: str, value: float, count: int, right: list[bool] | None) -> dict[str, Any]:
    """A score as results hold it."""
    return {"metric": metric, "value": value, "count": count, "correct": packed(right)}


def _in_domain(change: Any, module: Any, test: str) -> Any:
    """The adapter of the domain that a test belongs to."""
    return change(module, DOMAINS[test])
