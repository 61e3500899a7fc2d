"""The stages of the project as its dvc.yaml files define them: one in the project's folder, the
others below pipeline/.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from reproduction.experiments import MORE, read_all
from reproduction.results import read_yaml

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "pipeline/pages.yaml"  # what the stage `page` is repeated for
SETTINGS = (ROOT / "params.yaml", *(ROOT / name for name in MORE))


def files(root: Path = ROOT, name: str = "dvc.yaml") -> list[Path]:
    """Every dvc.yaml, or every dvc.lock beside them."""
    return [root / name, *sorted(root.glob(f"pipeline/*/{name}"))]


def settings(root: Path = ROOT) -> dict[str, Any]:
    """Every section of params.yaml, pipeline/models.yaml and pipeline/studies.yaml, groups written out wherever they are
    meant, to be changed alone.
    """
    plain: dict[str, Any] = json.loads(json.dumps(read_all(root / "params.yaml")))
    return plain


def write_settings(folder: Path, sections: dict[str, Any]) -> None:
    """Write sections into a project folder, each to the file where it is in this one."""
    files = {file: read_yaml(ROOT / file).keys() for file in MORE}
    (folder / "pipeline").mkdir(exist_ok=True)
    for file in ("params.yaml", *MORE):
        elsewhere = set().union(*(keys for name, keys in files.items() if name != file))
        names = files.get(file, sections.keys() - elsewhere)
        own = {name: value for name, value in sections.items() if name in names}
        (folder / file).write_text(yaml.dump(own, Dumper=yaml.CSafeDumper, sort_keys=False))


def blocks(root: Path = ROOT) -> dict[str, dict]:
    """Every stage block by name; a block with a list of what it is repeated for holds the stage
    under `do`.
    """
    found = [
        block
        for file in files(root)
        for block in yaml.safe_load(file.read_text())["stages"].items()
    ]
    assert len(dict(found)) == len(found), "a name stands for one stage, whichever file it is in"
    return dict(found)


def stages(root: Path = ROOT) -> dict[str, dict]:
    """Every stage by the name of its block, before parts are filled in per experiment."""
    return {name: block.get("do", block) for name, block in blocks(root).items()}
