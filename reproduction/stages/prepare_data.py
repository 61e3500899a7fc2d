"""Stages `prepare_data` and `prepare_texts`: images and texts, drawn, copied, or named on the hub."""

import operator
import shutil
from pathlib import Path
from typing import Any

from featcal.data.images import require_torchvision
from featcal.errors import MissingPath
from featcal.files import atomic_folder, read_json, write_json
from reproduction.engine.context import Context, load_context, pick
from reproduction.engine.workers import console
from reproduction.experiments import DOMAIN_POOL, GLUE_POOL
from reproduction.mini import images as mini
from reproduction.mini.language import domains
from reproduction.prepare.hub import pinned_data
from reproduction.prepare.sources import DataSource, class_names, write_sources
from reproduction.prepare.suite import ImageData, TextData
from reproduction.prepare.tasks import DOMAINS, GLUE, HUB_ID, PUBLIC, TASKS, glue_task, load_prompts
from reproduction.prepare.texts import TextSource, described_task, write_text_sources

SHOWN = 40  # pictures drawn for the contact sheet, enough that every class has one
CHOICE = Path(__file__).parents[1] / "mini" / "choice.json"
TRAIN, VALIDATION, TEST = SPLITS = ("train", "validation", "test")
COPIED = {TRAIN: TRAIN, TEST: TEST}  # splits of the user's own folders


def images() -> None:
    """Write outputs/<suite>/data/ and the report's suite.json, choice.json, contact_sheet.png."""
    context = load_context()
    data = context.suite.data
    if data.processor == "torchvision":
        require_torchvision()
    makers = {"mini": _synthetic_images, "files": _copied_images, "hub": _hub_images}
    with context.recorded("prepare_data", None):
        with atomic_folder(context.outputs / "data") as folder:
            sources = makers[data.source](context, folder)
            write_sources(folder, sources)
        _describe_images(context, sources)


def texts() -> None:
    """Write outputs/<suite>/texts/ and, for the report, language.json and language_choice.json."""
    context = load_context()
    texts = context.suite.language.texts
    makers = {"mini": _synthetic_texts, "files": _copied_texts, "hub": _hub_texts}
    with context.recorded("prepare_texts", None):
        with atomic_folder(context.outputs / "texts") as folder:
            sources = makers[texts.source](context, folder) if texts else {}
            if not sources:
                console.print(f"prepare_texts: suite {context.suite.name} has no language models")
            write_text_sources(folder, sources)
        _describe_texts(context, sources)


def _copied(context: Context, origin: str | None, task: str, kind: str, folder: Path) -> None:
    """Copy the user's folder of a task, so that a later edit cannot change half of the results."""
    source = context.root / str(origin) / task
    if not source.is_dir():
        way_out = f"put a folder with train.parquet and test.parquet there, or edit suites/{context.suite.name}.yaml"
        raise MissingPath(source, f"the {kind} of a task", way_out)
    shutil.copytree(source, folder / task)


def _counts(data: ImageData | TextData | None) -> dict[str, Any]:
    """Return the samples of a task by split."""
    return {split: getattr(data, split) for split in SPLITS}


def _synthetic_images(context: Context, folder: Path) -> dict[str, DataSource]:
    data, jobs, sources = context.suite.data, {}, {}
    for key in context.suite.tasks:
        jobs[key] = (key, folder / key, data.seed, data.strength, _counts(data))
        task, splits = mini.TASKS[key], {split: split for split in SPLITS}
        sources[key] = DataSource(
            location=key, kind="folder", paper_name=task.paper_name, description=task.description,
            classes=task.classes, templates=task.templates, splits=splits,
        )  # fmt: skip
    context.run("draw", mini.write_parquet, jobs)
    return sources


def _copied_images(context: Context, folder: Path) -> dict[str, DataSource]:
    data, sources = context.suite.data, {}
    for task in context.suite.tasks:
        _copied(context, data.folder, task, "images", folder)
        sources[task] = DataSource(
            location=task, kind="folder", paper_name=task, description="Your own images.",
            classes=class_names(folder / task), templates=("a photo of {}",), splits=COPIED,
            processor=data.processor,
        )  # fmt: skip
    return sources


def _hub_images(context: Context, folder: Path) -> dict[str, DataSource]:
    sources = {}
    for task in context.suite.tasks:
        entry, prompts = TASKS[task], load_prompts(task)
        sources[task] = DataSource(
            location=entry.hub_id, kind="hub", config=entry.config, columns=dict(entry.columns),
            revision=pinned_data(context.pins, entry.hub_id), paper_name=entry.column,
            description=f"{entry.hub_id} on the hub", classes=prompts.classes,
            templates=prompts.templates, processor=context.suite.data.processor,
            splits={TRAIN: entry.train_split, TEST: entry.test_split},
        )  # fmt: skip
    return sources


def _describe_images(context: Context, sources: dict[str, DataSource]) -> None:
    """Write the suite's description for the report, which opens no image."""
    suite, results, counts = context.suite, context.results, _counts(context.suite.data)
    data, synthetic = suite.data, suite.data.source == "mini"
    described = {
        "suite": suite.name,
        # pictures of mini are drawn at their models' size
        "data": data.model_dump(exclude={"processor"} if synthetic else set()),
        "roles": {name: role.model_dump() for name, role in suite.roles.items()},
        "pools": {str(pool): list(names) for pool, names in suite.pools.items()},
        "tasks": [{"task": t, **source.described(), **counts} for t, source in sources.items()],
    }
    write_json(results / "suite.json", described)
    write_json(results / "choice.json", read_json(CHOICE) if synthetic else {})
    sheet = results / "contact_sheet.png"
    if not synthetic:
        mini.write_notice("Pictures of data from elsewhere are not kept with the results.", sheet)
        return
    rows = []
    for task in suite.tasks:
        plain, labels = mini.draw_split(task, TRAIN, SHOWN, data.seed, 0.0)
        shifted, _ = mini.draw_split(task, TRAIN, SHOWN, data.seed, data.strength)
        rows.append((plain, shifted, labels))
    mini.write_contact_sheet(rows, sheet)


def _synthetic_texts(context: Context, folder: Path) -> dict[str, TextSource]:
    language, tests = context.suite.language, domains.TESTS
    texts, jobs, sources = language.texts, dict[str, tuple[Any, ...]](), {}
    assert texts is not None
    counts = _counts(texts)

    def add(write: Any, task: str, paper_name: str, rows: dict[str, int], about: str) -> None:
        jobs[task] = (write, task, folder / task, texts.seed, rows)
        sources[task] = TextSource(
            location=task, kind="folder", paper_name=paper_name, description=about,
            splits={split: split for split in rows},
        )  # fmt: skip

    for task in language.pools.get(GLUE_POOL, ()):
        about = domains.WORLDS[task].description
        add(domains.write_glue, task, GLUE[task].column, counts, about)
    for domain in language.pools.get(DOMAIN_POOL, ()):
        kinds = " and ".join(tests[test].paper_name for test in domains.DOMAINS[domain])
        about = f"What the expert is trained on, of the kinds of {kinds}."
        rows = {TRAIN: texts.domain_train, VALIDATION: texts.validation}
        add(domains.write_domain, domain, domain, rows, about)
    for test in language.tests:
        rows = {split: counts[split] for split in (VALIDATION, TEST)}
        add(domains.write_test, test, tests[test].paper_name, rows, tests[test].description)
    context.run("draw", operator.call, jobs)
    return sources


def _copied_texts(context: Context, folder: Path) -> dict[str, TextSource]:
    language, sources = context.suite.language, {}
    assert language.texts is not None
    for task in language.pools.get(GLUE_POOL, ()):
        _copied(context, language.texts.folder, task, "texts", folder)
        column = glue_task(task).column
        sources[task] = TextSource(location=task, kind="folder", paper_name=column, splits=COPIED)
    return sources


def _hub_texts(context: Context, folder: Path) -> dict[str, TextSource]:
    language, pins, sources = context.suite.language, context.pins, {}

    def add(task: str, hub_id: str, paper_name: str, splits: dict[str, str], config: Any) -> None:
        sources[task] = TextSource(
            location=hub_id, kind="hub", revision=pinned_data(pins, hub_id), config=config,
            paper_name=paper_name, splits=splits,
        )  # fmt: skip

    for task in language.pools.get(GLUE_POOL, ()):
        splits = {TRAIN: "train", TEST: GLUE[task].test_split}
        add(task, HUB_ID, GLUE[task].column, splits, task)
    for domain in language.pools.get(DOMAIN_POOL, ()):
        add(domain, DOMAINS[domain].hub_id, domain, {TRAIN: "train"}, None)
    for key, name in language.tests.items():  # lm-evaluation-harness reads them at this commit
        test = pick("public tests", PUBLIC, name)
        add(key, test.data, key, {TEST: test.split}, test.config)
    return sources


def _describe_texts(context: Context, sources: dict[str, TextSource]) -> None:
    """Write the language models' description for the report, which opens no text."""
    language, texts = context.suite.language, context.outputs / "texts"
    described = {
        "suite": context.suite.name,
        "texts": language.texts.model_dump() if language.texts else None,
        "roles": {name: role.model_dump() for name, role in language.roles.items()},
        "pools": {name: list(tasks) for name, tasks in language.pools.items()},
        "tests": dict(language.tests),
        "tasks": {task: described_task(texts, task, source) for task, source in sources.items()},
    }
    write_json(context.results / "language.json", described)
    synthetic = language.texts is not None and language.texts.source == "mini"
    write_json(context.results / "language_choice.json", domains.measured() if synthetic else {})
