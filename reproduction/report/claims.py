"""The paper's claims, from claims.yaml: each a sentence with the comparison that answers it.

verdicts.py judges them by the results; page.py shows what the paper's own tables say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from reproduction.report import paper
from reproduction.report.tables import NAMES, UPSTREAMS

# [upstream, method], or a mapping with these and other columns such as role, pool, file and task
Side = Any
Term = tuple[float, dict[str, Any]]  # a weight, and the columns that name one model's rows
SUMS = ("above", "level", "checked", "gain", "closer", "falls")  # kinds that are a sum of means
INSIDE = ("embeddings", "features")  # rows of a drift file that are no blocks
DIGITS = {"value": 1, "seconds": 1, "memory_mib": 0, "count": 0}  # by measure; others have three
CALIBRATED = ("featcal", "surgery", "prob_surgery")
SECOND_MERGERS = ("average", "task_arithmetic", "wudi_closed_form")  # of the second encoder
SECOND_METHODS = {"base", "expert", "merged", *CALIBRATED}
# settings of the real language model, by the Llama for which the paper prints them
LLAMAS = {"llama_3b": "paper", "llama_8b": "paper_8b"}
NO_POOL = (paper.VISION, "20")  # 14 sets of real images have a clear licence
OTHER = "other_task"  # each other task's right side, against the left side's task
UNITS = {  # by `each`
    "task": "tasks", OTHER: "other tasks", "samples": "numbers of samples",
    "corruption": "kinds of damage",
}  # fmt: skip
GROUPS = (
    "raises its merger", "against adapters", "few samples", "cost", "what matters in the method", "language",
    "checked numerically",
)  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper and the comparison that answers it; claims.yaml explains the fields."""

    id: str
    location: str  # table, figure or section of the paper
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
    left_out: list[str] = field(default_factory=list)  # values of `each`
    over: dict[str, list[Any]] = field(default_factory=dict)
    where: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    paper: str = ""
    headline: bool = False
    group: str = ""

    @property
    def sides(self) -> list[dict[str, Any]]:
        """Return the columns that each side fixes."""
        return [side_columns(side) for side in (self.left, self.right, self.than) if side]

    @property
    def terms(self) -> list[Term]:
        """Return the sum Σ wₖ·meanₖ of the claim, positive where it is met (before its threshold).

        above, level, checked: times·left − right.
        gain: (left − its merger) − (right − its merger).
        closer: (left − than) − (right − left), right the better model and than the worse one.
        falls: (the value chosen on left's curve − left) − (the same of right).
        """
        left, right = side_columns(self.left), side_columns(self.right)
        if self.kind == "gain":
            sides = [(1.0, left), (-1.0, _merged(left)), (-1.0, right), (1.0, _merged(right))]
        elif self.kind == "closer":
            sides = [(2.0, left), (-1.0, right), (-1.0, side_columns(self.than))]
        elif self.kind == "falls":
            sides = [(1.0, _chosen(left)), (-1.0, left), (-1.0, _chosen(right)), (1.0, right)]
        else:
            sides = [(self.times, left), (-1.0, right)]
        sign = -1 if self.direction == "lower" else 1
        return [(sign * weight, side) for weight, side in sides]

    @property
    def has_settings(self) -> bool:
        """Return True if a side is FeatCal or an adapter, so that its settings matter."""
        sides = [side | self.where for side in self.sides]
        return any(side.get("method") in CALIBRATED and "setting" not in side for side in sides)

    @property
    def unit(self) -> str:
        """Return the noun, in the plural, for the parts of a claim about several."""
        if set(self.over) == {"place"}:
            return "models" if self.pool in paper.TEXT_TASKS else "columns"
        return "comparisons" if self.over else UNITS[self.each]

    @property
    def parts(self) -> dict[str, "Claim"]:
        """Return one claim per combination of `over`, by name; empty without `over`."""
        llamas = {word: f"{paper.TEXT_SIZES[role]}’s settings" for role, word in LLAMAS.items()}
        titles, claims_by_name = UPSTREAMS | NAMES | llamas, {}
        for values in product(*self.over.values()) if self.over else ():
            choice = dict(zip(self.over, values, strict=True))
            names = [paper.experiment_name(*choice["place"])] if "place" in choice else []
            names += [titles[value] for column, value in choice.items() if column != "place"]
            claims_by_name[", ".join(names)] = self._with_choice(choice)
        return claims_by_name

    def on_real_model(self, real: str) -> "Claim | None":
        """Return the claim about a real model in the smaller image model's role, or None."""
        lists = dict(self.over)
        runs = [(s.get("role", self.role), str(s.get("pool", self.pool))) for s in self.sides]
        if "place" in lists:
            runs = [(role, str(pool)) for role, pool in lists["place"] if role == paper.IMAGES]
            runs = [(role, pool) for role, pool in runs if (real, pool) != NO_POOL]
            lists["place"] = [[real, pool] for _, pool in runs]
        corruptions = {side.get("corruption", "clean") for side in (self.where, *self.sides)}
        if {role for role, _ in runs} != {paper.IMAGES} or NO_POOL in {(real, p) for _, p in runs}:
            return None
        if corruptions != {"clean"} and real == paper.REAL:
            return None
        sides = {"left": self.left, "right": self.right, "than": self.than}
        for name, side in sides.items():
            if isinstance(side, dict) and "role" in side:
                sides[name] = side | {"role": real}
        return replace(self, role=real, over=lists, **sides)

    def on_second_encoder(self) -> "Claim | None":
        """Return the claim about the second encoder's 8 tasks and three mergers, or None."""
        claim, mergers = self.on_real_model(paper.REAL), {"", *SECOND_MERGERS}
        kinds = ("above", "level", "gain", "closer")
        if claim is None or claim.file != "scores" or claim.kind not in kinds:
            return None
        lists = dict(claim.over)
        if "upstream" in lists:
            lists["upstream"] = [merger for merger in lists["upstream"] if merger in mergers]
        if "place" in lists:
            lists["place"] = [[role, pool] for role, pool in lists["place"] if str(pool) == "8"]
        columns = {column for side in (*claim.sides, claim.where) for column in side}
        fits = columns <= {"upstream", "method", "task"}
        fits &= {side.get("upstream", "") for side in claim.sides} <= mergers
        fits &= {side.get("method", "merged") for side in claim.sides} <= SECOND_METHODS
        if not fits or not all(lists.values()) or ("place" not in lists and claim.pool != "8"):
            return None
        return replace(claim, file="second_encoder", over=lists)

    def on_language_model(self) -> "Claim | None":
        """Return the claim about the real language model at the Llamas' printed settings, or None."""
        lists = dict(self.over)
        roles = [role for role, _ in lists.pop("place", [[self.role, self.pool]])]
        columns = {column for side in (*self.sides, self.where) for column in side}
        if not set(roles) <= set(LLAMAS) or self.each or not columns <= {"upstream", "method"}:
            return None
        claim = replace(self, role=paper.LANGUAGE[0], pool=paper.LANGUAGE[1], over=lists)
        if not self.has_settings:
            return claim
        settings = [LLAMAS[role] for role in roles]
        if len(settings) > 1:
            return replace(claim, over=lists | {"setting": settings})
        return claim._with_choice({"setting": settings[0]}) if not lists else None

    def includes(self, value: Any) -> bool:
        """Return True if a claim about each value of a column includes this one."""
        is_left = self.each == OTHER and value == side_columns(self.left)["task"]
        return not is_left and value not in self.left_out

    def for_value(self, value: Any) -> "Claim":
        """Return the claim about one value of `each`."""
        if self.each == OTHER:
            return replace(self, each="", right=side_columns(self.right) | {"task": value})
        return replace(self, each="", where=self.where | {self.each: value})

    def _with_choice(self, choice: dict[str, Any]) -> "Claim":
        """Return the claim about one combination of `over`."""
        role, pool = choice.get("place", (self.role, self.pool))
        upstream = {"upstream": choice["upstream"]} if "upstream" in choice else {}
        against = {"method": choice["against"]} if "against" in choice else {}
        left = side_columns(self.left) | upstream
        right = side_columns(self.right) | upstream | against
        for side in (left, right):
            if "setting" in choice and side.get("method") == "featcal":
                side["setting"] = choice["setting"]
        return replace(self, role=role, pool=str(pool), over={}, left=left, right=right)


@cache
def claims() -> tuple[Claim, ...]:
    """Return every claim of claims.yaml, in its order."""
    entries = []
    for location, section in paper.packaged("claims.yaml").items():
        shared = {name: section[name] for name in ("role", "table") if name in section}
        shared |= {"location": location, "pool": str(section["pool"])}
        for entry in section["claims"]:
            over = entry.get("over", {})  # a plain list is of [role, pool]
            over = {"place": over} if isinstance(over, list) else over
            entry = shared | entry | {"over": over, "left_out": entry.get("beside", [])}
            entries.append(Claim(**{key: entry[key] for key in entry if key != "beside"}))
    return tuple(entries)


def side_columns(side: Side) -> dict[str, Any]:
    """Return the columns that one side of a claim fixes."""
    pair = not isinstance(side, dict)
    return dict(zip(("upstream", "method"), side, strict=True)) if pair else dict(side)


def means_text(kind: str, means: Sequence[float], digits: int = 1) -> str:
    """Return the means that a claim compares as text."""
    if kind in ("gain", "falls"):
        verb = "points gained" if kind == "gain" else "points lost"
        return f"{means[0] - means[1]:.1f} against {means[2] - means[3]:.1f} {verb}"
    if kind == "closer":
        return f"{means[0] - means[2]:.1f} points above the lower model against {means[1] - means[0]:.1f} below the upper"
    return f"{means[0]:.{digits}f} against {means[1]:.{digits}f}"


def _merged(side: dict[str, Any]) -> dict[str, Any]:
    """Return the merged model that a calibrated one starts from."""
    return {column: v for column, v in side.items() if column != "setting"} | {"method": "merged"}


def _chosen(side: dict[str, Any]) -> dict[str, Any]:
    """Return the point of a sweep that the others are varied around."""
    return {column: value for column, value in side.items() if column != "at"} | {"chosen": 1}


def studied_setting(suite: str, role: str = "") -> str:
    """Return the one setting of FeatCal that studies and controls run."""
    return "paper" if suite == "paper" or role == paper.VISION else "suite"
