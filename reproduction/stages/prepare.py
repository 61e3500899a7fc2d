"""Stages `prepare`: base, experts and heads of a role and pool; `multitask`: one model trained on
all of its tasks; `prepare_photos`: the real images.

A finished expert stays finished: it lies outside the stage's outputs until all are, so that an
interrupted run goes on.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from featcal.errors import HubUnreachable
from featcal.files import atomic_folder
from reproduction.engine.context import Setup, fingerprint, load_context, load_setup, pick
from reproduction.engine.workers import console, fan_out
from reproduction.prepare import experts
from reproduction.prepare.chat import PLAIN_TEXTS, write_base_and_chats
from reproduction.prepare.experts import ADAPTERS, HEADS, ExpertJob, MultitaskJob, model_folder
from reproduction.prepare.hub import WEIGHTS
from reproduction.prepare.photos import write_photos, write_vision_and_heads
from reproduction.prepare.suite import (
    FINE_TUNE,
    ChatRole,
    LanguageRole,
    PhotoRole,
    Role,
    SentenceRole,
)

TEXTS = "texts"  # of models that answer instructions
FIRST = 0  # seed of the experts of sentences and real images; the study expert_seeds trains others


def run(key: str) -> None:
    """Write outputs/<suite>/prepared/<key>/: base/, experts/<task>/, heads.safetensors of encoders,
    adapters/ of language models, texts/ of those that answer instructions.

    Experts are of the tasks that no smaller pool holds. Nothing is made where nothing plays the
    role, nor, with a message, where the package of a sentence encoder cannot be fetched.
    """
    setup = load_setup(key)
    context, role = setup.context, setup.context.role(setup.role)
    out = context.layout.prepared(setup.role, setup.pool)
    with context.recorded("prepare", key) as record:
        if not setup.known:
            context.not_run(f"prepare {key}", out)
            return
        try:
            store = _made(setup, role)
        except HubUnreachable as error:
            if not isinstance(role, SentenceRole | ChatRole):
                raise
            record["not_run"] = str(error)
            again = f"its pages will say so; later: dvc repro -f prepare@{key}"
            context.not_run(key, out, f"prepare {key}: {setup.role} is not run, {again}\n{error}")
            return
        with atomic_folder(out) as folder:
            (store / "experts").mkdir(exist_ok=True)  # a pool may need no further expert
            for part in ("base", "experts", ADAPTERS, TEXTS):
                if (store / part).is_dir():
                    shutil.copytree(store / part, folder / part)
            if (store / HEADS).is_file():
                shutil.copyfile(store / HEADS, folder / HEADS)
    for old in store.parent.glob(f"{key}-*"):  # interrupted runs with other settings too
        shutil.rmtree(old)


def multitask(key: str) -> None:
    """Write outputs/<suite>/multitask/<role>-<pool>/."""
    setup = load_setup(key)
    context, suite = setup.context, setup.context.suite
    chosen, out = pick("multitask", context.experiments.multitask, key), setup.folder("multitask")
    with context.recorded("multitask", key):
        if chosen is None or not setup.plays:
            context.not_run(f"multitask {key}", out)
            return
        sentences = setup.role in suite.sentences.roles
        recipe: Any = suite.sentences.fine_tune if sentences else suite.fine_tune
        recipe = recipe.but(steps=chosen.steps) if chosen.steps else recipe
        job = MultitaskJob(setup.tasks, chosen.model, recipe, chosen.seed, suite.device)
        given = (
            job,
            setup.base.parent,
            context.layout.data_of(setup.role),
            context.layout.pins,
            out,
        )
        context.run("multitask", experts.write_multitask, {key: given})


def photos() -> None:
    """Write outputs/<suite>/photos/."""
    context = load_context()
    real, out = context.suite.photos, context.layout.outputs / "photos"
    with context.recorded("prepare_photos", None):
        if not real.roles:
            context.not_run("prepare_photos", out)
            return
        with atomic_folder(out) as folder:
            tasks = max(real.pools.values(), key=len)
            write_photos(context.layout.root / real.folder, tasks, folder)


def _made(setup: Setup, role: Any) -> Path:
    """Return the folder that holds base, heads and experts, what is missing made."""
    if isinstance(role, PhotoRole):
        return _photos(setup, role)
    if isinstance(role, SentenceRole):
        return _sentences(setup, role)
    if isinstance(role, ChatRole):
        return _chat(setup, role)
    return _texts(setup, role) if isinstance(role, LanguageRole) else _images(setup, role)


def _images(setup: Setup, role: Role) -> Path:
    suite, layout, tasks = setup.context.suite, setup.context.layout, setup.tasks
    recipes = {task: suite.fine_tuning(task) for task in _own_tasks(setup)}
    told = {task: recipe.model_dump() for task, recipe in recipes.items()}
    settings = [role.model_dump(), suite.data.model_dump(), tasks, told]
    settings += [suite.heads, suite.expert_seed]
    store = _store(setup, settings, layout.root / role.clip)
    base = model_folder(layout.root, role.clip, layout.pins)
    first = (base, layout.data, tasks, suite.heads, suite.device, store)
    _make_first(setup, store / HEADS, experts.write_base_and_heads, first)
    jobs = {}
    for task, recipe in recipes.items():
        job = ExpertJob(task, role.experts, recipe, suite.expert_seed, suite.device)
        out = store / "experts" / task
        jobs[task] = (out, (job, layout.data, store, layout.pins, out))
    _make_experts(setup, jobs)
    return store


def _texts(setup: Setup, role: LanguageRole) -> Path:
    suite, layout, tasks = setup.context.suite, setup.context.layout, setup.tasks
    settings = [role.model_dump(), tasks, suite.expert_seed, suite.language.model_dump()["texts"]]
    store = _store(setup, settings, layout.root / role.model)
    first = (model_folder(layout.root, role.model, layout.pins), role.dtype, store)
    _make_first(setup, store / "base", experts.write_text_base, first)
    jobs = {}
    for task in tasks:
        recipe, out = role.fine_tuning(task), store / "experts" / task
        job = ExpertJob(task, role.experts, recipe, suite.expert_seed, suite.device, role.dtype)
        jobs[task] = (out, (job, layout.texts, store, layout.pins, out))
    _make_experts(setup, jobs)
    return store


def _sentences(setup: Setup, role: SentenceRole) -> Path:
    """Raises: HubUnreachable."""
    layout = setup.context.layout
    encoder = model_folder(layout.root, role.model, layout.pins)
    store = layout.unfinished(f"{setup.key}-{sentence_digest(setup, encoder, (FIRST,))}")
    make_sentence_heads(setup, encoder, store)
    outs = {(task, FIRST): store / "experts" / task for task in _own_tasks(setup)}
    make_sentence_experts(setup, store, outs)
    return store


def _photos(setup: Setup, role: PhotoRole) -> Path:
    """Raises: HubUnreachable."""
    layout, photos, jobs = setup.context.layout, setup.context.suite.photos, {}
    model, data = model_folder(layout.root, role.model, layout.pins), layout.data_of(setup.role)
    rows = sorted(file for task in setup.tasks for file in (data / task).glob("*.parquet"))
    settings = [setup.tasks, photos.size, photos.fine_tune.model_dump(), FIRST]
    store = layout.unfinished(f"{setup.key}-{_digest(settings, model / WEIGHTS, *rows)}")
    first = (model, data, setup.tasks, photos.size, store)
    _make_first(setup, store / HEADS, write_vision_and_heads, first)
    for task in _own_tasks(setup):
        job = ExpertJob(task, FINE_TUNE, photos.fine_tune, FIRST, setup.context.suite.device)
        out = store / "experts" / task
        jobs[task] = (out, (job, data, store, layout.pins, out))
    _make_experts(setup, jobs)
    return store


def _chat(setup: Setup, role: ChatRole) -> Path:
    """Raises: HubUnreachable."""
    layout, chat, jobs = setup.context.layout, setup.context.suite.chat, {}
    model, origin = model_folder(layout.root, role.model, layout.pins), layout.root / chat.texts
    named = sorted({*chat.tasks, *chat.unseen, PLAIN_TEXTS})
    rows = [file for task in named for file in sorted((origin / task).glob("*.*"))]
    settings = [role.model_dump(), chat.model_dump(exclude={"roles"}), FIRST]
    store = layout.unfinished(f"{setup.key}-{_digest(settings, model / WEIGHTS, *rows)}")
    first = (model, chat, origin, store)
    _make_first(setup, store / TEXTS, write_base_and_chats, first)
    for task in setup.tasks:
        recipe, out = role.fine_tuning(task), store / "experts" / task
        job = ExpertJob(task, role.experts, recipe, FIRST, setup.context.suite.device, role.dtype)
        jobs[task] = (out, (job, store / TEXTS, store, layout.pins, out))
    _make_experts(setup, jobs)
    return store


def sentence_digest(setup: Setup, encoder: Path, seeds: tuple[int, ...]) -> str:
    """Return a hash of what experts of sentence encoders depend on, including their texts."""
    data = setup.context.layout.data_of(setup.role)
    rows = [file for task in setup.tasks for file in sorted((data / task).glob("*.*"))]
    settings = [setup.tasks, setup.context.suite.sentences.fine_tune.model_dump(), seeds]
    return _digest(settings, encoder / WEIGHTS, *rows)


def make_sentence_heads(setup: Setup, encoder: Path, store: Path) -> None:
    """Write base and heads of the pool's tasks into the store, unless they are there."""
    data = setup.context.layout.data_of(setup.role)
    temperature = setup.context.suite.sentences.fine_tune.temperature
    first = (encoder, data, setup.tasks, temperature, store)
    _make_first(setup, store / HEADS, experts.write_encoder_and_heads, first)


def make_sentence_experts(setup: Setup, store: Path, outs: Mapping[tuple[str, int], Path]) -> None:
    """Write the experts that are missing, by task and seed, from base and heads in the store."""
    suite, layout, jobs = setup.context.suite, setup.context.layout, {}
    for (task, seed), out in outs.items():
        job = ExpertJob(task, FINE_TUNE, suite.sentences.fine_tune, seed, suite.device)
        given = (job, layout.data_of(setup.role), store, layout.pins, out)
        jobs[f"{task}, seed {seed}"] = (out, given)
    _make_experts(setup, jobs)


def _own_tasks(setup: Setup) -> list[str]:
    """Return the tasks of a pool whose experts no smaller pool has made."""
    home, words = setup.context.layout.home, (setup.role, setup.pool)
    return [task for task in setup.tasks if home(*words, task) == setup.pool]


def _make_first(
    setup: Setup, out: Path, write: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Run the job that writes what every expert begins from, `out` last, unless that is there."""
    if not out.exists():
        workers = min(setup.context.suite.workers, 1)
        dict(fan_out("prepare", write, {out.stem: arguments}, workers))


def _make_experts(setup: Setup, jobs: Mapping[str, tuple[Path, tuple[Any, ...]]]) -> None:
    """Run the jobs whose folder is missing."""
    missing = {}
    for name, (out, arguments) in jobs.items():
        if out.is_dir():
            console.print(f"expert {name}: already there")
        else:
            missing[name] = arguments
    setup.context.run("expert", experts.write_expert, missing)


def _store(setup: Setup, settings: Any, base: Path) -> Path:
    """Return the folder of unfinished parts. base: its weights count where it is in the project; of
    one of the hub the settings hold id and pin.
    """
    weights = [file for file in [base / WEIGHTS] if file.is_file()]
    return setup.context.layout.unfinished(f"{setup.key}-{_digest(settings, *weights)}")


def _digest(settings: Any, *files: Path) -> str:
    """Return a hash of what experts depend on, including the code that trains them."""
    package = Path(__file__).parents[1]
    rooms = [package / room for room in ("prepare", "mini")]
    code = [file for room in rooms for file in sorted(room.rglob("*.py"))]
    return fingerprint(settings, [*files, *code])
