"""Read the stages of the project's dvc.yaml files, their settings and their results."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from reproduction.experiments import MORE, read_all
from reproduction.results import read_yaml

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "mini"  # those in git
NOTEBOOKS = sorted(source.stem for source in (ROOT / "notebooks").glob("*.ipynb"))
PAGES = ROOT / "pipeline/pages.yaml"  # what the stage `page` is repeated for
KINDS = dict.fromkeys("value relative_drift l2 cosine cosine_sd similarity size x y".split(), float)
KINDS |= {"count": int, "index": int}
SETTINGS = (ROOT / "params.yaml", *(ROOT / name for name in MORE))


def files(root: Path = ROOT, name: str = "dvc.yaml") -> list[Path]:
    """Return every dvc.yaml, or every dvc.lock."""
    return [root / name, *sorted(root.glob(f"pipeline/*/{name}"))]


def settings(root: Path = ROOT) -> dict[str, Any]:
    """Return every section of the settings without shared groups, so that each can be changed."""
    return json.loads(json.dumps(read_all(root / "params.yaml")))


def write_settings(folder: Path, sections: dict[str, Any]) -> None:
    """Write sections into a project folder, each into the file that has it in this project."""
    files = {file: read_yaml(ROOT / file).keys() for file in MORE}
    (folder / "pipeline").mkdir(exist_ok=True)
    for file in ("params.yaml", *MORE):
        elsewhere = set().union(*(keys for name, keys in files.items() if name != file))
        names = files.get(file, sections.keys() - elsewhere)
        own = {name: value for name, value in sections.items() if name in names}
        (folder / file).write_text(yaml.dump(own, Dumper=yaml.CSafeDumper, sort_keys=False))


def blocks() -> dict[str, dict]:
    """Return every block of stages by name; a repeated block has its stage under `do`."""
    contents = (yaml.safe_load(file.read_text())["stages"] for file in files())
    found = [block for content in contents for block in content.items()]
    assert len(dict(found)) == len(found), "two files define a stage of the same name"
    return dict(found)


def stages() -> dict[str, dict]:
    """Return the stage of every block, with its variables unresolved."""
    return {name: block.get("do", block) for name, block in blocks().items()}


def read_rows(path: Path, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a results file with these columns, numbers as such."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *body = list(csv.reader(file))
    assert not columns or header == list(columns)
    return [{c: KINDS.get(c, str)(v) for c, v in zip(header, row, strict=True)} for row in body]
