"""Stage `summary`: what other programs read of the results: the headline experiment's metrics, or
all claims as data.
"""

from featcal.errors import UnknownKey
from featcal.files import atomic_path, write_json
from reproduction.results import write_rows
from reproduction.stages.context import load_context

KEYS = ("headline", "claims", "artifact")


def run(key: str) -> None:
    """For `headline`: results/<suite>/headline.json, .tasks.csv, .drift.csv; for `claims`:
    claims.json; else ARTIFACT.md.
    """
    from reproduction.report import artifact, summary  # pandas, which other stages need not import

    if key not in KEYS:
        raise UnknownKey("summary", key, list(KEYS))
    context = load_context()
    folder, suite = context.layout.results, context.suite.name
    if key == "claims":
        write_json(folder / "claims.json", summary.claims_as_data(suite))
        return
    if key == "artifact":
        with atomic_path(context.layout.root / "ARTIFACT.md") as hidden:
            hidden.write_text(artifact.text(suite), encoding="utf-8", newline="\n")
        return
    ours = summary.Evidence(suite, summary.ROLE, summary.POOL)
    write_json(folder / "headline.json", summary.metrics(ours))
    write_rows(folder / "headline.tasks.csv", summary.by_task(ours), summary.TASKS)
    write_rows(folder / "headline.drift.csv", summary.by_block(ours), summary.BLOCKS)
