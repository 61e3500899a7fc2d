"""The stages of all dvc.yaml files as DVC resolves them from params.yaml; nothing is run, and nothing needs to have been."""

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import networkx

from pipeline import PAGES, ROOT, SETTINGS, files


@cache
def resolved() -> networkx.DiGraph:
    """The names of all stages, each with an edge to those it needs, with its command, file, paths and entries of the settings."""
    from dvc.repo import Repo

    graph = networkx.DiGraph()
    with tempfile.TemporaryDirectory() as work:
        for file in (*files(), PAGES, *SETTINGS):
            copied = Path(work) / file.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)
        Repo.init(work, no_scm=True).close()
        with Repo(work) as repo:
            names = {file.name for file in SETTINGS}
            for stage in repo.index.graph:
                reads = [entry for dep in stage.params if Path(dep.def_path).name in names for entry in dep.params]
                file, *paths = (Path(path).resolve().relative_to(Path(work).resolve()) for path in _paths(stage))
                outs, deps = {str(path) for path in paths[: len(stage.outs)]}, {str(path) for path in paths[len(stage.outs) :]}
                graph.add_node(stage.name, cmd=stage.cmd, reads=tuple(reads), file=str(file), outs=outs, deps=deps)
            graph.add_edges_from((stage.name, needed.name) for stage, needed in repo.index.graph.edges)
    return graph


def _paths(stage: Any) -> list[str]:
    """The file that a stage stands in, what it writes, and what it reads."""
    return [stage.path, *(out.fs_path for out in stage.outs), *(dep.fs_path for dep in stage.deps)]
