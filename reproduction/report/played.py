"""What one run of the playground shows: accuracy per task, drift per block, the command line that
does the same.

A run that could not be made, for want of experts or images, shows how to make them. Knows neither
models nor torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import pandas as pd

from featcal.settings import Calibration
from reproduction.report.figures import COLOURS, MARKERS, NAMES, block_name, one_panel
from reproduction.report.html import PageOutput, arrow, compact, link, note, table
from reproduction.report.page import SYMBOLS, drawn, label
from reproduction.report.paper import TASKS

SEED = 42  # of the calibration draw: the first of the tables' seeds
MODELS = {
    "base": "Base",
    "merged": "Merged",
    "featcal": "Merged and calibrated",
    "expert": "Each task’s expert",
}


@dataclass(frozen=True)
class Wanted:
    """What was asked for, in the words of params.yaml."""

    suite: str
    role: str
    pool: int
    merger: str
    settings: Calibration
    samples: int
    test_images: int


@dataclass(frozen=True)
class Played:
    """One run; everything but `wanted` is empty where it could not be made."""

    wanted: Wanted
    right: Mapping[str, Mapping[str, tuple[int, int]]] = field(
        default_factory=dict
    )  # model → task → (right answers, images)
    drift: Sequence[Mapping[str, Any]] = ()  # one row per model, task and block
    commands: str = ""
    model: Any = None  # the calibrated module, for whoever wants to go on with it


def told(run: Played) -> PageOutput:
    """What is played with; or the command that makes what is missing."""
    wanted = run.wanted
    chosen = f"{wanted.role}, {wanted.pool} tasks, merged by {wanted.merger}"
    if not run.right:
        command = f"dvc repro pipeline/images/dvc.yaml:prepare@{wanted.role}-{wanted.pool}"
        text = f"○ not run: the images and experts of {wanted.role} with {wanted.pool} tasks have not been made here. "
        return PageOutput(
            note(f"{text}Make them with <code>{command}</code>, then execute this notebook again.")
        )
    values = {name: getattr(wanted.settings, name) for name in SYMBOLS if name != "samples"} | {
        "samples": wanted.samples
    }
    settings = " · ".join(f"{SYMBOLS[name]} = {compact(value)}" for name, value in values.items())
    images = max(count for counts in run.right.values() for _, count in counts.values())
    text = f"<p><strong>{label(wanted.suite)}: {chosen}.</strong></p><p>{settings}; {images} test images of each task.</p>"
    return PageOutput(f'<div class="fc-card">{text}</div>')


def accuracies(run: Played) -> PageOutput:
    """Accuracy per task of base, merged, calibrated and expert; arrows: calibrated against
    merged.
    """
    if not run.right:
        return _not_run("accuracies")
    tasks = list(run.right["merged"])
    percent = {
        name: {task: 100 * counts[task][0] / counts[task][1] for task in tasks}
        for name, counts in run.right.items()
    }
    by_task = {task: {name: values[task] for name, values in percent.items()} for task in tasks}
    rows = [("", [escape(TASKS.get(task, task)), *_cells(by_task[task])]) for task in tasks]
    means = {name: sum(values.values()) / len(tasks) for name, values in percent.items()}
    rows.append(("fc-total", ["Average", *_cells(means)]))
    caption = f"Top-1 accuracy (%) on the drawn test images — {label(run.wanted.suite)}. Arrows: against the merged model."
    return PageOutput(table(["Task", *MODELS.values()], rows, caption))


def _cells(values: Mapping[str, float]) -> list[str]:
    change = f"<small>{arrow(values['featcal'] - values['merged'])}</small>"
    return [f"{values[name]:.1f}{change if name == 'featcal' else ''}" for name in MODELS]


def drift(run: Played) -> PageOutput:
    """Relative drift from the experts after every block: mean over tasks, and the range from task
    to task.
    """
    if not run.drift:
        return _not_run("drift")
    frame = pd.DataFrame(run.drift)
    blocks = list(dict.fromkeys(frame["block"]))
    with one_panel(3.6) as (figure, axes):
        for model in ("merged", "featcal"):
            found = frame[frame["model"] == model].groupby("block", sort=False)["relative_drift"]
            colour, marker = COLOURS[model], MARKERS[model]
            axes.fill_between(
                range(len(blocks)), found.min(), found.max(), color=colour, alpha=0.2, lw=0
            )
            look: dict[str, Any] = {
                "marker": marker,
                "markersize": 9,
                "markeredgecolor": "white",
                "lw": 2,
            }
            axes.plot(range(len(blocks)), found.mean(), color=colour, label=NAMES[model], **look)
        axes.set_xticks(
            range(len(blocks)), map(block_name, blocks), rotation=0 if len(blocks) < 10 else 90
        )
        axes.set(xlabel="after block", ylabel="relative drift (no unit)")
        axes.set_ylim(0, None)
        axes.legend()
    return drawn(figure, "drift", label(run.wanted.suite))


def command_line(run: Played) -> PageOutput:
    """The same with the command `featcal`, on the same files; for the project's folder, its
    environment activated.
    """
    if not run.commands:
        return _not_run("the command line")
    return PageOutput(picture={"text/markdown": f"```bash\n{run.commands}\n```"}, text=run.commands)


def origin() -> PageOutput:
    """Where the page's numbers come from."""
    rows = [
        (
            "",
            [
                "Source of this page",
                link("../notebooks/playground.ipynb", "notebooks/playground.ipynb"),
            ],
        ),
        ("", ["Numbers", "computed in this notebook when it was executed, and kept nowhere else"]),
        (
            "",
            [
                "What they are made from",
                "outputs of the stages <code>prepare_data</code> and <code>prepare</code>",
            ],
        ),
        ("", ["This page again", "<code>dvc repro playground</code>"]),
    ]
    return PageOutput(table(["", ""], rows, "Provenance", "fc-words"))


def _not_run(what: str) -> PageOutput:
    return PageOutput(note(f"○ not run: {what}, see the note above."))
