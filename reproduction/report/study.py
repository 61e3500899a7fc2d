"""What every study's page shows beside its own table or figure: its card, a drawing, its settings, its origin.

Knows the files of one study of one role and pool; knows nothing of what is in its table.
"""

from typing import Any

from reproduction.report.evidence import Evidence, read_json
from reproduction.report.markup import PageOutput, link, note, table
from reproduction.report.show import commands, evidence, label, run_rows


def settings_of(page: str, suite: str, kind: str) -> dict[str, Any]:
    """The resolved settings that the study left beside its numbers; empty where it was not run."""
    ours = evidence(page, suite)
    return read_json(ours.folder / f"{ours.role}-{ours.pool}.{kind}.settings.json")


def drawn(figure: Any, name: str, suite: str) -> PageOutput:
    """A figure as SVG, or a note that there is nothing to draw."""
    if figure is None:
        return PageOutput(note(f"○ not run: no {name} in the results of the {label(suite)}."))
    from reproduction.report.figures import svg

    return PageOutput(picture={"image/svg+xml": svg(figure)}, text=f"{name} ({label(suite)})")


def provenance(page: str, suite: str, kind: str) -> PageOutput:
    """The study's files and the scores beside them, its run record, and the commands that make the page again."""
    ours = evidence(page, suite)
    key = f"{ours.role}-{ours.pool}"
    there = [ours.path("scores")] if ours.path("scores").is_file() else []
    there += sorted(ours.folder.glob(f"{key}.{kind}.*"))
    listed = ", ".join(link(f"../results/{suite}/{file.name}", file.name) for file in there)
    rows = [("", ["Results", listed or "none yet"]), *run_rows(record(ours, kind)), *commands(page)]
    return PageOutput(table(["", ""], rows, f"Provenance — {label(suite)}", "fc-words"))


def record(ours: Evidence, kind: str) -> dict[str, Any]:
    """Machine, versions and seconds of the study's own run."""
    return read_json(ours.folder / f"{ours.role}-{ours.pool}.{kind}.run.json")
