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

# [upstream, method], or a mapping with these and more columns, role, pool, file and task among them
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
    over: dict[str, list[Any]] = field(default_factory=dict)
    where: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    paper: str = ""
    headline: bool = False
    group: str = ""

    @property
    def sides(self) -> list[dict[str, Any]]:
        """Return the columns that each side fixes."""
        return [named(side) for side in (self.left, self.right, self.than) if side]

    @property
    def terms(self) -> list[Term]:
        """Return the sum Σ wₖ·meanₖ of the claim, positive where it is met (before its threshold).

        above, level, checked: times·left − right.
        gain: (left − its merger) − (right − its merger).
        closer: (left − than) − (right − left), right the better model and than the worse one.
        falls: (the value chosen on left's curve − left) − (the same of right).
        """
        ours, theirs = named(self.left), named(self.right)
        if self.kind == "gain":
            found = [(1.0, ours), (-1.0, _merger(ours)), (-1.0, theirs), (1.0, _merger(theirs))]
        elif self.kind == "closer":
            found = [(2.0, ours), (-1.0, theirs), (-1.0, named(self.than))]
        elif self.kind == "falls":
            found = [(1.0, _chosen(ours)), (-1.0, ours), (-1.0, _chosen(theirs)), (1.0, theirs)]
        else:
            found = [(self.times, ours), (-1.0, theirs)]
        sign = -1 if self.direction == "lower" else 1
        return [(sign * weight, side) for weight, side in found]

    @property
    def has_settings(self) -> bool:
        """Return True if a side is FeatCal or an adapter, so that its settings matter."""
        sides = [side | self.where for side in self.sides]
        return any(side.get("method") in CALIBRATED and "setting" not in side for side in sides)

    @property
    def unit(self) -> str:
        """Return what a claim about several counts, in the plural."""
        if set(self.over) == {"place"}:
            return "models" if self.pool in paper.TEXT_TASKS else "columns"
        return "comparisons" if self.over else UNITS[self.each]

    @property
    def parts(self) -> dict[str, "Claim"]:
        """Return one claim per combination of `over`, by name; none where there is no `over`."""
        llamas = {word: f"{paper.TEXT_SIZES[role]}’s settings" for role, word in LLAMAS.items()}
        titles, found = UPSTREAMS | NAMES | llamas, {}
        for values in product(*self.over.values()) if self.over else ():
            choice = dict(zip(self.over, values, strict=True))
            place = [paper.place_name(*choice["place"])] if "place" in choice else []
            names = place + [titles[value] for word, value in choice.items() if word != "place"]
            found[", ".join(names)] = self._one(choice)
        return found

    def on(self, real: str) -> "Claim | None":
        """Return the claim about a real model in the smaller image model's role; None if it cannot be."""
        lists = dict(self.over)
        places = [(o.get("role", self.role), str(o.get("pool", self.pool))) for o in self.sides]
        if "place" in lists:
            places = [(role, str(pool)) for role, pool in lists["place"] if role == paper.IMAGES]
            places = [place for place in places if (real, place[1]) != NO_POOL]
            lists["place"] = [[real, pool] for _, pool in places]
        damage = {side.get("corruption", "clean") for side in (self.where, *self.sides)}
        roles, own = {role for role, _ in places}, {(real, pool) for _, pool in places}
        if roles != {paper.IMAGES} or NO_POOL in own:
            return None
        if damage != {"clean"} and real == paper.REAL:
            return None
        sides = {"left": self.left, "right": self.right, "than": self.than}
        for name, side in sides.items():
            if isinstance(side, dict) and "role" in side:
                sides[name] = side | {"role": real}
        return replace(self, role=real, over=lists, **sides)

    def on_second_encoder(self) -> "Claim | None":
        """Return the claim about the second encoder: scores of 8 tasks, three mergers; else None."""
        one, known = self.on(paper.REAL), {"", *SECOND_MERGERS}
        kinds = ("above", "level", "gain", "closer")
        if one is None or one.file != "scores" or one.kind not in kinds:
            return None
        lists = dict(one.over)
        if "upstream" in lists:
            lists["upstream"] = [merger for merger in lists["upstream"] if merger in known]
        if "place" in lists:
            lists["place"] = [place for place in lists["place"] if str(place[1]) == "8"]
        columns = {column for side in (*one.sides, one.where) for column in side}
        fits = columns <= {"upstream", "method", "task"}
        fits &= {side.get("upstream", "") for side in one.sides} <= known
        fits &= {side.get("method", "merged") for side in one.sides} <= SECOND_METHODS
        if not fits or not all(lists.values()) or ("place" not in lists and one.pool != "8"):
            return None
        return replace(one, file="second_encoder", over=lists)

    def on_language_model(self) -> "Claim | None":
        """Return the claim about the real language model, at the Llamas' printed settings; else None."""
        lists = dict(self.over)
        roles = [role for role, _ in lists.pop("place", [[self.role, self.pool]])]
        columns = {column for side in (*self.sides, self.where) for column in side}
        if not set(roles) <= set(LLAMAS) or self.each or not columns <= {"upstream", "method"}:
            return None
        one = replace(self, role=paper.LANGUAGE[0], pool=paper.LANGUAGE[1], over=lists)
        if not self.has_settings:
            return one
        settings = [LLAMAS[role] for role in roles]
        if len(settings) > 1:
            return replace(one, over=lists | {"setting": settings})
        return one._one({"setting": settings[0]}) if not lists else None

    def is_about(self, value: Any) -> bool:
        """Return True if a claim about each task, or each of another column, includes this one."""
        left_out = (named(self.left)["task"], *self.beside) if self.each == OTHER else self.beside
        return value not in left_out

    def of(self, value: Any) -> "Claim":
        """Return the claim about one value of `each`."""
        if self.each == OTHER:
            return replace(self, each="", right=named(self.right) | {"task": value})
        return replace(self, each="", where=self.where | {self.each: value})

    def _one(self, choice: dict[str, Any]) -> "Claim":
        """Return the claim about one combination of `over`."""
        role, pool = choice.get("place", (self.role, self.pool))
        upstream = {"upstream": choice["upstream"]} if "upstream" in choice else {}
        against = {"method": choice["against"]} if "against" in choice else {}
        left, right = named(self.left) | upstream, named(self.right) | upstream | against
        for side in (left, right):
            if "setting" in choice and side.get("method") == "featcal":
                side["setting"] = choice["setting"]
        return replace(self, role=role, pool=str(pool), over={}, left=left, right=right)


@cache
def claims() -> tuple[Claim, ...]:
    """Return every claim of claims.yaml, in its order."""
    found = []
    for place, section in paper.packaged("claims.yaml").items():
        shared = {name: section[name] for name in ("role", "table") if name in section}
        shared |= {"place": place, "pool": str(section["pool"])}
        for entry in section["claims"]:
            over = entry.get("over", {})  # a plain list is of places
            over = {"place": over} if isinstance(over, list) else over
            found.append(Claim(**shared | entry | {"over": over}))
    return tuple(found)


def named(side: Side) -> dict[str, Any]:
    """Return the columns that one side of a claim fixes."""
    pair = not isinstance(side, dict)
    return dict(zip(("upstream", "method"), side, strict=True)) if pair else dict(side)


def in_words(kind: str, means: Sequence[float], digits: int = 1) -> str:
    """Return the means behind a claim in words."""
    if kind in ("gain", "falls"):
        verb = "points gained" if kind == "gain" else "points lost"
        return f"{means[0] - means[1]:.1f} against {means[2] - means[3]:.1f} {verb}"
    if kind == "closer":
        return f"{means[0] - means[2]:.1f} points above the lower model against {means[1] - means[0]:.1f} below the upper"
    return f"{means[0]:.{digits}f} against {means[1]:.{digits}f}"


def _merger(side: dict[str, Any]) -> dict[str, Any]:
    """Return the merged model that a calibrated one starts from."""
    return {column: v for column, v in side.items() if column != "setting"} | {"method": "merged"}


def _chosen(side: dict[str, Any]) -> dict[str, Any]:
    """Return the point of a sweep that the others are varied around."""
    return {column: value for column, value in side.items() if column != "at"} | {"chosen": 1}


def studied_setting(suite: str, role: str = "") -> str:
    """Return the settings of FeatCal in studies and controls, which run it at one setting only."""
    return "paper" if suite == "paper" or role == paper.VISION else "suite"
