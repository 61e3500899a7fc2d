"""The stages of all dvc.yaml files as DVC resolves them from params.yaml; nothing is run, and
nothing needs to have been.
"""

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
    """The names of all stages, each with an edge to those it needs, with its command, file, paths
    and entries of the settings.
    """
    from dvc.repo import Repo

    graph = networkx.DiGraph()
    with tempfile.TemporaryDirectory() as work, Repo(str(laid_out(Path(work)))) as repo:
        names = {file.name for file in SETTINGS}
        for stage in repo.index.graph:
            reads = [
                entry
                for dep in stage.params
                if Path(dep.def_path).name in names
                for entry in dep.params
            ]
            file, *paths = (
                Path(path).resolve().relative_to(Path(work).resolve()) for path in _paths(stage)
            )
            outs, deps = (
                {str(path) for path in paths[: len(stage.outs)]},
                {str(path) for path in paths[len(stage.outs) :]},
            )
            graph.add_node(
                stage.name,
                cmd=stage.cmd,
                reads=tuple(reads),
                file=str(file),
                outs=outs,
                deps=deps,
            )
        graph.add_edges_from((stage.name, needed.name) for stage, needed in repo.index.graph.edges)
    return graph


def stages_of_dvc_repro() -> set[str]:
    """What `dvc repro` looks at: the stages of the project's own dvc.yaml, and all that those
    need.
    """
    graph = resolved()
    own = [name for name, file in graph.nodes.data("file") if file == "dvc.yaml"]
    return set(own).union(*(networkx.descendants(graph, name) for name in own))


def _paths(stage: Any) -> list[str]:
    """The file that a stage stands in, what it writes, and what it reads."""
    return [stage.path, *(out.fs_path for out in stage.outs), *(dep.fs_path for dep in stage.deps)]


def laid_out(folder: Path) -> Path:
    """A DVC repository of the definitions and settings alone."""
    from dvc.repo import Repo

    for file in (*files(), PAGES, *SETTINGS, *(ROOT / "suites").glob("*.yaml")):
        (folder / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.relative_to(ROOT))
    Repo.init(str(folder), no_scm=True).close()
    return folder


def entry(settings: Any, path: str, separator: str) -> Any:
    """What dpath.get finds at a path without a pattern; it looks at every entry of the settings for
    each. Raises: KeyError.
    """
    for name in path.split(separator):
        if not isinstance(settings, dict):
            raise KeyError(path)
        settings = settings[name]
    return settings


@contextmanager
def settings_of_stages(folder: Path) -> Iterator[list[tuple[str, Any]]]:
    """Stages by name, each with a file of settings that DVC compares of it; a file is read once,
    and not once per stage.
    """
    from dvc.dependency import param
    from dvc.repo import Repo

    load = cache(param.load_path)
    with (
        patch.object(param, "load_path", load),
        patch("dpath.get", entry),
        Repo(str(folder)) as repo,
    ):
        yield [
            (s.name, dep)
            for s in repo.index.stages
            for dep in s.deps
            if isinstance(dep, param.ParamsDependency)
        ]
