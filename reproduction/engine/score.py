"""Rows of models, and the stage `evaluate`: scores of all models of a role and pool."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from featcal.files import atomic_folder, read_json, write_json
from reproduction.engine.context import Setup, load_setup
from reproduction.engine.samples import Selection, seen_rows
from reproduction.engine.spec import ModelSpec, specs
from reproduction.experiments import CHAT_POOL, DOMAIN_POOL
from reproduction.prepare.suite import DOMAINS
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
    label: str, setup: Setup, models: Sequence[ModelSpec], evaluate: Evaluate | None = None
) -> dict[str, list[Row]]:
    """Return the rows of every model by its name; a job has a model and what corrects it."""
    alone = [model for model in models if not model.corrects]
    jobs = {m.name: (setup, m, [one for one in models if one.corrects == m.name]) for m in alone}
    found: dict[str, TaskScores] = {}
    for counts in setup.context.run(label, evaluate or evaluate_model, jobs).values():
        found |= counts
    rows: dict[str, list[Row]] = {}
    for model in models:
        words = {**setup.words, "metric": "accuracy", **model.words}
        rows[model.name] = [{**words, "task": t, **own} for t, own in found[model.name].items()]
    return rows


def evaluate_model(
    setup: Setup,
    model: ModelSpec,
    corrected: Sequence[ModelSpec],
    selection: Selection | None = None,
) -> dict[str, TaskScores]:
    """Return the scores of one model, or of each task's own expert, and of the same with adapters."""
    from featcal.baselines.adapters import Adapters

    selection = selection or Selection()
    shared = setup.load(model.folder) if model.folder else None
    adapters = {other.name: Adapters.load(other.folder) for other in corrected}

    def own(task: str) -> Any:
        return shared or setup.load(setup.expert(task))

    found = scored(setup, {model.name: own}, selection, adapters)
    if setup.pool == CHAT_POOL and shared is not None:  # an expert answers its own task alone
        found[model.name] |= unseen_chats(setup, shared, selection.split)
    return found


def answers(
    setup: Setup,
    models_of: Callable[[str], Mapping[str, Any]],
    read: Callable[[str], Any],
    changes: Mapping[str, Callable[[str, Any], Any]] | None = None,
    tasks: Sequence[str] = (),
) -> dict[str, TaskScores]:
    """Return what encoders get right, and what is right once the features of the first are changed.

    models_of, read: return a task's models by name, and its samples.
    """
    from safetensors.torch import load_file

    from featcal.evaluation.accuracy import evaluate_pool, percent

    batch = CACHED if setup.context.device.type == "cpu" else BATCH
    tensors = load_file(setup.heads)
    found: dict[str, TaskScores] = {}
    for task in tasks or setup.tasks:
        models, heads = models_of(task), {task: tensors[f"head/{task}"]}
        adapted = {name: (next(iter(models)), change) for name, change in (changes or {}).items()}
        given = (heads, tensors.get("visual_projection"), batch, adapted)
        for name, right in evaluate_pool(models, {task: read(task)}, *given).items():
            value, correct = percent(right[task]), packed(right[task])
            own = {"value": value, "count": len(right[task]), "correct": correct}
            found.setdefault(name, {})[task] = own
    return found


def scored(
    setup: Setup,
    models: Mapping[Any, Callable[[str], Any]],
    selection: Selection,
    adapters: Mapping[str, Any] | None = None,
) -> dict[Any, TaskScores]:
    """Return the scores of models, and of the first with adapters; of texts on the whole split.

    models: by name, what returns the model of a task.
    """
    found, adapters = dict[Any, TaskScores](), adapters or {}
    if not setup.of_texts:
        changes = {name: one.apply for name, one in adapters.items()}
        read = partial(selection.read, setup)
        return answers(setup, lambda t: {n: own(t) for n, own in models.items()}, read, changes)
    changes = {name: one.before_head for name, one in adapters.items()}
    for name, model_of in models.items():
        found |= generated(setup, model_of, {name: None, **changes}, selection.split)
        changes = {}
    return found


def for_all_tasks(models: Mapping[Any, Any]) -> dict[Any, Callable[[str], Any]]:
    """Return models as `scored` takes them."""
    return {name: lambda _, model=model: model for name, model in models.items()}


def averages(setup: Setup, models: Mapping[float, Any], selection: Selection) -> dict[float, float]:
    """Return the average score of models on samples that choose one."""
    judged = scored(setup, for_all_tasks(models), selection)
    return {name: average(judged[name]) for name in models}


def average(counts: TaskScores) -> float:
    return sum(one["value"] for one in counts.values()) / len(counts)


def highest(values: Mapping[float, float]) -> float:
    """Return the key with the highest average, to four decimals; of equal ones the smallest."""
    return max(values, key=lambda key: (round(values[key], 4), -key))


def generated(
    setup: Setup, model_of: Callable[[str], Any], changes: Mapping[str, Any], split: str = "test"
) -> dict[str, TaskScores]:
    """Return the scores of a language model by task of GLUE, by test of the domains or by chat.

    changes: by name, what is done to the model, given it and the task; None: nothing.
    """
    from featcal.models.load import load_tokenizer
    from reproduction.language.generation import metric_of, score_glue
    from reproduction.language.harness import load_tests, score_tests
    from reproduction.prepare.texts import load_texts

    if setup.pool == CHAT_POOL:
        given = (setup, model_of, setup.tasks, split)
        return {name: chat_answers(*given, change) for name, change in changes.items()}
    tokenizer, texts = load_tokenizer(setup.base), setup.texts
    found: dict[str, TaskScores] = {name: {} for name in changes}
    if setup.pool == DOMAIN_POOL:
        tests, model = load_tests(texts, setup.context.suite.language, split), model_of("")
        for name, change in changes.items():
            own = change and (lambda module, test, change=change: change(module, DOMAINS[test]))
            scores = score_tests(model, tokenizer, tests, TEXTS, own)
            found[name] = {test: _counted("accuracy", *one) for test, one in scores.items()}
        return found
    for task in setup.tasks:
        model = model_of(task)
        samples = [(sample.text, sample.target or "") for sample in load_texts(texts, task, split)]
        for name, change in changes.items():
            one = score_glue(model, tokenizer, task, samples, batch=TEXTS, change=change)
            found[name][task] = _counted(metric_of(task), *one)
    return found


def chat_answers(
    setup: Setup, model_of: Callable[[str], Any], tasks: Sequence[str], split: str, change: Any
) -> TaskScores:
    """Return the answers by task, by likelihood and, under <task>-greedy, by greedy exact match."""
    from featcal.models.load import load_tokenizer
    from reproduction.language.generation import right_answers
    from reproduction.prepare.chat import INSTRUCTIONS
    from reproduction.prepare.texts import load_texts

    tokenizer, found = load_tokenizer(setup.base), TaskScores()
    for task in tasks:
        rows = [(one.text, one.target or "") for one in load_texts(setup.texts, task, split)]
        words, model = [*INSTRUCTIONS[task].words.values()], model_of(task)
        with change(model, task) if change else nullcontext():
            likely, exact = right_answers(model, tokenizer, rows, words)
        for name, right in ((task, likely), (f"{task}{GREEDY}", exact)):
            found[name] = _counted("accuracy", 100 * sum(right) / len(right), len(right), right)
    return found


def unseen_chats(setup: Setup, model: Any, split: str) -> TaskScores:
    """Return the answers to tasks that no expert saw, and the log-likelihood of plain texts."""
    from featcal.models.load import load_tokenizer
    from reproduction.language.generation import log_likelihood
    from reproduction.prepare.texts import load_texts

    unseen = setup.context.suite.chat.unseen
    found = chat_answers(setup, lambda _: model, unseen, split, None)
    texts = [one.target or "" for one in load_texts(setup.texts, PLAIN, split)]
    value = log_likelihood(model, load_tokenizer(setup.base), texts)
    return found | {PLAIN: _counted("log_likelihood", value, len(texts), None)}


def _counted(metric: str, value: float, count: int, right: list[bool] | None) -> Row:
    return {"metric": metric, "value": value, "count": count, "correct": packed(right)}


REFERENCES = ("base", "expert", "multitask", "merged")  # methods that FeatCal is compared with
POINTS = 20  # of a loss curve


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>/: scores, curves, settings; of encoders also seen.csv."""
    setup = load_setup(key)
    models = specs(setup) if setup.plays else []
    experiments, words = setup.context.experiments, (setup.role, setup.pool)
    runs = {"calibrate": experiments.calibrated_in(*words), "adapt": experiments.adapted_in(*words)}
    with setup.context.recorded("evaluate", key), atomic_folder(setup.folder("scores")) as out:
        scores = score(f"evaluate {key}", setup, models)
        rows = [row for own in scores.values() for row in own]
        write_scores(out / "scores.csv", rows)
        shown = [{c: row[c] for c in SCORES} for row in rows if row["method"] in REFERENCES]
        write_rows(out / "references.csv", shown, SCORES)
        if not setup.of_texts:
            draws = [m.draw for m in models if m.draw is not None and m.method != "featcal"]
            write_rows(out / "seen.csv", seen_rows(setup, draws, rows), SEEN)
        write_rows(out / "curves.csv", _curves(setup, models), CURVES)
        settings = {n: {k: run.model_dump() for k, run in own.items()} for n, own in runs.items()}
        write_json(out / "settings.json", settings)


def _curves(setup: Setup, models: Sequence[ModelSpec]) -> Iterator[dict[str, Any]]:
    """Yield the loss averaged over consecutive steps; adapters' is the mean over tasks."""
    for model in models:
        loss, words = None, model.words
        if model.method == "merged":
            record = model.folder / "merge.json"
            loss = read_json(record).get("loss") if record.is_file() else None
            words["seed"] = model.draw.seed if model.draw else ""
        elif model.corrects:
            by_task = read_json(model.folder / "adapters.json")["loss"].values()
            loss = [sum(losses) / len(losses) for losses in zip(*by_task, strict=True)]
        if isinstance(loss, list) and loss:  # mergers without steps record something else, or none
            length = -(-len(loss) // POINTS)
            for start in range(0, len(loss), length):
                part = loss[start : start + length]
                point = {"step": start + len(part), "loss": float(sum(part) / len(part))}
                yield {**setup.words, **words, **point}
