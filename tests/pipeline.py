"""The stages of the project as its dvc.yaml files define them: one in the project's folder, the others below pipeline/."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "pipeline/pages.yaml"  # what the stage `page` is repeated for


def files(root: Path = ROOT, name: str = "dvc.yaml") -> list[Path]:
    """Every dvc.yaml, or every dvc.lock beside them."""
    return [root / name, *sorted(root.glob(f"pipeline/*/{name}"))]


def blocks(root: Path = ROOT) -> dict[str, dict]:
    """Every stage block by name; a block with a list of what it is repeated for holds the stage under `do`."""
    found = [block for file in files(root) for block in yaml.safe_load(file.read_text())["stages"].items()]
    assert len(dict(found)) == len(found), "a name stands for one stage, whichever file it is in"
    return dict(found)


def stages(root: Path = ROOT) -> dict[str, dict]:
    """Every stage by the name of its block, before parts are filled in per experiment."""
    return {name: block.get("do", block) for name, block in blocks(root).items()}
