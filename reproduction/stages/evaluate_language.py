"""Stage `evaluate` of texts: scores of every model of a role and pool of texts, from what it generates."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from featcal.storage.results import packed, write_scores
from reproduction.experiments.runs import DOMAIN_POOL, Pool, role_and_pool
from reproduction.stages.context import Context, load_context, recorded
from reproduction.stages.scored import Scored, scored
from reproduction.stages.scoring import Counts, score_models
from reproduction.suites.language import DOMAINS

BATCH = 64  # texts; answers do not depend on it
TEST = "test"


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>.csv and .correct.csv; no rows where nothing plays the role."""
    context = load_context()
    role, pool = role_and_pool(key)
    with recorded(context, "evaluate", key):
        rows: list[dict[str, Any]] = []
        if context.plays(role, pool):
            scores = score(context, f"evaluate {key}", role, pool, scored(context, role, pool))
            rows = [row for own in scores.values() for row in own]
        write_scores(context.layout.scores(key), rows)


def score(context: Context, label: str, role: str, pool: Pool, models: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """Result rows of every model by its name: one per task of GLUE, or per test of the domains."""
    tasks = list(context.suite.language.tests) if pool == DOMAIN_POOL else context.suite.tasks_of(role, pool)
    return score_models(evaluate_model, context, label, role, pool, models, tasks)


def evaluate_model(context: Context, role: str, pool: Pool, model: Scored, corrected: Sequence[Scored]) -> dict[str, Counts]:
    """Scores of one model (or each task's own expert), and of the same with adapters before its head."""
    from featcal.models.load import load_tokenizer

    changes = {one.name: None if one is model else _change(one) for one in (model, *corrected)}
    tokenizer = load_tokenizer(context.layout.base(role, pool))
    if pool == DOMAIN_POOL:
        return _on_tests(context, model, changes, tokenizer)
    return _on_glue(context, role, pool, model, changes, tokenizer)


def _on_glue(
    context: Context, role: str, pool: Pool, model: Scored, changes: Mapping[str, Any], tokenizer: Any
) -> dict[str, Counts]:
    from reproduction.language.glue import metric_of, score_glue
    from reproduction.suites.texts import load_texts

    found: dict[str, Counts] = {name: {} for name in changes}
    shared = _loaded(context, model.folder) if model.folder else None
    for task in context.suite.tasks_of(role, pool):
        loaded = shared or _loaded(context, context.layout.expert(role, pool, task))
        samples = [(sample.text, sample.target or "") for sample in load_texts(context.layout.texts, task, TEST)]
        for name, change in changes.items():
            value, count, right = score_glue(loaded, tokenizer, task, samples, batch=BATCH, change=change)
            found[name][task] = {"metric": metric_of(task), "value": value, "count": count, "correct": packed(right)}
    return found


def _on_tests(context: Context, model: Scored, changes: Mapping[str, Any], tokenizer: Any) -> dict[str, Counts]:
    from reproduction.language.harness import score_tests
    from reproduction.suites.language_tests import load_tests

    assert model.folder is not None  # every expert of a domain is a model of its own
    loaded = _loaded(context, model.folder)
    tests = load_tests(context.layout.texts, context.suite.language)
    found: dict[str, Counts] = {}
    for name, change in changes.items():
        scores = score_tests(loaded, tokenizer, tests, BATCH, change and partial(_in_domain, change))
        found[name] = {
            test: {"metric": "accuracy", "value": value, "count": count, "correct": packed(right)}
            for test, (value, count, right) in scores.items()
        }
    return found


def _in_domain(change: Any, module: Any, test: str) -> Any:
    """The adapter of the domain that a test belongs to."""
    return change(module, DOMAINS[test])


def _change(one: Scored) -> Any:
    """What adapters do to the model while it answers, given model and task."""
    from featcal.rivals.adapters import Adapters

    assert one.folder is not None
    return Adapters.load(one.folder).before_head


def _loaded(context: Context, folder: Any) -> Any:
    from featcal.models.device import torch_device
    from featcal.models.load import load_model

    return load_model(folder).to(torch_device(context.suite.device))  # type: ignore[arg-type]
