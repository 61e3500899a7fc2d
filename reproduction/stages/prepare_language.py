"""Stage `prepare` of texts: base and experts of a language model.

An expert that is finished stays finished: it lies outside the stage's outputs until all are, so that an interrupted run goes on.
"""

import shutil
from dataclasses import asdict
from pathlib import Path

from featcal.storage.atomic import atomic_folder
from reproduction.experiments.runs import role_and_pool
from reproduction.stages.context import Context, fingerprint, load_context, not_run, recorded
from reproduction.stages.workers import console, fan_out
from reproduction.suites import text_experts as making
from reproduction.suites.language import LanguageRole
from reproduction.suites.text_experts import ADAPTERS, TextExpert


def run(key: str) -> None:
    """Write outputs/<suite>/prepared/<key>/: base/, experts/<task>/, adapters/<task>/; empty where nothing plays the role."""
    context = load_context()
    name, pool = role_and_pool(key)
    role, out = context.suite.language.roles.get(name), context.layout.prepared(name, pool)
    with recorded(context, "prepare", key):
        if role is None or not context.plays(name, pool):
            not_run(context, f"prepare {key}", out)
            return
        tasks = context.suite.tasks_of(name, pool)
        store = context.layout.unfinished(f"{key}-{_fingerprint(context, role, tasks)}")
        _prepare(context, role, tasks, store, out)
    for old in store.parent.glob(f"{key}-*"):  # interrupted runs with other settings too
        shutil.rmtree(old)


def _prepare(context: Context, role: LanguageRole, tasks: tuple[str, ...], store: Path, out: Path) -> None:
    """Make what is missing in the store, then the output folder from it."""
    from reproduction.suites.hub import model_folder

    suite, layout = context.suite, context.layout
    if not (store / "base").is_dir():
        making.write_text_base(model_folder(layout.root, role.model, layout.pins), role.dtype, store)
    jobs = {}
    for task in tasks:
        if (store / "experts" / task).is_dir():
            console.print(f"expert {task}: already there")
            continue
        job = TextExpert(task, role.experts, role.fine_tuning(task), suite.expert_seed, suite.device, role.dtype)
        jobs[task] = (job, layout.texts, store, layout.pins)
    for _ in fan_out("expert", making.write_text_expert, jobs, suite.workers):
        pass
    with atomic_folder(out) as folder:
        for part in ("base", "experts", ADAPTERS):
            if (store / part).is_dir():
                shutil.copytree(store / part, folder / part)


def _fingerprint(context: Context, role: LanguageRole, tasks: tuple[str, ...]) -> str:
    """What the experts depend on: settings, texts, base weights and the code that trains them."""
    settings = [asdict(role), tasks, context.suite.expert_seed, asdict(context.suite.language)["texts"]]
    local = context.layout.root / role.model / "model.safetensors"
    package = Path(__file__).parents[1]
    files = [*sorted(package.glob("suites/*.py")), *sorted(package.glob("mini/language/*.py"))]
    return fingerprint(settings, [*files, *([local] if local.is_file() else [])])
