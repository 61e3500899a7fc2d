"""A suite as frozen dataclasses: which checkpoints and data play the roles of the experiments.

One file of suites/ each: mini (made from a seed), paper (hub), files (the user's own). Knows names and counts, opens nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from featcal.errors import BadSetting, UnknownKey
from featcal.experiments import read_yaml
from featcal.settings import from_mapping, require
from featcal.suites.recipe import FineTune


@dataclass(frozen=True)
class Data:
    """Where images come from. mini: drawn with a domain shift of `strength`; files: one folder per task in `folder`; hub: ids."""

    source: Literal["mini", "files", "hub"]
    train: int | None = None  # images per task; None: all there are
    validation: int | None = None
    test: int | None = None
    seed: int = 0
    strength: float = 0.0
    folder: str | None = None


@dataclass(frozen=True)
class Role:
    """One size of model: a CLIP folder or hub id, and its experts: `fine_tune` them here, or a pattern with {task}."""

    clip: str
    experts: str = "fine_tune"


@dataclass(frozen=True)
class Suite:
    """What plays the roles; a role that is null is not run.

    heads: prompts, class_means, or auto: prompts where the text tower knows every word of the class names.
    """

    name: str
    data: Data
    pools: Mapping[int, tuple[str, ...]]
    roles: Mapping[str, Role]
    fine_tune: FineTune
    heads: Literal["prompts", "class_means", "auto"]
    expert_seed: int
    expert_steps: Mapping[str, int]  # tasks whose experts need other than fine_tune.steps
    workers: int
    device: Literal["cpu", "cuda", "auto"]  # auto: the GPU where there is one

    def fine_tuning(self, task: str) -> FineTune:
        """How the expert of one task is trained."""
        return replace(self.fine_tune, steps=self.expert_steps.get(task, self.fine_tune.steps))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task of any pool, in the order of the largest."""
        return max(self.pools.values(), key=len)

    def pool(self, pool: int) -> tuple[str, ...]:
        """The tasks of one pool; raises BadSetting for a pool the suite does not have."""
        if pool not in self.pools:
            raise BadSetting("pool", pool, f"is not in suites/{self.name}.yaml; there are {', '.join(map(str, self.pools))}")
        return self.pools[pool]


KEYS = ("data", "pools", "roles", "fine_tune", "heads", "expert_seed", "expert_steps", "workers", "device")


def load_suite(root: Path, name: str) -> Suite:
    """The suite of `suites/<name>.yaml`. Raises: MissingPath, UnknownKey, BadSetting."""
    path = root / "suites" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in (root / "suites").glob("*.yaml"))
        raise UnknownKey("suite", name, known)
    raw = read_yaml(path)
    for key in raw:
        if key not in KEYS:
            raise UnknownKey(str(path), str(key), list(KEYS))
    for key in KEYS:
        require(key in raw, f"suites/{name}.yaml", sorted(raw), f"lacks {key}")
    return Suite(
        name=name,
        data=_data(f"suites/{name}.yaml: data", raw["data"]),
        pools={int(k): tuple(v) for k, v in raw["pools"].items()},
        roles={k: from_mapping(Role, v, f"suites/{name}.yaml: roles.{k}") for k, v in (raw["roles"] or {}).items() if v},
        fine_tune=from_mapping(FineTune, raw["fine_tune"] or {}, f"suites/{name}.yaml: fine_tune"),
        heads=_one_of(f"suites/{name}.yaml: heads", raw["heads"], "prompts", "class_means", "auto"),
        expert_seed=raw["expert_seed"],
        expert_steps=dict(raw["expert_steps"]),
        workers=raw["workers"],
        device=_one_of(f"suites/{name}.yaml: device", raw["device"], "cpu", "cuda", "auto"),
    )


def _data(place: str, raw: Mapping[str, Any]) -> Data:
    data = from_mapping(Data, raw, place)
    require(data.source in ("mini", "files", "hub"), f"{place}.source", data.source, "must be mini, files or hub")
    require(0 <= data.strength <= 1, f"{place}.strength", data.strength, "must lie in [0, 1]")
    require(data.source != "files" or bool(data.folder), f"{place}.folder", data.folder, "must name the folder with your tasks")
    return data


def _one_of(place: str, value: Any, *words: str) -> Any:
    require(value in words, place, value, f"must be one of {', '.join(words)}")
    return value
