"""Stage `prepare`: base, experts and zero-shot heads of a role and pool.

An expert that is finished stays finished: it lies outside the stage's outputs until all are, so that an interrupted run goes on.
"""

import shutil
from dataclasses import asdict
from pathlib import Path

from featcal.storage.atomic import atomic_folder
from reproduction.experiments.runs import role_and_pool
from reproduction.stages import prepare_sentences
from reproduction.stages.context import Context, fingerprint, load_context, not_run, recorded
from reproduction.stages.workers import console, fan_out
from reproduction.suites import experts as making
from reproduction.suites.experts import ExpertJob
from reproduction.suites.sentences import SentenceRole
from reproduction.suites.suite import Role


def run(key: str) -> None:
    """Write outputs/<suite>/prepared/<key>/: base/, experts/<task>/, heads.safetensors; empty where nothing plays the role.

    Heads of every task of the pool; experts of those that no smaller pool holds.
    """
    context = load_context()
    name, pool = role_and_pool(key)
    role, out = context.role(name), context.layout.prepared(name, pool)
    if isinstance(role, SentenceRole):
        prepare_sentences.run(context, key)
        return
    assert role is None or isinstance(role, Role)
    with recorded(context, "prepare", key):
        if role is None or not context.plays(name, pool):
            not_run(context, f"prepare {key}", out)
            return
        store = context.layout.unfinished(_fingerprint(context, role, name, pool))
        _prepare(context, role, name, pool, store, out)
    for old in store.parent.glob(f"{key}-*"):  # interrupted runs with other settings too
        shutil.rmtree(old)


def _prepare(context: Context, role: Role, name: str, pool: int, store: Path, out: Path) -> None:
    """Make what is missing in the store, then the output folder from it."""
    from reproduction.suites.hub import model_folder

    tasks = context.suite.tasks_of(name, pool)
    data, pins = context.layout.data, context.layout.pins
    clip = model_folder(context.layout.root, role.clip, pins)
    jobs = {}
    if not (store / "heads.safetensors").is_file():
        heads = {"heads": (clip, data, tasks, context.suite.heads, context.suite.device, store)}
        for _ in fan_out("prepare", making.write_base_and_heads, heads, min(context.suite.workers, 1)):
            pass
    for task in _made_here(context, name, pool):
        if (store / "experts" / task).is_dir():
            console.print(f"expert {task}: already there")
            continue
        job = ExpertJob(task, role.experts, context.suite.fine_tuning(task), context.suite.expert_seed, context.suite.device)
        jobs[task] = (job, data, store, pins)
    for _ in fan_out("expert", making.write_expert, jobs, context.suite.workers):
        pass
    with atomic_folder(out) as folder:
        (store / "experts").mkdir(exist_ok=True)  # a pool may need no further expert
        for part in ("base", "experts"):
            shutil.copytree(store / part, folder / part)
        shutil.copyfile(store / "heads.safetensors", folder / "heads.safetensors")


def _made_here(context: Context, role: str, pool: int) -> list[str]:
    """Tasks of a pool whose experts no smaller pool has made."""
    return [task for task in context.suite.tasks_of(role, pool) if context.layout.home(role, pool, task) == pool]


def _fingerprint(context: Context, role: Role, name: str, pool: int) -> str:
    """What the experts depend on: settings, data sources, base weights and the code that trains them."""
    suite = context.suite
    tasks = {task: asdict(suite.fine_tuning(task)) for task in _made_here(context, name, pool)}
    settings = [name, asdict(role), asdict(suite.data), suite.tasks_of(name, pool), tasks, suite.heads, suite.expert_seed]
    local = context.layout.root / role.clip / "model.safetensors"
    package = Path(__file__).parents[1]
    files = [*sorted(package.glob("suites/*.py")), *sorted(package.glob("mini/*.py")), *([local] if local.is_file() else [])]
    return f"{name}-{pool}-{fingerprint(settings, files)}"
