"""Stage `prepare_texts`: texts of every language task of the suite, drawn, copied from the user's
folder, or named on the hub.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from featcal.errors import MissingPath
from featcal.files import atomic_folder, write_json
from reproduction.experiments.runs import DOMAIN_POOL, GLUE_POOL
from reproduction.prepare.texts import TextSource, told, write_text_sources
from reproduction.stages.context import Context, load_context, pick, recorded
from reproduction.stages.workers import console, fan_out

TEST = "test"


def run() -> None:
    """Write outputs/<suite>/texts/ and, for the report, language.json and language_choice.json of
    results/<suite>/.
    """
    context = load_context()
    texts = context.suite.language.texts
    makers = {"mini": _drawn, "files": _copied, "hub": _named}
    with recorded(context, "prepare_texts", None):
        with atomic_folder(context.layout.texts) as folder:
            sources = makers[texts.source](context, folder) if texts else {}
            if not sources:
                console.print(f"prepare_texts: suite {context.suite.name} has no language models")
            write_text_sources(folder, sources)
        _describe(context, sources)


def _drawn(context: Context, folder: Path) -> dict[str, TextSource]:
    """Every task of the mini suite, drawn in the workers: GLUE's, the experts' domains, and the
    tests of what they can do.
    """
    from reproduction.mini.language.domains import DOMAINS, TESTS, write_domain, write_test
    from reproduction.mini.language.glue import WORLDS, write_glue
    from reproduction.prepare.text_tasks import GLUE

    language = context.suite.language
    texts = language.texts
    assert (
        texts is not None and texts.train and texts.domain_train and texts.validation and texts.test
    )
    counts = {"train": texts.train, "validation": texts.validation, TEST: texts.test}
    jobs: dict[str, tuple[Any, ...]] = {}
    sources = {}
    for task in language.pools.get(GLUE_POOL, ()):
        jobs[task] = (write_glue, task, folder / task, texts.seed, counts)
        about = WORLDS[task].description
        sources[task] = TextSource(
            location=task,
            kind="folder",
            paper_name=GLUE[task].column,
            splits={split: split for split in counts},
            description=about,
        )
    for domain in language.pools.get(DOMAIN_POOL, ()):
        own = {"train": texts.domain_train, "validation": texts.validation}
        jobs[domain] = (write_domain, domain, folder / domain, texts.seed, own)
        about = f"What the expert is trained on, of the kinds of {' and '.join(TESTS[t].paper_name for t in DOMAINS[domain])}."
        sources[domain] = TextSource(
            location=domain,
            kind="folder",
            paper_name=domain,
            splits={split: split for split in own},
            description=about,
        )
    for test in language.tests:
        own = {split: counts[split] for split in ("validation", TEST)}
        jobs[test] = (write_test, test, folder / test, texts.seed, own)
        about = TESTS[test].description
        sources[test] = TextSource(
            location=test,
            kind="folder",
            paper_name=TESTS[test].paper_name,
            splits={split: split for split in own},
            description=about,
        )
    for _ in fan_out("draw", _draw, jobs, context.suite.workers):
        pass
    return sources


def _draw(
    write: Callable[..., None], task: str, folder: Path, seed: int, counts: dict[str, int]
) -> None:
    write(task, folder, seed, counts)


def _copied(context: Context, folder: Path) -> dict[str, TextSource]:
    """The user's own folders, copied so that a later edit of them cannot change half of the
    results.
    """
    from reproduction.prepare.text_tasks import glue_task

    language = context.suite.language
    assert language.texts is not None
    origin, sources = context.layout.root / str(language.texts.folder), {}
    for task in language.pools.get(GLUE_POOL, ()):
        if not (origin / task).is_dir():
            way_out = f"put a folder with train.parquet and test.parquet there, or edit suites/{context.suite.name}.yaml"
            raise MissingPath(origin / task, "the texts of a task", way_out)
        shutil.copytree(origin / task, folder / task)
        sources[task] = TextSource(
            location=task,
            kind="folder",
            paper_name=glue_task(task).column,
            splits={"train": "train", TEST: TEST},
        )
    return sources


def _named(context: Context, folder: Path) -> dict[str, TextSource]:
    """The paper's data sets by hub id, pinned revision and split; the datasets library fetches them
    when they are read.
    """
    from reproduction.prepare.hub import pinned_data
    from reproduction.prepare.text_tasks import DOMAINS, GLUE, HUB_ID, PUBLIC

    language, pins, sources = context.suite.language, context.layout.pins, {}
    glue = language.pools.get(GLUE_POOL, ())
    revision = pinned_data(pins, HUB_ID) if glue else ""
    for task in glue:
        splits = {"train": "train", TEST: GLUE[task].test_split}
        sources[task] = TextSource(
            location=HUB_ID,
            kind="hub",
            paper_name=GLUE[task].column,
            splits=splits,
            revision=revision,
            config=task,
        )
    for domain in language.pools.get(DOMAIN_POOL, ()):
        revision = pinned_data(pins, DOMAINS[domain].hub_id)
        sources[domain] = TextSource(
            location=DOMAINS[domain].hub_id,
            kind="hub",
            paper_name=domain,
            splits={"train": "train"},
            revision=revision,
        )
    for (
        key,
        name,
    ) in language.tests.items():  # lm-evaluation-harness reads them, at the commit told here
        test = pick("public tests", PUBLIC, name)
        sources[key] = TextSource(
            location=test.data,
            kind="hub",
            paper_name=key,
            splits={TEST: test.split},
            revision=pinned_data(pins, test.data),
            config=test.config,
        )
    return sources


def _describe(context: Context, sources: dict[str, TextSource]) -> None:
    """What the report needs to know of the suite's language models without opening any text."""

    from reproduction.mini.language.domains import measured

    language = context.suite.language
    described = {
        "suite": context.suite.name,
        "texts": language.texts.model_dump() if language.texts else None,
        "roles": {name: role.model_dump() for name, role in language.roles.items()},
        "pools": {name: list(tasks) for name, tasks in language.pools.items()},
        "tests": dict(language.tests),
        "tasks": {
            task: told(context.layout.texts, task, source) for task, source in sources.items()
        },
    }
    write_json(context.layout.results / "language.json", described)
    drawn = language.texts is not None and language.texts.source == "mini"
    write_json(context.layout.results / "language_choice.json", measured() if drawn else {})
