"""Stages `prepare`, `multitask` and `prepare_photos`: base, experts, heads, and real images.

Finished experts lie outside the stage's outputs until all are, so an interrupted run goes on.
"""

import shutil
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from featcal.errors import HubUnreachable
from featcal.files import atomic_folder
from reproduction.engine.context import Setup, fingerprint, load_context, load_setup, pick
from reproduction.engine.workers import console, fan_out
from reproduction.prepare import experts
from reproduction.prepare.chat import PLAIN_TEXTS, write_base_and_chats
from reproduction.prepare.experts import HEADS, ExpertJob, model_folder
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
    """Write outputs/<suite>/prepared/<key>/; nothing where a packaged model cannot be fetched."""
    setup = load_setup(key)
    context, role = setup.context, setup.context.role(setup.role)
    out = setup.prepared
    with context.recorded("prepare", key) as record:
        if not setup.known:
            context.not_run(f"prepare {key}", out)
            return
        try:
            store = made(setup, role, key)
        except HubUnreachable as error:
            if not isinstance(role, SentenceRole | ChatRole):
                raise
            record["not_run"] = str(error)
            again = f"its pages will say so; later: dvc repro -f prepare@{key}"
            context.not_run(key, out, f"prepare {key}: {setup.role} is not run, {again}\n{error}")
            return
        with atomic_folder(out) as folder:
            (store / "experts").mkdir(exist_ok=True)  # a pool may need no further expert
            shutil.copytree(store, folder, dirs_exist_ok=True)
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
        origin = chosen.model or FINE_TUNE
        job = ExpertJob(key, origin, recipe, chosen.seed, suite.device, tasks=setup.tasks)
        given = (job, setup.data, setup.prepared, context.pins, out)
        context.run("multitask", experts.write_expert, {key: given})


def photos() -> None:
    """Write outputs/<suite>/photos/."""
    context = load_context()
    real, out = context.suite.photos, context.outputs / "photos"
    with context.recorded("prepare_photos", None):
        if not real.roles:
            context.not_run("prepare_photos", out)
            return
        with atomic_folder(out) as folder:
            tasks = max(real.pools.values(), key=len)
            write_photos(context.root / real.folder, tasks, folder)


def recipes_of(setup: Setup, tasks: Iterable[str]) -> dict[str, Any]:
    suite, role = setup.context.suite, setup.context.role(setup.role)
    if isinstance(role, SentenceRole):
        group = suite.photos if isinstance(role, PhotoRole) else suite.sentences
        return dict.fromkeys(tasks, group.fine_tune)
    kind = role if isinstance(role, LanguageRole) else suite
    return {task: kind.fine_tuning(task) for task in tasks}


def made(setup: Setup, role: Any, name: str) -> Path:
    """Return the folder of base, heads and experts, what is missing made. Raises: HubUnreachable."""
    context, tasks, data = setup.context, setup.tasks, setup.data
    suite, root, first, seed = context.suite, context.root, HEADS, FIRST
    # of the tasks that no smaller pool holds
    recipes = recipes_of(setup, [task for task in tasks if setup.home(task) == setup.pool])
    model = model_folder(root, role.clip if isinstance(role, Role) else role.model, context.pins)
    rows, settings = list[Path](), list[Any]()
    if isinstance(role, PhotoRole):
        rows, settings = _files(data, tasks), [suite.photos.size]
        write, given = write_vision_and_heads, (data, tasks, suite.photos.size)
    elif isinstance(role, SentenceRole):
        rows = _files(data, tasks)
        temperature = suite.sentences.fine_tune.temperature
        write, given = experts.write_encoder_and_heads, (data, tasks, temperature)
    elif isinstance(role, ChatRole):
        chat, origin = suite.chat, root / suite.chat.texts
        rows = _files(origin, sorted({*chat.tasks, *chat.unseen, PLAIN_TEXTS}))
        write, given, first = write_base_and_chats, (chat, origin), TEXTS
        settings = [chat.model_dump(exclude={"roles"})]
    elif isinstance(role, LanguageRole):
        write, given, first = experts.write_text_base, (role.dtype,), "base"
        settings, seed = [suite.language.model_dump()["texts"]], suite.expert_seed
    else:
        write, given = experts.write_base_and_heads, (data, tasks, suite.heads, suite.device)
        settings, seed = [suite.data.model_dump(), suite.heads], suite.expert_seed
    trained = {task: recipe.model_dump() for task, recipe in recipes.items()}
    settings += [role.model_dump(), tasks, trained, seed]
    # of a model of the hub the settings hold id and pin
    weights = [model / WEIGHTS] if model.is_relative_to(root) else []
    store = context.unfinished(f"{name}-{digest(settings, *weights, *rows)}")
    if not (store / first).exists():  # what every expert begins from, `first` written last
        workers = min(suite.workers, 1)
        dict(fan_out("prepare", write, {first: (model, *given, store)}, workers))
    how = (getattr(role, "experts", FINE_TUNE), getattr(role, "dtype", "float32"))
    texts = setup.texts if isinstance(role, LanguageRole) else data
    texts = store / TEXTS if first == TEXTS else texts
    make_experts(setup, store, texts, recipes, {seed: store / "experts"}, *how)
    return store


def make_experts(
    setup: Setup,
    store: Path,
    data: Path,
    recipes: Mapping[str, Any],
    folders: Mapping[int, Path],
    kind: str = FINE_TUNE,
    dtype: str = "float32",
) -> None:
    """Write the experts that are missing, from base and heads in the store.

    recipes: by task.   folders: of all experts with a seed, by seed.   kind, dtype: as of ExpertJob.
    """
    context, jobs = setup.context, {}
    for (seed, folder), (task, recipe) in product(folders.items(), recipes.items()):
        name, out = f"{task}, seed {seed}", folder / task
        if out.is_dir():
            console.print(f"expert {name}: already there")
        else:
            job = ExpertJob(task, kind, recipe, seed, context.suite.device, dtype)
            jobs[name] = (job, data, store, context.pins, out)
    context.run("expert", experts.write_expert, jobs)


def _files(data: Path, tasks: Iterable[str]) -> list[Path]:
    return [file for task in tasks for file in sorted((data / task).glob("*.*"))]


def digest(settings: Any, *files: Path) -> str:
    """Return a hash of what experts depend on, including the code that trains them."""
    package = Path(__file__).parents[1]
    rooms = [package / room for room in ("prepare", "mini")]
    code = [f for r in rooms for f in sorted(r.rglob("*")) if f.suffix in (".py", ".yaml")]
    return fingerprint(settings, [*files, *code])
