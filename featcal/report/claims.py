"""The paper's claims as sentences, each with the comparison of results that answers it, from claims.yaml.

What the results say of them stands in verdicts.py; what the paper's own tables say, in printed.py.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from featcal.report.margins import Side
from featcal.report.values import TEXT_TASKS
from featcal.settings import from_mapping

INSIDE = ("embeddings", "features")  # rows of a drift file that are no blocks
DIGITS = {"value": 1, "seconds": 1, "memory_mib": 0}  # of a measure in words; others have three


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper and the comparison that answers it; the words are explained in claims.yaml."""

    id: str
    place: str
    role: str
    pool: str
    sentence: str
    source: str
    left: Side
    right: Side
    than: Side = ()
    kind: str = "above"
    file: str = "scores"
    measure: str = "value"
    direction: str = "higher"
    each: str = ""
    over: list[list[Any]] = field(default_factory=list)
    where: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    paper: str = ""
    abstract: bool = False

    @property
    def parts(self) -> str:
        """What a claim about several experiments is about each of."""
        return "models" if self.pool in TEXT_TASKS else "columns"


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim of claims.yaml, in its order. Raises: UnknownKey or BadSetting for an entry of another shape."""
    sections = yaml.safe_load(files("featcal.report").joinpath("claims.yaml").read_text(encoding="utf-8"))
    found = []
    for place, section in sections.items():
        shared = {"place": place, "role": section["role"], "pool": str(section["pool"]), "table": section.get("table", "")}
        found += [from_mapping(Claim, shared | entry, f"claims.yaml {entry.get('id')}") for entry in section["claims"]]
    return tuple(found)


def main_setting(suite: str) -> str:
    """Which FeatCal settings a suite's verdicts are counted at: its own, or the paper's in the suite `paper`."""
    return "paper" if suite == "paper" else "suite"
