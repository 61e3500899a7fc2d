"""Resolve the stages of all dvc.yaml files with DVC; nothing is run."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import networkx

from pipeline import PAGES, ROOT, SETTINGS, files


@cache
def resolved() -> networkx.DiGraph:
    """Return the graph of all stages: command, file, paths and settings, with edges to their needs."""
    from dvc.repo import Repo

    graph = networkx.DiGraph()
    with tempfile.TemporaryDirectory() as work, Repo(str(laid_out(Path(work)))) as repo:
        names, root = {file.name for file in SETTINGS}, Path(work).resolve()
        for stage in repo.index.graph:
            reads = [dep.params for dep in stage.params if Path(dep.def_path).name in names]
            ends = [stage.path, *(end.fs_path for end in [*stage.outs, *stage.deps])]
            file, *paths = (str(Path(path).resolve().relative_to(root)) for path in ends)
            count = len(stage.outs)
            about = {"cmd": stage.cmd, "reads": tuple(sum(map(list, reads), [])), "file": file}
            about |= {"outs": set(paths[:count]), "deps": set(paths[count:])}
            graph.add_node(stage.name, **about)
        graph.add_edges_from((stage.name, needed.name) for stage, needed in repo.index.graph.edges)
    return graph


def stages_of_dvc_repro() -> set[str]:
    """Return the stages of the project's own dvc.yaml and everything that they need."""
    graph = resolved()
    own = [name for name, file in graph.nodes.data("file") if file == "dvc.yaml"]
    return set(own).union(*(networkx.descendants(graph, name) for name in own))


def laid_out(folder: Path) -> Path:
    """Make a DVC repository that has only definitions and settings."""
    from dvc.repo import Repo

    for file in (*files(), PAGES, *SETTINGS, *(ROOT / "suites").glob("*.yaml")):
        (folder / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.relative_to(ROOT))
    Repo.init(str(folder), no_scm=True).close()
    return folder


def entry(settings: Any, path: str, separator: str) -> Any:
    """Return what dpath.get does at a path without a pattern, without its walk through all entries."""
    for name in path.split(separator):
        if not isinstance(settings, dict):
            raise KeyError(path)
        settings = settings[name]
    return settings


@contextmanager
def settings_of_stages(folder: Path) -> Iterator[list[tuple[str, Any]]]:
    """Give the settings files that DVC compares, by stage; each file is read once."""
    from dvc.dependency import param
    from dvc.repo import Repo

    once, kind = patch.object(param, "load_path", cache(param.load_path)), param.ParamsDependency
    with once, patch("dpath.get", entry), Repo(str(folder)) as repo:
        deps = ((stage.name, dep) for stage in repo.index.stages for dep in stage.deps)
        yield [(name, dep) for name, dep in deps if isinstance(dep, kind)]
