"""Stage `prepare` of sentence encoders: base, experts and heads of a role and pool.

An expert that is finished stays finished, as of images.
"""

import json
import shutil
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from featcal.errors import HubUnreachable
from featcal.storage.atomic import atomic_folder
from reproduction.experiments.runs import Pool, role_and_pool
from reproduction.stages.context import Context, recorded
from reproduction.stages.workers import console, fan_out
from reproduction.suites import sentence_experts as making
from reproduction.suites.packages import WEIGHTS
from reproduction.suites.sentence_experts import SentenceExpert

FIRST = 0  # seed of the experts' training; the study expert_seeds trains others


def run(context: Context, key: str) -> None:
    """Write outputs/<suite>/prepared/<key>/: base/, experts/<task>/, heads.safetensors.

    The folder stays empty, and this is said, where the suite lacks the pool or the encoder's package cannot be fetched.
    """
    name, pool = role_and_pool(key)
    layout, out = context.layout, context.layout.prepared(name, pool)
    with recorded(context, "prepare", key) as told:
        if pool not in context.suite.pools_of(name):
            with atomic_folder(out):
                console.print(f"prepare {key}: suite {context.suite.name} has no pool {pool}")
            return
        model = context.suite.sentences.roles[name].model
        try:
            encoder = making.encoder_folder(layout.root, model, layout.pins)
        except HubUnreachable as error:
            told["not_run"] = str(error)
            with atomic_folder(out):
                console.print(f"prepare {key}: {name} is not run, its pages will say so; later: dvc repro -f prepare@{key}")
                console.print(str(error))
            return
        store = layout.unfinished(f"{key}-{fingerprint(context, encoder, name, pool, (FIRST,))}")
        _prepare(context, encoder, name, pool, store, out)
    for old in store.parent.glob(f"{key}-*"):  # interrupted runs with other settings too
        shutil.rmtree(old)


def _prepare(context: Context, encoder: Path, name: str, pool: Pool, store: Path, out: Path) -> None:
    """Make what is missing in the store, then the output folder from it."""
    suite, texts = context.suite, context.layout.data_of(name)
    tasks, recipe = suite.tasks_of(name, pool), suite.sentences.fine_tune
    if not (store / making.HEADS).is_file():
        heads = {"heads": (encoder, texts, tasks, recipe.temperature, store)}
        for _ in fan_out("prepare", making.write_encoder_and_heads, heads, min(suite.workers, 1)):
            pass
    jobs = {}
    for task in _made_here(context, name, pool):
        place = context.layout.expert(name, pool, task).relative_to(out)
        if (store / place).is_dir():
            console.print(f"expert {task}: already there")
            continue
        jobs[task] = (SentenceExpert(task, recipe, FIRST, suite.device, store / place), texts, store)
    for _ in fan_out("expert", making.write_sentence_expert, jobs, suite.workers):
        pass
    with atomic_folder(out) as folder:
        shutil.copytree(store, folder, dirs_exist_ok=True)
        (folder / "experts").mkdir(exist_ok=True)  # a pool may need no further expert


def _made_here(context: Context, role: str, pool: Pool) -> list[str]:
    """Tasks of a pool whose experts no smaller pool has made."""
    return [task for task in context.suite.tasks_of(role, pool) if context.layout.home(role, pool, task) == pool]


def fingerprint(context: Context, encoder: Path, name: str, pool: Pool, seeds: tuple[int, ...]) -> str:
    """What the experts depend on: settings, texts, base weights and the code that trains them."""
    digest = sha256()
    tasks, sentences = context.suite.tasks_of(name, pool), context.suite.sentences
    digest.update(json.dumps([tasks, asdict(sentences.fine_tune), seeds]).encode())
    package = Path(__file__).parents[1]
    rows = [file for task in tasks for file in sorted((context.layout.data_of(name) / task).glob("*.*"))]
    code = [*sorted(package.glob("suites/*.py")), package / "data" / "sentences.py"]
    for file in (encoder / WEIGHTS, *rows, *code):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
