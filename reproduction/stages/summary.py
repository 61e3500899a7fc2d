"""Stage `summary`: metrics, claims and ARTIFACT.md, made from results alone."""

from featcal.errors import UnknownKey
from featcal.files import atomic_path, write_json
from reproduction.results import chosen_suite, project_root, read_yaml, write_rows


def run(key: str) -> None:
    """For `headline`: write results/<suite>/headline.json, .tasks.csv, .drift.csv; for `claims`:
    claims.json; for `artifact`: ARTIFACT.md.
    """
    from reproduction.report import artifact  # pandas, which other stages need not import

    root = project_root()
    suite = chosen_suite(read_yaml(root / "params.yaml"))
    folder = root / "results" / suite
    if key == "claims":
        write_json(folder / "claims.json", artifact.claims_as_data(suite))
    elif key == "artifact":
        with atomic_path(root / "ARTIFACT.md") as hidden:
            hidden.write_text(artifact.text(suite), encoding="utf-8", newline="\n")
    elif key == "headline":
        ours = artifact.Evidence(suite, artifact.ROLE, artifact.POOL)
        write_json(folder / "headline.json", artifact.metrics(ours))
        write_rows(folder / "headline.tasks.csv", artifact.by_task(ours), artifact.TASKS)
        write_rows(folder / "headline.drift.csv", artifact.by_block(ours), artifact.BLOCKS)
    else:
        raise UnknownKey("summary", key, ["headline", "claims", "artifact"])
