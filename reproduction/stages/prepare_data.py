"""Stage `prepare_data`: the images of every task: drawn, copied from a folder, or named on the hub."""

import shutil
from pathlib import Path
from typing import Any

from featcal.errors import MissingPath
from featcal.files import atomic_folder, read_json, write_json
from reproduction.engine.context import Context, load_context
from reproduction.prepare.sources import Source, write_sources

SHOWN = 40  # pictures drawn for the contact sheet, enough that every class has one
CHOICE = Path(__file__).parents[1] / "mini" / "choice.json"


def run() -> None:
    """Write outputs/<suite>/data/ and, for the report, results/<suite>/suite.json, choice.json and
    contact_sheet.png.
    """
    context = load_context()
    if context.suite.data.processor == "torchvision":
        from featcal.data.images import require_torchvision

        require_torchvision()
    makers = {"mini": _drawn, "files": _copied, "hub": _named}
    with context.recorded("prepare_data", None):
        with atomic_folder(context.layout.data) as folder:
            sources = makers[context.suite.data.source](context, folder)
            write_sources(folder, sources)
        _describe(context, sources)


def _counts(context: Context) -> dict[str, Any]:
    data = context.suite.data
    return {"train": data.train, "validation": data.validation, "test": data.test}


def _drawn(context: Context, folder: Path) -> dict[str, Source]:
    """Draw every task of the synthetic suite in the workers."""
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


def _copied(context: Context, folder: Path) -> dict[str, Source]:
    """Copy the user's folders, so that a later edit of them cannot change half of the results."""
    from featcal.data.images import class_names

    sources, origin = {}, context.layout.root / str(context.suite.data.folder)
    for task in context.suite.tasks:
        if not (origin / task).is_dir():
            way_out = f"put a folder with train.parquet and test.parquet there, or edit suites/{context.suite.name}.yaml"
            raise MissingPath(origin / task, "the images of a task", way_out)
        shutil.copytree(origin / task, folder / task)
        sources[task] = Source(
            location=task,
            kind="folder",
            paper_name=task,
            description="Your own images.",
            classes=class_names(folder / task),
            templates=("a photo of {}",),
            splits={"train": "train", "test": "test"},
            processor=context.suite.data.processor,
        )
    return sources


def _named(context: Context, folder: Path) -> dict[str, Source]:
    """Return the paper's data sets by hub id, pinned revision and split; they are fetched when they
    are read.
    """
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
            revision=pinned_data(context.layout.pins, entry.hub_id),
            config=entry.config,
            columns=dict(entry.columns),
            processor=context.suite.data.processor,
        )
    return sources


def _describe(context: Context, sources: dict[str, Source]) -> None:
    """Write what the report needs to know of the suite without opening an image."""
    from reproduction.mini.images import draw_split, write_contact_sheet, write_notice

    suite, results, counts = context.suite, context.layout.results, _counts(context)
    data, settings = suite.data, suite.data.model_dump()
    if data.source == "mini":
        del settings["processor"]  # its pictures are drawn at their models' size
    described = {
        "suite": suite.name,
        "data": settings,
        "roles": {name: role.model_dump() for name, role in suite.roles.items()},
        "pools": {str(pool): list(names) for pool, names in suite.pools.items()},
        "tasks": [{"task": task, **one.told(), **counts} for task, one in sources.items()],
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
