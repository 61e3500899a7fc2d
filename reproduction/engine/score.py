"""Rows of models, and the stage `evaluate`: scores of all models of a role and pool."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from safetensors.torch import load_file

from featcal.baselines.adapters import Adapters
from featcal.evaluation.accuracy import evaluate_pool, percent
from featcal.files import atomic_folder, read_json, write_json
from featcal.models.load import load_tokenizer
from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import Selection, seen_rows
from reproduction.engine.spec import ModelSpec, merged_model, specs
from reproduction.experiments import CHAT_POOL, DOMAIN_POOL
from reproduction.language.generation import log_likelihood, metric_of, right_answers, score_glue
from reproduction.language.harness import load_tests, score_tests
from reproduction.prepare.chat import INSTRUCTIONS
from reproduction.prepare.suite import DOMAINS
from reproduction.prepare.texts import load_texts
from reproduction.results import (
    CURVES,
    GREEDY,
    PLAIN,
    SCORES,
    SEEN,
    Row,
    packed,
    write_rows,
    write_scores,
)

# Samples at a time, on which scores do not depend: few on a CPU, whose cache then holds the outputs.
BATCH, CACHED, TEXTS = 250, 64, 64
TaskScores = dict[str, Row]  # by task: value, count, correct (packed); metric unless accuracy
Evaluate = Callable[..., dict[str, TaskScores]]  # called as `evaluate_model`


def score(
    label: str,
    setup: Setup,
    models: Sequence[ModelSpec],
    evaluate: Evaluate | None = None,
    selection: Selection | None = None,
) -> list[Row]:
    """Return the rows of models; a job is a model and its adapters.

    A merged model that adapters correct is evaluated, but has rows only if it is among the models.
    evaluate: in place of `evaluate_model` with this selection.
    """
    names = {model.name for model in models}
    missing = {m.corrects: m.upstream for m in models if m.corrects and m.corrects not in names}
    corrected = [merged_model(setup, upstream) for upstream in missing.values()]
    uncorrected = [*corrected, *(model for model in models if not model.corrects)]
    jobs = {m.name: (setup, m, [a for a in models if a.corrects == m.name]) for m in uncorrected}
    scores: dict[str, TaskScores] = {}
    evaluate = evaluate or partial(evaluate_model, selection=selection or Selection())
    for evaluated in setup.context.run(label, evaluate, jobs).values():
        scores |= evaluated
    rows = []
    for model in models:
        keys = setup.row_keys | {"metric": "accuracy"} | model.row_keys
        rows += [keys | {"task": task} | row for task, row in scores[model.name].items()]
    return rows


def evaluate_model(
    setup: Setup,
    model: ModelSpec,
    corrected: Sequence[ModelSpec],
    selection: Selection,
) -> dict[str, TaskScores]:
    """Return the scores of one model, or of each task's own expert, and of the same with adapters."""
    shared = setup.load(model.folder) if model.folder else None
    adapters = {other.name: Adapters.load(other.folder) for other in corrected}

    def model_of(task: str) -> Any:
        return shared or setup.load(setup.expert(task))

    scores = model_scores(setup, {model.name: model_of}, selection, adapters)
    if setup.pool == CHAT_POOL and shared is not None:  # an expert answers its own task alone
        scores[model.name] |= unseen_chat_scores(setup, shared, selection.split)
    return scores


def task_scores(
    setup: Setup,
    models_of: Callable[[str], Mapping[str, Any]],
    read: Callable[[str], Any],
    changes: Mapping[str, Callable[[str, Any], Any]] | None = None,
    tasks: Sequence[str] = (),
) -> dict[str, TaskScores]:
    """Return the scores of encoders, and of the first one with changed features.

    models_of, read: return a task's models by name, and its samples.
    """
    batch = CACHED if setup.context.device.type == "cpu" else BATCH
    tensors = load_file(setup.heads)
    scores: dict[str, TaskScores] = {}
    for task in tasks or setup.tasks:
        models, heads = models_of(task), {task: tensors[f"head/{task}"]}
        adapted = {name: (next(iter(models)), change) for name, change in (changes or {}).items()}
        arguments = (heads, tensors.get("visual_projection"), batch, adapted)
        for name, right in evaluate_pool(models, {task: read(task)}, *arguments).items():
            value, correct = percent(right[task]), packed(right[task])
            result = {"value": value, "count": len(right[task]), "correct": correct}
            scores.setdefault(name, {})[task] = result
    return scores


def model_scores(
    setup: Setup,
    models: Mapping[Any, Callable[[str], Any]],
    selection: Selection,
    adapters: Mapping[str, Any] | None = None,
) -> dict[Any, TaskScores]:
    """Return the scores of models, and of the first with adapters; texts: on the whole split.

    models: functions that return the model of a task, by name.
    """
    scores, adapters = dict[Any, TaskScores](), adapters or {}
    if not setup.of_texts:
        changes = {name: adapter.apply for name, adapter in adapters.items()}
        read = partial(selection.read, setup)
        return task_scores(setup, lambda t: {n: f(t) for n, f in models.items()}, read, changes)
    changes = {name: adapter.before_head for name, adapter in adapters.items()}
    for name, model_of in models.items():
        scores |= language_scores(setup, model_of, {name: None, **changes}, selection.split)
        changes = {}
    return scores


def for_all_tasks(models: Mapping[Any, Any]) -> dict[Any, Callable[[str], Any]]:
    """Return models as `model_scores` takes them."""
    return {name: lambda _, model=model: model for name, model in models.items()}


def averages(setup: Setup, models: Mapping[float, Any], selection: Selection) -> dict[float, float]:
    """Return each model's average score on a selection of samples."""
    scores = model_scores(setup, for_all_tasks(models), selection)
    return {name: average(scores[name]) for name in models}


def average(scores: TaskScores) -> float:
    return sum(score["value"] for score in scores.values()) / len(scores)


def highest(values: Mapping[float, float]) -> float:
    """Return the key with the highest average, to four decimals; of equal ones the smallest."""
    return max(values, key=lambda key: (round(values[key], 4), -key))


def language_scores(
    setup: Setup, model_of: Callable[[str], Any], changes: Mapping[str, Any], split: str = "test"
) -> dict[str, TaskScores]:
    """Return the scores of a language model by task of GLUE, by test of the domains or by chat.

    changes: context managers by name, given the model and the task; None: no change.
    """
    if setup.pool == CHAT_POOL:
        arguments = (setup, model_of, setup.tasks, split)
        return {name: chat_scores(*arguments, change) for name, change in changes.items()}
    tokenizer, texts = load_tokenizer(setup.base), setup.texts
    scores: dict[str, TaskScores] = {name: {} for name in changes}
    if setup.pool == DOMAIN_POOL:
        tests, model = load_tests(texts, setup.context.suite.language, split), model_of("")
        for name, change in changes.items():
            adapt = change and (lambda m, test, change=change: change(m, DOMAINS[test]))
            results = score_tests(model, tokenizer, tests, TEXTS, adapt)
            scores[name] = {test: _score("accuracy", *result) for test, result in results.items()}
        return scores
    for task in setup.tasks:
        model = model_of(task)
        samples = [(sample.text, sample.target or "") for sample in load_texts(texts, task, split)]
        for name, change in changes.items():
            result = score_glue(model, tokenizer, task, samples, batch=TEXTS, change=change)
            scores[name][task] = _score(metric_of(task), *result)
    return scores


def chat_scores(
    setup: Setup, model_of: Callable[[str], Any], tasks: Sequence[str], split: str, change: Any
) -> TaskScores:
    """Return the scores by task, by likelihood and, under <task>-greedy, by greedy exact match."""
    tokenizer, scores = load_tokenizer(setup.base), TaskScores()
    for task in tasks:
        rows = [(s.text, s.target or "") for s in load_texts(setup.texts, task, split)]
        choices, model = [*INSTRUCTIONS[task].answers.values()], model_of(task)
        with change(model, task) if change else nullcontext():
            likely, exact = right_answers(model, tokenizer, rows, choices)
        for name, right in ((task, likely), (f"{task}{GREEDY}", exact)):
            scores[name] = _score("accuracy", 100 * sum(right) / len(right), len(right), right)
    return scores


def unseen_chat_scores(setup: Setup, model: Any, split: str) -> TaskScores:
    """Return the scores of tasks that no expert saw, and the log-likelihood of plain texts."""
    unseen = setup.context.suite.chat.unseen
    scores = chat_scores(setup, lambda _: model, unseen, split, None)
    texts = [sample.target or "" for sample in load_texts(setup.texts, PLAIN, split)]
    value = log_likelihood(model, load_tokenizer(setup.base), texts)
    return scores | {PLAIN: _score("log_likelihood", value, len(texts), None)}


def _score(metric: str, value: float, count: int, right: list[bool] | None) -> Row:
    return {"metric": metric, "value": value, "count": count, "correct": packed(right)}


REFERENCES = ("base", "expert", "multitask", "merged")  # methods that FeatCal is compared with
POINTS = 20  # of a loss curve


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>/: scores, curves, settings; of encoders also seen.csv."""
    setup = load_setup(key)
    models = specs(setup) if setup.available else []
    experiments, entry = setup.context.experiments, (setup.role, setup.pool)
    runs = {"calibrate": experiments.calibrated_in(*entry), "adapt": experiments.adapted_in(*entry)}
    with setup.context.recorded("evaluate", key), atomic_folder(setup.folder("scores")) as out:
        rows = score(f"evaluate {key}", setup, models)
        write_scores(out / "scores.csv", rows)
        references = [{c: row[c] for c in SCORES} for row in rows if row["method"] in REFERENCES]
        write_rows(out / "references.csv", references, SCORES)
        if not setup.of_texts:
            write_rows(out / "seen.csv", seen_rows(setup, models, rows), SEEN)
        write_rows(out / "curves.csv", _curves(setup, models), CURVES)
        settings = {n: {k: r.model_dump() for k, r in group.items()} for n, group in runs.items()}
        write_json(out / "settings.json", settings)


def _curves(setup: Setup, models: Sequence[ModelSpec]) -> Iterator[dict[str, Any]]:
    """Yield the loss averaged over consecutive steps; adapters' is the mean over tasks."""
    for model in models:
        loss, keys = None, model.row_keys
        if model.method == "merged":
            record = model.folder / "merge.json"
            loss = read_json(record).get("loss") if record.is_file() else None
            keys["seed"] = model.draw.seed if model.draw else ""
        elif model.corrects:
            by_task = read_json(model.folder / "adapters.json")["loss"].values()
            loss = [sum(losses) / len(losses) for losses in zip(*by_task, strict=True)]
        if isinstance(loss, list) and loss:  # mergers without steps record something else, or none
            length = -(-len(loss) // POINTS)
            for start in range(0, len(loss), length):
                part = loss[start : start + length]
                point = {"step": start + len(part), "loss": float(sum(part) / len(part))}
                yield {**setup.row_keys, **keys, **point}
