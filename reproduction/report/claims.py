"""The paper's claims as sentences, each with the comparison of results that answers it, from claims.yaml.

What the results say of them stands in verdicts.py; what the paper's own tables say, in printed.py.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from featcal.settings import from_mapping
from reproduction.report.margins import Side, Term, combinations_of, named, terms
from reproduction.report.tables import METHODS, UPSTREAMS
from reproduction.report.values import IMAGES, REAL, TEXT_TASKS, place_name

INSIDE = ("embeddings", "features")  # rows of a drift file that are no blocks
DIGITS = {"value": 1, "seconds": 1, "memory_mib": 0, "count": 0}  # of a measure in words; others have three
CALIBRATED = ("featcal", "surgery", "prob_surgery")
OTHER = "other_task"  # each other task's right side, against the left side's task
GROUPS = (
    "raises its merger", "against adapters", "few samples", "cost", "what matters in the method", "language",
    "checked numerically",
)  # fmt: skip


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
    times: float = 1.0
    by: float = 0.0
    within: float = 0.0
    each: str = ""
    beside: list[str] = field(default_factory=list)
    over: Any = None
    where: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    paper: str = ""
    abstract: bool = False
    headline: bool = False
    group: str = ""

    @property
    def terms(self) -> list[Term]:
        """The weighted models of the claim's sum."""
        return terms(self.kind, self.left, self.right, self.than, self.times, self.direction)

    @property
    def has_settings(self) -> bool:
        """Whether a side is FeatCal or an adapter, so that the claim is another one at other settings."""
        return any(named(side).get("method") in CALIBRATED for side in (self.left, self.right, self.than) if side)

    @property
    def unit(self) -> str:
        """What a claim about several is about each of, in the plural."""
        if self.over:
            return "comparisons" if isinstance(self.over, dict) else "models" if self.pool in TEXT_TASKS else "columns"
        return {"task": "tasks", OTHER: "other tasks", "samples": "numbers of images", "corruption": "kinds of damage"}[self.each]

    @property
    def parts(self) -> dict[str, "Claim"]:
        """A claim about several experiments or models as one claim about each, by name."""
        return {", ".join(_names(choice)): self._one(choice) for choice in combinations_of(self.over)} if self.over else {}

    @property
    def on_texts(self) -> "Claim | None":
        """The claim about the real encoder; None where it is about a larger model, a kind of damage, or language models."""
        places = self.over.get("place") if isinstance(self.over, dict) else self.over
        roles = {named(side).get("role", self.role) for side in (self.left, self.right, self.than) if side}
        if places:
            roles = {IMAGES} & {role for role, _ in places}
        damage = {named(side).get("corruption", "clean") for side in (self.where, self.left, self.right) if side}
        if roles != {IMAGES} or damage != {"clean"}:
            return None
        left, right, than = (
            side | {"role": REAL} if isinstance(side, dict) and "role" in side else side
            for side in (self.left, self.right, self.than)
        )
        over = self.over
        if places:
            kept = [[REAL, pool] for role, pool in places if role == IMAGES]
            over = over | {"place": kept} if isinstance(over, dict) else kept
        return replace(self, role=REAL, left=left, right=right, than=than, over=over)

    def is_about(self, value: Any) -> bool:
        """Whether a claim about each task (or each of another column) is about this one, too."""
        left_out = (named(self.left)["task"], *self.beside) if self.each == OTHER else self.beside
        return value not in left_out

    def of(self, value: Any) -> "Claim":
        """The claim about one of what it is about each of."""
        if self.each == OTHER:
            return replace(self, each="", right=named(self.right) | {"task": value})
        return replace(self, each="", where=self.where | {self.each: value})

    def _one(self, choice: dict[str, Any]) -> "Claim":
        role, pool = choice.get("place", (self.role, self.pool))
        upstream = {"upstream": choice["upstream"]} if "upstream" in choice else {}
        against = {"method": choice["against"]} if "against" in choice else {}
        left, right = named(self.left) | upstream, named(self.right) | upstream | against
        return replace(self, role=role, pool=str(pool), over=None, left=left, right=right)


def _names(choice: dict[str, Any]) -> list[str]:
    titles = UPSTREAMS | {method: label.removeprefix("w/ ") for method, label in METHODS.items()}
    return [place_name(value[0], str(value[1])) if word == "place" else titles[value] for word, value in choice.items()]


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim of claims.yaml, in its order. Raises: UnknownKey or BadSetting for an entry of another shape."""
    sections = yaml.safe_load(files("reproduction.report").joinpath("claims.yaml").read_text(encoding="utf-8"))
    found = []
    for place, section in sections.items():
        shared = {"place": place, "role": section["role"], "pool": str(section["pool"]), "table": section.get("table", "")}
        found += [from_mapping(Claim, shared | entry, f"claims.yaml {entry.get('id')}") for entry in section["claims"]]
    return tuple(found)


def main_setting(suite: str) -> str:
    """Which FeatCal settings a suite's verdicts are counted at: its own, or the paper's in the suite `paper`."""
    return "paper" if suite == "paper" else "suite"
