"""Stages `prepare_data` and `prepare_texts`: the images and texts of every task, which are drawn,
copied from the user's folders, or named on the hub.

Data sets of the hub are named by id, pinned revision and split, and fetched when they are read.
"""

import operator
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from featcal.errors import MissingPath
from featcal.files import atomic_folder, read_json, write_json
from reproduction.engine.context import Context, load_context, pick
from reproduction.engine.workers import console
from reproduction.experiments import DOMAIN_POOL, GLUE_POOL
from reproduction.prepare.sources import Source, write_sources
from reproduction.prepare.texts import TextSource, described_task, write_text_sources

SHOWN = 40  # pictures drawn for the contact sheet, enough that every class has one
CHOICE = Path(__file__).parents[1] / "mini" / "choice.json"
TEST = "test"


def images() -> None:
    """Write outputs/<suite>/data/ and, for the report, results/<suite>/suite.json, choice.json and
    contact_sheet.png.
    """
    context = load_context()
    data = context.suite.data
    if data.processor == "torchvision":
        from featcal.data.images import require_torchvision

        require_torchvision()
    makers = {"mini": _drawn_images, "files": _copied_images, "hub": _named_images}
    with context.recorded("prepare_data", None):
        with atomic_folder(context.outputs / "data") as folder:
            sources = makers[data.source](context, folder)
            write_sources(folder, sources)
        _describe_images(context, sources)


def texts() -> None:
    """Write outputs/<suite>/texts/ and, for the report, language.json and language_choice.json of
    results/<suite>/.
    """
    context = load_context()
    texts = context.suite.language.texts
    makers = {"mini": _drawn_texts, "files": _copied_texts, "hub": _named_texts}
    with context.recorded("prepare_texts", None):
        with atomic_folder(context.outputs / "texts") as folder:
            sources = makers[texts.source](context, folder) if texts else {}
            if not sources:
                console.print(f"prepare_texts: suite {context.suite.name} has no language models")
            write_text_sources(folder, sources)
        _describe_texts(context, sources)


def _copied(context: Context, origin: str | None, task: str, kind: str, folder: Path) -> None:
    """Copy the user's folder of a task, so that a later edit cannot change half of the results."""
    own = context.root / str(origin) / task
    if not own.is_dir():
        way_out = f"put a folder with train.parquet and test.parquet there, or edit suites/{context.suite.name}.yaml"
        raise MissingPath(own, f"the {kind} of a task", way_out)
    shutil.copytree(own, folder / task)


def _counts(context: Context) -> dict[str, Any]:
    data = context.suite.data
    return {"train": data.train, "validation": data.validation, "test": data.test}


def _drawn_images(context: Context, folder: Path) -> dict[str, Source]:
    from reproduction.mini.images import write_parquet
    from reproduction.mini.tasks import TASKS

    data, counts = context.suite.data, _counts(context)
    jobs = {
        task: (task, folder / task, data.seed, data.strength, counts)
        for task in context.suite.tasks
    }
    context.run("draw", write_parquet, jobs)
    return {
        task: Source(
            location=task,
            kind="folder",
            paper_name=TASKS[task].paper_name,
            description=TASKS[task].description,
            classes=TASKS[task].classes,
            templates=TASKS[task].templates,
            splits={name: name for name in counts},
        )
        for task in context.suite.tasks
    }


def _copied_images(context: Context, folder: Path) -> dict[str, Source]:
    from featcal.data.images import class_names

    data, sources = context.suite.data, {}
    for task in context.suite.tasks:
        _copied(context, data.folder, task, "images", folder)
        sources[task] = Source(
            location=task,
            kind="folder",
            paper_name=task,
            description="Your own images.",
            classes=class_names(folder / task),
            templates=("a photo of {}",),
            splits={"train": "train", "test": "test"},
            processor=data.processor,
        )
    return sources


def _named_images(context: Context, folder: Path) -> dict[str, Source]:
    from reproduction.prepare.hub import pinned_data
    from reproduction.prepare.tasks import TASKS, load_prompts

    sources = {}
    for task in context.suite.tasks:
        entry, prompts = TASKS[task], load_prompts(task)
        sources[task] = Source(
            location=entry.hub_id,
            kind="hub",
            paper_name=entry.column,
            description=f"{entry.hub_id} on the hub",
            classes=prompts.classes,
            templates=prompts.templates,
            splits={"train": entry.train_split, "test": entry.test_split},
            revision=pinned_data(context.pins, entry.hub_id),
            config=entry.config,
            columns=dict(entry.columns),
            processor=context.suite.data.processor,
        )
    return sources


def _describe_images(context: Context, sources: dict[str, Source]) -> None:
    """Write what the report needs to know of the suite without opening an image."""
    from reproduction.mini.images import draw_split, write_contact_sheet, write_notice

    suite, results, counts = context.suite, context.results, _counts(context)
    data, settings = suite.data, suite.data.model_dump()
    if data.source == "mini":
        del settings["processor"]  # its pictures are drawn at their models' size
    described = {
        "suite": suite.name,
        "data": settings,
        "roles": {name: role.model_dump() for name, role in suite.roles.items()},
        "pools": {str(pool): list(names) for pool, names in suite.pools.items()},
        "tasks": [{"task": task, **one.described(), **counts} for task, one in sources.items()],
    }
    write_json(results / "suite.json", described)
    sheet = results / "contact_sheet.png"
    if data.source != "mini":
        write_json(results / "choice.json", {})
        write_notice("Pictures of data from elsewhere are not kept with the results.", sheet)
        return
    write_json(results / "choice.json", read_json(CHOICE))
    rows = []
    for task in suite.tasks:
        drawn, labels = draw_split(task, "train", SHOWN, data.seed, 0.0)
        shifted, _ = draw_split(task, "train", SHOWN, data.seed, data.strength)
        rows.append((drawn, shifted, labels))
    write_contact_sheet(rows, sheet)


def _folder(task: str, paper_name: str, splits: Iterable[str], about: str = "") -> TextSource:
    own = {split: split for split in splits}
    return TextSource(
        location=task, kind="folder", paper_name=paper_name, splits=own, description=about
    )


def _drawn_texts(context: Context, folder: Path) -> dict[str, TextSource]:
    from reproduction.mini.language.domains import (
        DOMAINS,
        TESTS,
        WORLDS,
        write_domain,
        write_glue,
        write_test,
    )
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
    context.run("draw", operator.call, jobs)
    return sources


def _copied_texts(context: Context, folder: Path) -> dict[str, TextSource]:
    from reproduction.prepare.tasks import glue_task

    language, sources = context.suite.language, {}
    assert language.texts is not None
    for task in language.pools.get(GLUE_POOL, ()):
        _copied(context, language.texts.folder, task, "texts", folder)
        sources[task] = _folder(task, glue_task(task).column, ("train", TEST))
    return sources


def _named_texts(context: Context, folder: Path) -> dict[str, TextSource]:
    from reproduction.prepare.hub import pinned_data
    from reproduction.prepare.tasks import DOMAINS, GLUE, HUB_ID, PUBLIC

    language, pins, sources = context.suite.language, context.pins, {}

    def add(task: str, hub_id: str, paper_name: str, splits: dict[str, str], config: Any) -> None:
        sources[task] = TextSource(
            location=hub_id,
            kind="hub",
            paper_name=paper_name,
            splits=splits,
            revision=pinned_data(pins, hub_id),
            config=config,
        )

    for task in language.pools.get(GLUE_POOL, ()):
        splits = {"train": "train", TEST: GLUE[task].test_split}
        add(task, HUB_ID, GLUE[task].column, splits, task)
    for domain in language.pools.get(DOMAIN_POOL, ()):
        add(domain, DOMAINS[domain].hub_id, domain, {"train": "train"}, None)
    for key, name in language.tests.items():  # lm-evaluation-harness reads them at this commit
        test = pick("public tests", PUBLIC, name)
        add(key, test.data, key, {TEST: test.split}, test.config)
    return sources


def _describe_texts(context: Context, sources: dict[str, TextSource]) -> None:
    """Write what the report needs to know of the language models without opening a text."""
    from reproduction.mini.language.domains import measured

    language, texts = context.suite.language, context.outputs / "texts"
    described = {
        "suite": context.suite.name,
        "texts": language.texts.model_dump() if language.texts else None,
        "roles": {name: role.model_dump() for name, role in language.roles.items()},
        "pools": {name: list(tasks) for name, tasks in language.pools.items()},
        "tests": dict(language.tests),
        "tasks": {task: described_task(texts, task, one) for task, one in sources.items()},
    }
    write_json(context.results / "language.json", described)
    drawn = language.texts is not None and language.texts.source == "mini"
    write_json(context.results / "language_choice.json", measured() if drawn else {})
