"""What every study's page shows beside its own table or figure: its card, a drawing, its settings, its origin.

Knows the files of one study of one role and pool; knows nothing of what is in its table.
"""

from typing import Any

from featcal.report.evidence import Evidence, read_json
from featcal.report.markup import Shown, link, note, table
from featcal.report.show import commands, evidence, label, run_rows


def settings_of(page: str, suite: str, kind: str) -> dict[str, Any]:
    """The resolved settings that the study left beside its numbers; empty where it was not run."""
    ours = evidence(page, suite)
    return read_json(ours.folder / f"{ours.role}-{ours.pool}.{kind}.settings.json")


def drawn(figure: Any, name: str, suite: str) -> Shown:
    """A figure as SVG, or a note that there is nothing to draw."""
    if figure is None:
        return Shown(note(f"○ not run: no {name} in the results of the {label(suite)}."))
    from featcal.report.figures import svg

    return Shown(picture={"image/svg+xml": svg(figure)}, text=f"{name} ({label(suite)})")


def provenance(page: str, suite: str, kind: str) -> Shown:
    """The study's files and the scores beside them, its run record, and the commands that make the page again."""
    ours = evidence(page, suite)
    key = f"{ours.role}-{ours.pool}"
    there = [ours.path("scores")] if ours.path("scores").is_file() else []
    there += sorted(ours.folder.glob(f"{key}.{kind}.*"))
    listed = ", ".join(link(f"../results/{suite}/{file.name}", file.name) for file in there)
    rows = [("", ["Results", listed or "none yet"]), *run_rows(record(ours, kind)), *commands(page)]
    return Shown(table(["", ""], rows, f"Provenance — {label(suite)}", "fc-words"))


def record(ours: Evidence, kind: str) -> dict[str, Any]:
    """Machine, versions and seconds of the study's own run."""
    return read_json(ours.folder / f"{ours.role}-{ours.pool}.{kind}.run.json")
