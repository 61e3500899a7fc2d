"""Stages `prepare`, `multitask` and `prepare_photos`: base, experts, heads, and real images.

Models are fine-tuned here or fetched from the hub, each by one job of a worker process. Finished
experts lie outside the stage's outputs until all are, so an interrupted run goes on.
"""

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from featcal.errors import HubUnreachable
from featcal.evaluation.accuracy import class_mean_head, words_known, zero_shot_head
from featcal.files import atomic_folder, atomic_path, write_json
from featcal.models.load import (
    load_as_calibrated,
    load_clip,
    load_model,
    load_tokenizer,
    load_vision,
    save_model,
    torch_device,
)
from featcal.models.lora import CONFIG, dense_model
from reproduction.engine.context import HEADS, Setup, fingerprint, load_context, load_setup, pick
from reproduction.engine.workers import console, fan_out
from reproduction.prepare import hub
from reproduction.prepare.chat import PLAIN_TEXTS, write_base_and_chats
from reproduction.prepare.fine_tune import fine_tune, fine_tune_text
from reproduction.prepare.photos import as_vit, processor, write_photos
from reproduction.prepare.sources import load_task, read_classes, read_sources
from reproduction.prepare.suite import (
    FINE_TUNE,
    ChatRole,
    FineTune,
    FineTuneSentences,
    FineTuneText,
    LanguageRole,
    PhotoRole,
    Role,
    SentenceRole,
)
from reproduction.prepare.texts import load_texts

ADAPTERS = "adapters"  # folder of experts that are trained as low-rank adapters
SCALE = 100.0  # CLIP's; features and heads have unit length
TEXTS = "texts"  # of models that answer instructions
FIRST = 0  # seed of the experts of sentences and real images; the study expert_seeds trains others


@dataclass(frozen=True)
class ExpertJob:
    """One expert: its task, `fine_tune` or a hub pattern with {task}, and how it is trained.

    dtype: of the stored weights of a language model.   tasks: of one model for several tasks, which
    `fine_tune` trains on all of them.
    """

    task: str
    experts: str
    recipe: FineTune | FineTuneSentences | FineTuneText
    seed: int
    device: str
    dtype: str = "float32"
    tasks: Sequence[str] = ()


def run(key: str) -> None:
    """Write outputs/<suite>/prepared/<key>/; nothing where a packaged model cannot be fetched."""
    setup = load_setup(key)
    context, role = setup.context, setup.context.role(setup.role)
    out = setup.prepared
    with context.recorded("prepare", key) as record:
        if not setup.in_suite:
            context.not_run(f"prepare {key}", out)
            return
        try:
            store = make_store(setup, role, key)
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
    entry, out = pick("multitask", context.experiments.multitask, key), setup.folder("multitask")
    with context.recorded("multitask", key):
        if entry is None or not setup.available:
            context.not_run(f"multitask {key}", out)
            return
        sentences = setup.role in suite.sentences.roles
        recipe: Any = suite.sentences.fine_tune if sentences else suite.fine_tune
        recipe = recipe.but(steps=entry.steps) if entry.steps else recipe
        origin = entry.model or FINE_TUNE
        job = ExpertJob(key, origin, recipe, entry.seed, suite.device, tasks=setup.tasks)
        arguments = (job, setup.data, setup.prepared, context.pins, out)
        context.run("multitask", write_expert, {key: arguments})


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
        return dict.fromkeys(tasks, role.fine_tune or group.fine_tune)
    kind = role if isinstance(role, LanguageRole) else suite
    return {task: kind.fine_tuning(task) for task in tasks}


def make_store(setup: Setup, role: Any, name: str) -> Path:
    """Make missing base, heads and experts, and return their folder. Raises: HubUnreachable."""
    context, tasks, data = setup.context, setup.tasks, setup.data
    suite, root, first, seed = context.suite, context.root, HEADS, FIRST
    # of the tasks that no smaller pool has
    recipes = recipes_of(setup, [task for task in tasks if setup.smallest_pool(task) == setup.pool])
    source = role.clip if isinstance(role, Role) else role.model
    model = model_folder(root, source, context.pins)
    rows, settings = list[Path](), list[Any]()
    if isinstance(role, PhotoRole):
        rows, settings = _files(data, tasks), [suite.photos.size]
        write, arguments = write_vision_and_heads, (data, tasks, suite.photos.size)
    elif isinstance(role, SentenceRole):
        rows = _files(data, tasks)
        temperature = (role.fine_tune or suite.sentences.fine_tune).temperature
        write, arguments = write_encoder_and_heads, (data, tasks, temperature)
    elif isinstance(role, ChatRole):
        chat, origin = suite.chat, root / suite.chat.texts
        rows = _files(origin, sorted({*chat.tasks, *chat.unseen, PLAIN_TEXTS}))
        write, arguments, first = write_base_and_chats, (chat, origin), TEXTS
        settings = [chat.model_dump(exclude={"roles"})]
    elif isinstance(role, LanguageRole):
        write, arguments, first = write_text_base, (role.dtype,), "base"
        settings, seed = [suite.language.model_dump()["texts"]], suite.expert_seed
    else:
        write, arguments = write_base_and_heads, (data, tasks, suite.heads, suite.device)
        settings, seed = [suite.data.model_dump(), suite.heads], suite.expert_seed
    trained = {task: recipe.model_dump() for task, recipe in recipes.items()}
    kind = getattr(role, "experts", FINE_TUNE)
    local = model.is_relative_to(root)
    weights = sorted(model.glob("*.safetensors")) if local else []
    fetched = [] if local else [source]
    fetched += [kind.format(task=task) for task in recipes if kind != FINE_TUNE]
    commits = [hub.pinned(context.pins, name) for name in fetched]
    settings += [role.model_dump(), tasks, trained, seed, commits]
    store = context.unfinished(f"{name}-{digest(settings, *weights, *rows)}")
    if not (store / first).exists():  # every expert begins from it; `first` is written last
        workers = min(suite.workers, 1)
        dict(fan_out("prepare", write, {first: (model, *arguments, store)}, workers))
    texts = setup.texts if isinstance(role, LanguageRole) else data
    texts = store / TEXTS if first == TEXTS else texts
    dtype = getattr(role, "dtype", "float32")
    make_experts(setup, store, texts, recipes, {seed: store / "experts"}, kind, dtype)
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
    context.run("expert", write_expert, jobs)


def _files(data: Path, tasks: Iterable[str]) -> list[Path]:
    return [file for task in tasks for file in sorted((data / task).glob("*.*"))]


def digest(settings: Any, *files: Path) -> str:
    """Return a hash of everything that experts depend on, including the code that trains them."""
    package = Path(__file__).parents[1]
    code = [f for name in ("prepare", "mini") for f in sorted((package / name).rglob("*"))]
    code = [file for file in code if file.suffix in (".py", ".yaml")]
    return fingerprint(settings, [*files, *code, Path(__file__)])


def model_folder(root: Path, model: str, pins: Path) -> Path:
    """Return the local folder of a model: in a package, below the project, or fetched from the hub.

    Raises: as fetch_package and hub.fetch.
    """
    if model.startswith(hub.PREFIX):
        return hub.fetch_package(root, model.removeprefix(hub.PREFIX))
    return root / model if (root / model).is_dir() else hub.fetch(model, pins)


def save_heads(tensors: Mapping[str, Any], store: Path) -> None:
    """Write logit scale, heads and, if there is one, the projection to store/heads.safetensors."""
    with atomic_path(store / HEADS) as hidden:
        save_file(dict(tensors), hidden)


def write_base_and_heads(
    clip: Path, data: Path, tasks: Sequence[str], kind: str, device: str, store: Path
) -> None:
    """Write a CLIP's vision tower, its projection and logit scale, and heads to the store.

    kind: prompts, class_means, or auto: prompts where the text tower knows every word.
    """
    base, target_device = store / "base", torch_device(device)
    save_model(load_vision(clip), base, like=clip)
    model, vision = load_clip(clip).to(target_device), load_vision(clip).to(target_device)
    tokenizer, sources = load_tokenizer(clip), read_sources(data)
    projection = model.visual_projection.weight.detach()  # (p, h)
    tensors = {"visual_projection": projection.cpu().contiguous()}
    tensors["logit_scale"] = model.logit_scale.detach().cpu()
    for task in tasks:
        classes, templates = sources[task].classes, sources[task].templates
        all_known = kind == "auto" and words_known(tokenizer, classes, templates)
        if kind == "prompts" or all_known:
            head = zero_shot_head(model, tokenizer, classes, templates)
        else:
            head = class_mean_head(vision, projection, load_task(data, task, "train", base))
        tensors[f"head/{task}"] = head.cpu()  # (classes, p)
    save_heads(tensors, store)


def write_encoder_and_heads(
    encoder: Path, texts: Path, tasks: Sequence[str], temperature: float, store: Path
) -> None:
    """Write a sentence encoder, logit scale and a head per task to the store."""
    model, tokenizer = load_model(encoder), load_tokenizer(encoder)
    save_model(model, store / "base", like=encoder)
    tensors = {"logit_scale": torch.tensor(math.log(1 / temperature))}
    for task in tasks:
        task_classes = read_classes(texts / task)
        prompts = task_classes.classes, task_classes.templates
        tensors[f"head/{task}"] = zero_shot_head(model, tokenizer, *prompts, 64)  # (classes, h)
    save_heads(tensors, store)


def write_vision_and_heads(
    dinov2: Path, data: Path, tasks: Sequence[str], size: int, store: Path
) -> None:
    """Write the vision model, logit scale and heads to the store: class means of train features."""
    model, base = as_vit(load_model(dinov2), size), store / "base"
    save_model(model, base)
    write_json(base / "preprocessor_config.json", processor(size))
    tensors = {"logit_scale": torch.tensor(math.log(SCALE))}
    for task in tasks:
        tensors[f"head/{task}"] = class_mean_head(model, None, load_task(data, task, "train", base))
    save_heads(tensors, store)


def write_text_base(folder: Path, dtype: str, store: Path) -> None:
    """Write a language model with its tokenizer to store/base/."""
    save_model(_language_model(folder, dtype), store / "base", like=folder)


def write_expert(job: ExpertJob, data: Path, store: Path, pins: Path, out: Path) -> None:
    """Write one expert, or one model for several tasks, to `out`, from base and heads in the store.

    A language model's low-rank adapters are written to store/adapters/<task>/ as well.
    """
    base, text = store / "base", isinstance(job.recipe, FineTuneText)
    expert: Any
    if job.experts != FINE_TUNE:
        folder = hub.fetch(job.experts.format(task=job.task), pins)
        if job.tasks:
            expert = load_as_calibrated(folder)
        elif not text:
            expert = load_vision(folder)
        elif (folder / CONFIG).is_file():
            expert = dense_model(base, folder)
        else:
            expert = _language_model(folder, job.dtype)
    elif isinstance(job.recipe, FineTuneText):
        rows = load_texts(data, job.task, "train")
        adapters = store / ADAPTERS / job.task if job.recipe.lora else None
        expert = fine_tune_text(base, rows, job.recipe, job.task, job.seed, adapters, job.device)
    else:
        tasks = job.tasks or (job.task,)
        samples = {task: load_task(data, task, "train", base) for task in tasks}
        expert = load_as_calibrated(base).to(torch_device(job.device))
        arguments = (load_file(store / HEADS), samples, job.recipe, job.seed, bool(job.tasks))
        expert = fine_tune(expert, *arguments).cpu()
    save_model(expert, out, like=base)


def _language_model(folder: Path, dtype: str) -> Any:
    return load_model(folder, getattr(torch, dtype))
