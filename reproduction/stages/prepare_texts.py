"""Stage `prepare_texts`: texts of every language task: drawn, copied, or named on the hub."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from featcal.errors import MissingPath
from featcal.files import atomic_folder, write_json
from reproduction.engine.context import Context, load_context, pick
from reproduction.engine.workers import console
from reproduction.experiments import DOMAIN_POOL, GLUE_POOL
from reproduction.prepare.texts import TextSource, told, write_text_sources

TEST = "test"


def run() -> None:
    """Write outputs/<suite>/texts/ and, for the report, language.json and language_choice.json of
    results/<suite>/.
    """
    context = load_context()
    texts = context.suite.language.texts
    makers = {"mini": _drawn, "files": _copied, "hub": _named}
    with context.recorded("prepare_texts", None):
        with atomic_folder(context.layout.texts) as folder:
            sources = makers[texts.source](context, folder) if texts else {}
            if not sources:
                console.print(f"prepare_texts: suite {context.suite.name} has no language models")
            write_text_sources(folder, sources)
        _describe(context, sources)


def _folder(task: str, paper_name: str, splits: Iterable[str], about: str = "") -> TextSource:
    own: dict[str, Any] = {"location": task, "kind": "folder", "paper_name": paper_name}
    more = {"description": about} if about else {}
    return TextSource(**own, **more, splits={split: split for split in splits})


def _drawn(context: Context, folder: Path) -> dict[str, TextSource]:
    """Draw every task of the synthetic suite in the workers: GLUE's, the domains, and the tests."""
    from reproduction.mini.language.domains import DOMAINS, TESTS, write_domain, write_test
    from reproduction.mini.language.glue import WORLDS, write_glue
    from reproduction.prepare.tasks import GLUE

    language = context.suite.language
    texts = language.texts
    assert (
        texts is not None and texts.train and texts.domain_train and texts.validation and texts.test
    )
    counts = {"train": texts.train, "validation": texts.validation, TEST: texts.test}
    domain_counts = {"train": texts.domain_train, "validation": texts.validation}
    test_counts = {split: counts[split] for split in ("validation", TEST)}
    jobs: dict[str, tuple[Any, ...]] = {}
    sources = {}

    def add(write: Any, task: str, paper_name: str, own: dict[str, int], about: str) -> None:
        jobs[task] = (write, task, folder / task, texts.seed, own)
        sources[task] = _folder(task, paper_name, own, about)

    for task in language.pools.get(GLUE_POOL, ()):
        add(write_glue, task, GLUE[task].column, counts, WORLDS[task].description)
    for domain in language.pools.get(DOMAIN_POOL, ()):
        kinds = " and ".join(TESTS[test].paper_name for test in DOMAINS[domain])
        about = f"What the expert is trained on, of the kinds of {kinds}."
        add(write_domain, domain, domain, domain_counts, about)
    for test in language.tests:
        add(write_test, test, TESTS[test].paper_name, test_counts, TESTS[test].description)
    context.run("draw", _draw, jobs)
    return sources


def _draw(
    write: Callable[..., None], task: str, folder: Path, seed: int, counts: dict[str, int]
) -> None:
    write(task, folder, seed, counts)


def _copied(context: Context, folder: Path) -> dict[str, TextSource]:
    """Copy the user's folders, so that a later edit of them cannot change half of the results."""
    from reproduction.prepare.tasks import glue_task

    language = context.suite.language
    assert language.texts is not None
    origin, sources = context.layout.root / str(language.texts.folder), {}
    for task in language.pools.get(GLUE_POOL, ()):
        if not (origin / task).is_dir():
            way_out = f"put a folder with train.parquet and test.parquet there, or edit suites/{context.suite.name}.yaml"
            raise MissingPath(origin / task, "the texts of a task", way_out)
        shutil.copytree(origin / task, folder / task)
        sources[task] = _folder(task, glue_task(task).column, ("train", TEST))
    return sources


def _named(context: Context, folder: Path) -> dict[str, TextSource]:
    """Return the paper's data sets by hub id, pinned revision and split; they are fetched when they
    are read.
    """
    from reproduction.prepare.hub import pinned_data
    from reproduction.prepare.tasks import DOMAINS, GLUE, HUB_ID, PUBLIC

    language, pins, sources = context.suite.language, context.layout.pins, {}

    def add(task: str, hub_id: str, paper_name: str, splits: dict[str, str], config: Any) -> None:
        own: dict[str, Any] = {"location": hub_id, "kind": "hub", "paper_name": paper_name}
        more = {} if config is None else {"config": config}
        revision = pinned_data(pins, hub_id)
        sources[task] = TextSource(**own, splits=splits, revision=revision, **more)

    for task in language.pools.get(GLUE_POOL, ()):
        splits = {"train": "train", TEST: GLUE[task].test_split}
        add(task, HUB_ID, GLUE[task].column, splits, task)
    for domain in language.pools.get(DOMAIN_POOL, ()):
        add(domain, DOMAINS[domain].hub_id, domain, {"train": "train"}, None)
    for key, name in language.tests.items():  # lm-evaluation-harness reads them at this commit
        test = pick("public tests", PUBLIC, name)
        add(key, test.data, key, {TEST: test.split}, test.config)
    return sources


def _describe(context: Context, sources: dict[str, TextSource]) -> None:
    """Write what the report needs to know of the language models without opening a text."""
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
