"""Stage `prepare_data`: the images of every task of the suite, drawn, copied from the user's
folder, or named on the hub.
"""

import shutil
from pathlib import Path
from typing import Any

from featcal.errors import MissingPath
from featcal.files import atomic_folder, read_json, write_json
from reproduction.prepare.sources import Source, write_sources
from reproduction.stages.context import Context, load_context, recorded
from reproduction.stages.workers import fan_out

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
    with recorded(context, "prepare_data", None):
        with atomic_folder(context.layout.data) as folder:
            sources = makers[context.suite.data.source](context, folder)
            write_sources(folder, sources)
        _describe(context, sources)


def _drawn(context: Context, folder: Path) -> dict[str, Source]:
    """Every task of the mini suite, drawn in the workers."""
    from reproduction.mini.images import write_parquet
    from reproduction.mini.tasks import TASKS

    data = context.suite.data
    counts = {"train": data.train, "validation": data.validation, "test": data.test}
    jobs = {
        task: (task, folder / task, data.seed, data.strength, counts)
        for task in context.suite.tasks
    }
    for _ in fan_out("draw", write_parquet, jobs, context.suite.workers):
        pass
    splits = {name: name for name in counts}
    sources = {}
    for task in context.suite.tasks:
        drawn = TASKS[task]
        sources[task] = Source(
            location=task,
            kind="folder",
            paper_name=drawn.paper_name,
            description=drawn.description,
            classes=drawn.classes,
            templates=drawn.templates,
            splits=splits,
        )
    return sources


def _copied(context: Context, folder: Path) -> dict[str, Source]:
    """The user's own folders, copied so that a later edit of them cannot change half of the
    results.
    """
    from featcal.data.images import class_names

    sources = {}
    origin = context.layout.root / str(context.suite.data.folder)
    for task in context.suite.tasks:
        if not (origin / task).is_dir():
            way_out = f"put a folder with train.parquet and test.parquet there, or edit suites/{context.suite.name}.yaml"
            raise MissingPath(origin / task, "the images of a task", way_out)
        shutil.copytree(origin / task, folder / task)
        classes = class_names(folder / task)
        splits = {"train": "train", "test": "test"}
        sources[task] = Source(
            location=task,
            kind="folder",
            paper_name=task,
            description="Your own images.",
            classes=classes,
            templates=("a photo of {}",),
            splits=splits,
            processor=context.suite.data.processor,
        )
    return sources


def _named(context: Context, folder: Path) -> dict[str, Source]:
    """The paper's data sets by hub id, pinned revision and split; the datasets library fetches them
    when they are read.
    """
    from reproduction.prepare.hub import pinned_data
    from reproduction.prepare.image_tasks import TASKS, load_prompts

    sources = {}
    for task in context.suite.tasks:
        entry, prompts = TASKS[task], load_prompts(task)
        revision = pinned_data(context.layout.pins, entry.hub_id)
        splits = {"train": entry.train_split, "test": entry.test_split}
        columns = dict(entry.columns)
        sources[task] = Source(
            location=entry.hub_id,
            kind="hub",
            paper_name=entry.column,
            description=f"{entry.hub_id} on the hub",
            classes=prompts.classes,
            templates=prompts.templates,
            splits=splits,
            revision=revision,
            config=entry.config,
            columns=columns,
            processor=context.suite.data.processor,
        )
    return sources


def _describe(context: Context, sources: dict[str, Source]) -> None:
    """What the report needs to know of the suite without opening any image."""
    from reproduction.mini.images import write_notice

    data, results = context.suite.data, context.layout.results
    counts = {"train": data.train, "validation": data.validation, "test": data.test}
    tasks: list[dict[str, Any]] = [
        {"task": task, **source.told(), **counts} for task, source in sources.items()
    ]
    roles = {name: role.model_dump() for name, role in context.suite.roles.items()}
    pools = {str(pool): list(names) for pool, names in context.suite.pools.items()}
    settings = data.model_dump()
    if data.source == "mini":
        del settings["processor"]  # its pictures are drawn at their models' size
    described = {
        "suite": context.suite.name,
        "data": settings,
        "roles": roles,
        "pools": pools,
        "tasks": tasks,
    }
    write_json(results / "suite.json", described)
    if data.source != "mini":
        write_json(results / "choice.json", {})
        write_notice(
            "Pictures of data from elsewhere are not kept with the results.",
            results / "contact_sheet.png",
        )
        return
    write_json(results / "choice.json", read_json(CHOICE))
    _draw_sheet(context)


def _draw_sheet(context: Context) -> None:
    from reproduction.mini.images import draw_split, write_contact_sheet

    data = context.suite.data
    rows = []
    for task in context.suite.tasks:
        drawn, labels = draw_split(task, "train", SHOWN, data.seed, 0.0)
        shifted, _ = draw_split(task, "train", SHOWN, data.seed, data.strength)
        rows.append((drawn, shifted, labels))
    write_contact_sheet(rows, context.layout.results / "contact_sheet.png")
