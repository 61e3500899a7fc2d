"""The graph of dvc.yaml on the smoke suite: the same stages, resolved by DVC itself, run one after the other in this process."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import networkx
import yaml

from featcal.stages.run import run_stage

ROOT = Path(__file__).parents[1]
LAID_OUT = ("dvc.yaml", "featcal", "notebooks", "book", "suites")
FEW = {"samples": 16, "batch": 8, "seeds": [42, 43]}


def smoke_params(root: Path = ROOT) -> dict:
    """params.yaml with a smoke group in every experiment, made from the mini group."""
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["suite"] = "smoke"
    for entry in params["merge"].values():
        entry["smoke"] = entry["mini"]
    for entry in params["calibrate"].values():
        entry["smoke"] = {**entry["mini"], **FEW}
    for entry in params["measure"].values():
        entry["smoke"] = {**entry["mini"], "task": "dtd"}
    return params


def lay_out(work: Path, root: Path = ROOT) -> None:
    """A project folder without results: the tracked files of `root`, the smoke suite, and a DVC repository without git."""
    ignored = shutil.ignore_patterns("__pycache__", "_build", "pages")
    for name in LAID_OUT:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, work / name, ignore=ignored)
        else:
            shutil.copyfile(source, work / name)
    shutil.copyfile(root / "tests" / "smoke" / "smoke.yaml", work / "suites" / "smoke.yaml")
    (work / "params.yaml").write_text(yaml.safe_dump(smoke_params(root), sort_keys=False))
    from dvc.repo import Repo

    Repo.init(str(work), no_scm=True).close()


def commands(work: Path) -> list[list[str]]:
    """Every command of the graph that is not frozen, what it needs before it, as DVC resolves them."""
    from dvc.repo import Repo

    with Repo(str(work)) as repo:
        ordered = list(networkx.dfs_postorder_nodes(repo.index.graph))
        return [stage.cmd.split() for stage in ordered if not stage.frozen]


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """The current folder for the length of the block."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_smoke_graph(work: Path, root: Path = ROOT) -> dict[str, str]:
    """Run the graph in the empty folder `work`; sha256 of every weight and score file, by path."""
    lay_out(work, root)
    with working_in(work):
        for command in commands(work):
            if command[:2] == ["featcal", "stage"]:
                run_stage(command[2], command[3] if len(command) > 3 else None)
    files = [*work.glob("outputs/**/*.safetensors"), *work.glob("results/**/*.csv")]
    return {str(file.relative_to(work)): sha256(file.read_bytes()).hexdigest() for file in sorted(files)}
