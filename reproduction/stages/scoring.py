"""Result rows of models of a role and pool: encoders by their features, language models by what
they generate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from reproduction.experiments.runs import DOMAIN_POOL, TEXT_POOLS, Pool
from reproduction.prepare.suite import DOMAINS
from reproduction.results import packed
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.workers import fan_out

# Samples at a time, on which scores do not depend; on a CPU so few that what a block puts out stays
# in its cache: a sentence
# encoder then takes two thirds of the time that it takes with 250.
BATCH, CACHED, TEXTS = 250, 64, 64
Counts = dict[
    str, dict[str, Any]
]  # by task: value, count, correct (packed); metric, where that is not accuracy
Most = Callable[[str, int], Any]


def score(
    context: Context, label: str, role: str, pool: Pool, models: Sequence[Scored]
) -> dict[str, list[dict[str, Any]]]:
    """Result rows of every model by its name: one per task, of the domains per test, with the words
    that results call it by.
    """
    tasks = (
        list(context.suite.language.tests)
        if pool == DOMAIN_POOL
        else context.suite.tasks_of(role, pool)
    )
    return score_models(evaluate_model, context, label, role, pool, models, tasks)


def score_models(
    evaluate_one: Callable[..., dict[str, Counts]],
    context: Context,
    label: str,
    role: str,
    pool: Pool,
    models: Sequence[Scored],
    tasks: Sequence[str],
) -> dict[str, list[dict[str, Any]]]:
    """The rows that one way to evaluate a model, and adapters behind it, makes of all models.

    Each model is a job, with all adapters behind it: it is loaded once, and memory holds one of
    them in every worker.
    """
    jobs = {}
    for model in models:
        if not model.adapted_model:
            jobs[model.name] = (
                context,
                role,
                pool,
                model,
                [other for other in models if other.adapted_model == model.name],
            )
    found: dict[str, Counts] = {}
    for _, counts in fan_out(label, evaluate_one, jobs, context.suite.workers):
        found |= counts
    common = {"suite": context.suite.name, "role": role, "pool": pool, "metric": "accuracy"}
    return {
        m.name: [{**common, **m.words, "task": task, **found[m.name][task]} for task in tasks]
        for m in models
    }


def evaluate_model(
    context: Context,
    role: str,
    pool: Pool,
    model: Scored,
    corrected: Sequence[Scored],
    most: Most | None = None,
) -> dict[str, Counts]:
    """Scores of one model (or each task's own expert) and of the same with adapters, by task:
    behind an encoder's last feature, before a language model's head.

    most: of an encoder, as of `samples_of`.
    """
    from featcal.baselines.adapters import Adapters
    from featcal.models.load import load_as_calibrated, torch_device

    def loaded(folder: Any) -> Any:
        return load_as_calibrated(folder).to(torch_device(context.suite.device))  # type: ignore[arg-type]

    shared = loaded(model.folder) if model.folder else None
    adapters = {}
    for other in corrected:
        assert other.folder is not None  # only each task's own expert has none
        adapters[other.name] = Adapters.load(other.folder)

    def own(task: str) -> Any:
        return shared or loaded(context.layout.expert(role, pool, task))

    if pool in TEXT_POOLS:
        changes = {model.name: None, **{name: one.before_head for name, one in adapters.items()}}
        return generated(context, role, pool, own, changes)
    read = partial(samples_of, context, role, pool, most=most)
    return answers(
        context,
        role,
        pool,
        lambda task: {model.name: own(task)},
        read,
        {n: one.apply for n, one in adapters.items()},
    )


def samples_of(
    context: Context,
    role: str,
    pool: Pool,
    task: str,
    split: str = "test",
    most: Most | None = None,
) -> Any:
    """Samples of one task where the suite computes.   most: of a task and its number of samples the
    indices to answer.
    """
    from featcal.data.images import ImageSet
    from featcal.models.load import torch_device
    from reproduction.prepare.sources import load_task

    samples = load_task(context.layout.data_of(role), task, split, context.layout.base(role, pool))
    samples = samples.take(most(task, len(samples.labels))) if most else samples
    return (
        replace(samples, device=torch_device(context.suite.device))
        if isinstance(samples, ImageSet)
        else samples
    )


def drawn(most: int, seed: int, task: str, count: int) -> list[int]:
    """At most so many samples of a task, in their order."""
    from featcal.data.batches import draw_indices

    return sorted(draw_indices(task, count, min(most, count), seed).tolist())


def answers(
    context: Context,
    role: str,
    pool: Pool,
    models_of: Callable[[str], Mapping[str, Any]],
    read: Callable[[str], Any],
    changes: Mapping[str, Callable[[str, Any], Any]] | None = None,
    tasks: Sequence[str] = (),
) -> dict[str, Counts]:
    """What encoders get right, by their names, and by others what is right once the features of the
    first are changed.

    models_of, read: of a task its models by name, and its samples.   tasks: all of the pool where
    none is named.
    """
    from safetensors.torch import load_file

    from featcal.evaluation.zero_shot import evaluate_pool, percent
    from featcal.models.load import torch_device

    batch = CACHED if torch_device(context.suite.device).type == "cpu" else BATCH
    tensors = load_file(context.layout.heads(role, pool))
    found: dict[str, Counts] = {}
    for task in tasks or context.suite.tasks_of(role, pool):
        models, heads = models_of(task), {task: tensors[f"head/{task}"]}
        adapted = {name: (next(iter(models)), change) for name, change in (changes or {}).items()}
        judged = evaluate_pool(
            models, {task: read(task)}, heads, tensors.get("visual_projection"), batch, adapted
        )
        for name, right in judged.items():
            own = {
                "value": percent(right[task]),
                "count": len(right[task]),
                "correct": packed(right[task]),
            }
            found.setdefault(name, {})[task] = own
    return found


def averages(
    context: Context, role: str, pool: Pool, models: Mapping[float, Any], read: Callable[[str], Any]
) -> dict[float, float]:
    """Average accuracy over the tasks of every encoder, in percent, on the samples that `read`
    gives of a task.
    """
    judged = answers(
        context, role, pool, lambda _: {str(name): model for name, model in models.items()}, read
    )
    return {
        name: sum(one["value"] for one in judged[str(name)].values()) / len(judged[str(name)])
        for name in models
    }


def generated(
    context: Context,
    role: str,
    pool: Pool,
    model_of: Callable[[str], Any],
    changes: Mapping[str, Any],
    split: str = "test",
) -> dict[str, Counts]:
    """Scores of a language model by task of GLUE or test of the domains, for every name what is
    done to it while it answers.

    changes: given model and task; None leaves it as it is.   model_of: the same for all tests of
    the domains.
    """
    from featcal.models.load import load_tokenizer
    from reproduction.language.generation import metric_of, score_glue
    from reproduction.language.harness import score_tests
    from reproduction.language.tests import load_tests
    from reproduction.prepare.texts import load_texts

    tokenizer, texts = load_tokenizer(context.layout.base(role, pool)), context.layout.texts
    found: dict[str, Counts] = {name: {} for name in changes}
    if pool == DOMAIN_POOL:
        tests, model = load_tests(texts, context.suite.language, split), model_of("")
        for name, change in changes.items():
            scores = score_tests(
                model, tokenizer, tests, TEXTS, change and partial(_in_domain, change)
            )
            found[name] = {test: counted("accuracy", *score) for test, score in scores.items()}
        return found
    for task in context.suite.tasks_of(role, pool):
        model = model_of(task)
        samples = [(sample.text, sample.target or "") for sample in load_texts(texts, task, split)]
        for name, change in changes.items():
            score = score_glue(model, tokenizer, task, samples, batch=TEXTS, change=change)
            found[name][task] = counted(metric_of(task), *score)
    return found


def counted(metric: str, value: float, count: int, right: list[bool] | None) -> dict[str, Any]:
    """A score as results hold it."""
    return {"metric": metric, "value": value, "count": count, "correct": packed(right)}


def _in_domain(change: Any, module: Any, test: str) -> Any:
    """The adapter of the domain that a test belongs to."""
    return change(module, DOMAINS[test])
