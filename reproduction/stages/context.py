"""What every stage needs: the experiments, the suite, the paths, and a record of the run.

The record (seconds, machine, versions) goes to a file of its own, so that weights and scores stay
the same bytes between runs.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from featcal.errors import UnknownKey
from featcal.files import atomic_folder, write_json
from featcal.settings import project_root, require
from reproduction.experiments.params import Experiments, load_experiments
from reproduction.experiments.runs import HEADLINE_POOL, Pool, keys_of, require_known
from reproduction.prepare.suite import LanguageRole, Role, SentenceRole, Suite, load_suite
from reproduction.results import run_record
from reproduction.stages.layout import Layout
from reproduction.stages.workers import console

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """Experiments of params.yaml in the chosen suite, and where their files lie."""

    layout: Layout
    experiments: Experiments
    suite: Suite

    def role(self, name: str) -> Role | LanguageRole | SentenceRole | None:
        """What plays a role; None where the suite does not define it. Raises: UnknownKey for one
        that no experiment has.
        """
        require_known("role", name, self.experiments.roles)
        return self.suite.every_role.get(name)

    def knows(self, name: str, pool: Pool) -> bool:
        """Whether the suite has a model for the role, and the pool.

        Raises: UnknownKey for a pair that no experiment has.
        """
        role = self.role(name)
        if (name, pool) not in self.experiments.prepared:
            raise UnknownKey(
                "merge",
                f"{name}-{pool}",
                [f"{role}-{size}" for role, size in self.experiments.prepared],
            )
        return role is not None and pool in self.suite.pools_of(name)

    def plays(self, name: str, pool: Pool) -> bool:
        """Whether it has them, and of a sentence encoder whether it could be had too. Raises: as
        knows.
        """
        there = (
            not isinstance(self.role(name), SentenceRole) or self.layout.base(name, pool).is_dir()
        )
        return self.knows(name, pool) and there


def load_context(root: Path | None = None) -> Context:
    """Everything a stage reads before it starts. Raises: the errors of the settings files."""
    root = project_root(root)
    experiments = load_experiments(root / "params.yaml")
    suite = load_suite(root, experiments.suite)
    for name in suite.every_role:  # a misspelt role would quietly be a role that is not run
        require_known(f"suites/{suite.name}.yaml: roles", name, experiments.roles)
    for key, measured in experiments.measure.items():
        if measured is not None and measured.task not in (
            tasks := suite.tasks_of(measured.role, measured.pool)
        ):
            raise UnknownKey(f"measure.{key}.{suite.name}.task", measured.task, list(tasks))
    for run in experiments.merge.values():
        if suite.every_role.get(run.role) and run.options is not None and run.pool != HEADLINE_POOL:
            place = f"merge.{run.role}-{run.pool}.{run.upstream}.{suite.name}"
            needed = f"is not among the pools of suites/{suite.name}.yaml; write `{suite.name}: null` to leave this merger out"
            require(run.pool in suite.pools_of(run.role), place, run.pool, needed)
    texts = {role: suite.sentences.texts for role in suite.sentences.roles}
    return Context(
        Layout(root, experiments.suite, _prepared(experiments, suite), texts), experiments, suite
    )


def _prepared(experiments: Experiments, suite: Suite) -> dict[str, dict[Pool, tuple[str, ...]]]:
    """Tasks of every pool that is prepared, by role and size."""
    found: dict[str, dict[Pool, tuple[str, ...]]] = {role: {} for role in experiments.roles}
    for role, pool in experiments.prepared:
        pools = suite.pools_of(role)
        if pool in pools:
            found[role][pool] = pools[pool]
    return found


def pick(place: str, entries: Mapping[str, T], key: str) -> T:
    """The entry of that name. Raises: UnknownKey with the nearest one."""
    require_known(place, key, entries)
    return entries[key]


def runs_of(section: str, runs: Mapping[str, T], key: str) -> dict[str, T]:
    """The runs of a role and pool (`clip_b32-14`), or of one merged model (`clip_b32-8-wudi`).
    Raises: UnknownKey.
    """
    found = {name: run for name, run in runs.items() if key in keys_of(run)}
    if not found:
        raise UnknownKey(
            section, key, list(dict.fromkeys(one for run in runs.values() for one in keys_of(run)))
        )
    return found


def not_run(context: Context, place: str, out: Path) -> None:
    """Leave the folder `out` empty, and say that the suite runs none of it."""
    with atomic_folder(out):
        console.print(f"{place}: not run in suite {context.suite.name}")


def fingerprint(settings: Any, files: Iterable[Path]) -> str:
    """A word for settings, and for the bytes of files that decide with them what is made."""
    digest = sha256(json.dumps(settings).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def recorded(context: Context, verb: str, key: str | None) -> Iterator[dict[str, Any]]:
    """Write the run record of a stage when its body has succeeded, with what the body puts into the
    mapping.
    """
    start, more = time.perf_counter(), {}
    yield more
    name = f"{verb}@{key}" if key else verb
    write_json(
        context.layout.run(verb, key), run_record({name: time.perf_counter() - start}, **more)
    )
