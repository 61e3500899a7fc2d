"""Stage `prepare`: base, experts and heads of a role and pool.

An expert that is finished stays finished: it lies outside the stage's outputs until all are, so
that an interrupted run goes on.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from featcal.errors import HubUnreachable
from featcal.files import atomic_folder
from reproduction.experiments.runs import Pool, role_and_pool
from reproduction.prepare import experts
from reproduction.prepare.experts import ADAPTERS, HEADS, ExpertJob, model_folder
from reproduction.prepare.packages import WEIGHTS
from reproduction.prepare.suite import FINE_TUNE, LanguageRole, Role, SentenceRole
from reproduction.stages.context import Context, fingerprint, load_context, not_run, recorded
from reproduction.stages.workers import console, fan_out

FIRST = 0  # seed of the sentence experts' training; the study expert_seeds trains others


def run(key: str) -> None:
    """Write outputs/<suite>/prepared/<key>/: base/, experts/<task>/, heads.safetensors of encoders,
    adapters/ of language models.

    Heads of every task of the pool; experts of those that no smaller pool holds. The folder is
    empty where nothing plays the role, and, which is said, where the package of a sentence encoder
    cannot be fetched.
    """
    context = load_context()
    name, pool = role_and_pool(key)
    role, out = context.role(name), context.layout.prepared(name, pool)
    with recorded(context, "prepare", key) as told:
        if not context.knows(name, pool):
            not_run(context, f"prepare {key}", out)
            return
        try:
            store = made(context, role, name, pool)
        except HubUnreachable as error:
            if not isinstance(role, SentenceRole):
                raise
            told["not_run"] = str(error)
            with atomic_folder(out):
                console.print(
                    f"prepare {key}: {name} is not run, its pages will say so; later: dvc repro -f prepare@{key}"
                )
                console.print(str(error))
            return
        with atomic_folder(out) as folder:
            (store / "experts").mkdir(exist_ok=True)  # a pool may need no further expert
            for part in ("base", "experts", ADAPTERS):
                if (store / part).is_dir():
                    shutil.copytree(store / part, folder / part)
            if (store / HEADS).is_file():
                shutil.copyfile(store / HEADS, folder / HEADS)
    for old in store.parent.glob(f"{key}-*"):  # interrupted runs with other settings too
        shutil.rmtree(old)


def made(context: Context, role: Any, name: str, pool: Pool) -> Path:
    """The folder that holds base, heads and experts of a role and pool, what is missing made."""
    if isinstance(role, SentenceRole):
        return sentences(context, role, name, pool)
    return (
        texts(context, role, name, pool)
        if isinstance(role, LanguageRole)
        else images(context, role, name, pool)
    )


def images(context: Context, role: Role, name: str, pool: Pool) -> Path:
    """The same of image encoders."""
    suite, layout, tasks, here = (
        context.suite,
        context.layout,
        context.suite.tasks_of(name, pool),
        made_here(context, name, pool),
    )
    tuned = {task: suite.fine_tuning(task) for task in here}
    settings = [
        role.model_dump(),
        suite.data.model_dump(),
        tasks,
        {t: one.model_dump() for t, one in tuned.items()},
        suite.heads,
        suite.expert_seed,
    ]
    store = layout.unfinished(
        f"{name}-{pool}-{digest(settings, *local_weights(layout.root / role.clip))}"
    )
    first = (
        model_folder(layout.root, role.clip, layout.pins),
        layout.data,
        tasks,
        suite.heads,
        suite.device,
        store,
    )
    make_first(context, store / HEADS, experts.write_base_and_heads, first)
    jobs = {}
    for task, recipe in tuned.items():
        job = ExpertJob(task, role.experts, recipe, suite.expert_seed, suite.device)
        out = store / "experts" / task
        jobs[task] = (out, (job, layout.data, store, layout.pins, out))
    make_experts(context, jobs)
    return store


def texts(context: Context, role: LanguageRole, name: str, pool: Pool) -> Path:
    """The same of language models, which have no heads of their own."""
    suite, layout, tasks = context.suite, context.layout, context.suite.tasks_of(name, pool)
    settings = [role.model_dump(), tasks, suite.expert_seed, suite.language.model_dump()["texts"]]
    store = layout.unfinished(
        f"{name}-{pool}-{digest(settings, *local_weights(layout.root / role.model))}"
    )
    first = (model_folder(layout.root, role.model, layout.pins), role.dtype, store)
    make_first(context, store / "base", experts.write_text_base, first)
    jobs = {}
    for task in tasks:
        recipe, out = role.fine_tuning(task), store / "experts" / task
        job = ExpertJob(task, role.experts, recipe, suite.expert_seed, suite.device, role.dtype)
        jobs[task] = (out, (job, layout.texts, store, layout.pins, out))
    make_experts(context, jobs)
    return store


def sentences(context: Context, role: SentenceRole, name: str, pool: Pool) -> Path:
    """The same of sentence encoders. Raises: HubUnreachable."""
    layout, tasks = context.layout, context.suite.tasks_of(name, pool)
    encoder = model_folder(layout.root, role.model, layout.pins)
    store = layout.unfinished(
        f"{name}-{pool}-{sentence_digest(context, encoder, name, pool, (FIRST,))}"
    )
    make_sentence_heads(context, encoder, layout.data_of(name), tasks, store)
    outs = {(task, FIRST): store / "experts" / task for task in made_here(context, name, pool)}
    make_sentence_experts(context, layout.data_of(name), store, outs)
    return store


def sentence_digest(
    context: Context, encoder: Path, name: str, pool: Pool, seeds: tuple[int, ...]
) -> str:
    """What experts of sentence encoders depend on, their texts too, which lie in the project."""
    tasks = context.suite.tasks_of(name, pool)
    rows = [
        file for task in tasks for file in sorted((context.layout.data_of(name) / task).glob("*.*"))
    ]
    return digest(
        [tasks, context.suite.sentences.fine_tune.model_dump(), seeds], encoder / WEIGHTS, *rows
    )


def make_sentence_heads(
    context: Context, encoder: Path, rows: Path, tasks: tuple[str, ...], store: Path
) -> None:
    """Write base and heads of these tasks into the store, unless they are there."""
    first = (encoder, rows, tasks, context.suite.sentences.fine_tune.temperature, store)
    make_first(context, store / HEADS, experts.write_encoder_and_heads, first)


def make_sentence_experts(
    context: Context, rows: Path, store: Path, outs: Mapping[tuple[str, int], Path]
) -> None:
    """Write the experts that are not there, by task and seed, from base and heads in the store."""
    jobs = {}
    for (task, seed), out in outs.items():
        recipe, device = context.suite.sentences.fine_tune, context.suite.device
        job = ExpertJob(task, FINE_TUNE, recipe, seed, device)
        jobs[f"{task}, seed {seed}"] = (out, (job, rows, store, context.layout.pins, out))
    make_experts(context, jobs)


def made_here(context: Context, role: str, pool: Pool) -> list[str]:
    """Tasks of a pool whose experts no smaller pool has made."""
    return [
        task
        for task in context.suite.tasks_of(role, pool)
        if context.layout.home(role, pool, task) == pool
    ]


def make_first(
    context: Context, out: Path, write: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Run the job that writes what every expert begins from, unless `out`, which it writes last, is
    there.
    """
    if not out.exists():
        for _ in fan_out("prepare", write, {out.stem: arguments}, min(context.suite.workers, 1)):
            pass


def make_experts(context: Context, jobs: Mapping[str, tuple[Path, tuple[Any, ...]]]) -> None:
    """Run the jobs whose folder is not there."""
    missing = {}
    for name, (out, arguments) in jobs.items():
        if out.is_dir():
            console.print(f"expert {name}: already there")
        else:
            missing[name] = arguments
    for _ in fan_out("expert", experts.write_expert, missing, context.suite.workers):
        pass


def local_weights(folder: Path) -> list[Path]:
    """The weights of a base that lies in the project; of one of the hub its id and pin are told by
    settings.
    """
    return [file for file in [folder / WEIGHTS] if file.is_file()]


def digest(settings: Any, *files: Path) -> str:
    """What experts depend on: settings, base weights and other files, and the code that trains
    them.
    """
    package = Path(__file__).parents[1]
    code = [
        file for folder in ("prepare", "mini") for file in sorted((package / folder).rglob("*.py"))
    ]
    return fingerprint(settings, [*files, *code])
