"""The paper's claims as sentences, each with the comparison of results that answers it, from
claims.yaml.

What the results say of them stands in verdicts.py; what the paper’s tables say, in page.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from reproduction.report.paper import AVERAGE, IMAGES, REAL, TEXT_TASKS, packaged, place_name
from reproduction.report.tables import NAMES, UPSTREAMS

# [upstream, method], or a mapping with these and more columns, role, pool, file and task among them
Side = Any
Term = tuple[float, dict[str, Any]]  # a weight, and the columns that name one model's rows
SUMS = (
    "above",
    "level",
    "checked",
    "gain",
    "closer",
    "falls",
)  # kinds of claims that are a sum of means
INSIDE = ("embeddings", "features")  # rows of a drift file that are no blocks
DIGITS = {
    "value": 1,
    "seconds": 1,
    "memory_mib": 0,
    "count": 0,
}  # of a measure in words; others have three
CALIBRATED = ("featcal", "surgery", "prob_surgery")
SECOND_MERGERS = ("average", "task_arithmetic", "wudi_closed_form")  # of the second encoder
OTHER = "other_task"  # each other task's right side, against the left side's task
GROUPS = (
    "raises its merger", "against adapters", "few samples", "cost", "what matters in the method", "language",
    "checked numerically",
)  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper and the comparison that answers it; the words are explained in
    claims.yaml.
    """

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
        """Return True if a side is FeatCal or an adapter, so that its settings matter."""
        sides = [named(side) | self.where for side in (self.left, self.right, self.than) if side]
        return any(side.get("method") in CALIBRATED and "setting" not in side for side in sides)

    @property
    def unit(self) -> str:
        """What a claim about several is about each of, in the plural."""
        if self.over:
            return (
                "comparisons"
                if isinstance(self.over, dict)
                else "models"
                if self.pool in TEXT_TASKS
                else "columns"
            )
        return {
            "task": "tasks",
            OTHER: "other tasks",
            "samples": "numbers of samples",
            "corruption": "kinds of damage",
        }[self.each]

    @property
    def parts(self) -> dict[str, "Claim"]:
        """A claim about several experiments or models as one claim about each, by name."""
        return (
            {", ".join(_names(choice)): self._one(choice) for choice in combinations_of(self.over)}
            if self.over
            else {}
        )

    @property
    def on_texts(self) -> "Claim | None":
        """The claim about the real encoder; None where it is about a larger model, a kind of
        damage, or language models.
        """
        places = self.over.get("place") if isinstance(self.over, dict) else self.over
        roles = {
            named(side).get("role", self.role)
            for side in (self.left, self.right, self.than)
            if side
        }
        if places:
            roles = {IMAGES} & {role for role, _ in places}
        damage = {
            named(side).get("corruption", "clean")
            for side in (self.where, self.left, self.right)
            if side
        }
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

    @property
    def on_second_encoder(self) -> "Claim | None":
        """Return the claim about the second encoder; None where nothing of the kind was run on it.

        It has scores of 8 tasks from three mergers.
        """
        one = self.on_texts
        if (
            one is None
            or self.file != "scores"
            or self.kind not in ("above", "level", "gain", "closer")
        ):
            return None
        over, known = one.over, {"", *SECOND_MERGERS}
        lists = dict(over) if isinstance(over, dict) else {"place": over} if over else {}
        if "upstream" in lists:
            lists["upstream"] = [name for name in lists["upstream"] if name in known]
        places = lists.get("place", [[one.role, one.pool]])
        places = [place for place in places if str(place[1]) == "8"]
        if "place" in lists:
            lists["place"] = places
        sides = [named(side) for side in (one.left, one.right, one.than) if side]
        columns = {column for side in (*sides, one.where) for column in side}
        mergers = {side.get("upstream", "") for side in sides}
        methods = {side.get("method", "") for side in sides} - {"", *CALIBRATED}
        fits = columns <= {"upstream", "method", "task"} and mergers <= known
        if not (
            fits and places and all(lists.values()) and methods <= {"base", "expert", "merged"}
        ):
            return None
        kept = lists if isinstance(over, dict) else lists.get("place")
        return replace(one, file="second_encoder", over=kept)

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
    titles = UPSTREAMS | NAMES
    return [
        place_name(value[0], str(value[1])) if word == "place" else titles[value]
        for word, value in choice.items()
    ]


@cache
def claims() -> tuple[Claim, ...]:
    """Return every claim of claims.yaml, in its order."""
    found = []
    for place, section in packaged("claims.yaml").items():
        shared = {
            "place": place,
            "role": section["role"],
            "pool": str(section["pool"]),
            "table": section.get("table", ""),
        }
        found += [Claim(**shared | entry) for entry in section["claims"]]
    return tuple(found)


def named(side: Side) -> dict[str, Any]:
    """The columns that one side of a claim fixes."""
    return (
        dict(side)
        if isinstance(side, dict)
        else dict(zip(("upstream", "method"), side, strict=True))
    )


def terms(
    kind: str,
    left: Side,
    right: Side,
    than: Side = (),
    times: float = 1.0,
    direction: str = "higher",
) -> list[Term]:
    """The sum Σ wₖ·meanₖ of a claim, positive where it is met (before its threshold).

    above, level, checked: times·left − right.   gain: (left − its merger) − (right − its merger).
    closer: (left − than) − (right − left), right the better model and than the worse one: left is
    nearer to right.
    falls: (left's curve where it was chosen − left) − (the same of right), two points of a sweep.
    """
    ours, theirs = named(left), named(right)
    if kind == "gain":
        found = [(1.0, ours), (-1.0, merger_of(ours)), (-1.0, theirs), (1.0, merger_of(theirs))]
    elif kind == "closer":
        found = [(2.0, ours), (-1.0, theirs), (-1.0, named(than))]
    elif kind == "falls":
        found = [(1.0, _chosen(ours)), (-1.0, ours), (-1.0, _chosen(theirs)), (1.0, theirs)]
    else:
        found = [(times, ours), (-1.0, theirs)]
    return [(-weight, side) for weight, side in found] if direction == "lower" else found


def told(kind: str, means: Sequence[float], digits: int = 1) -> str:
    """The means behind a claim in words."""
    if kind in ("gain", "falls"):
        verb = "points gained" if kind == "gain" else "points lost"
        return f"{means[0] - means[1]:.1f} against {means[2] - means[3]:.1f} {verb}"
    if kind == "closer":
        return f"{means[0] - means[2]:.1f} points above the lower model against {means[1] - means[0]:.1f} below the upper"
    return f"{means[0]:.{digits}f} against {means[1]:.{digits}f}"


def merger_of(side: Side) -> dict[str, Any]:
    """The merged model that a calibrated one starts from."""
    return {column: value for column, value in named(side).items() if column != "setting"} | {
        "method": "merged"
    }


def _chosen(side: dict[str, Any]) -> dict[str, Any]:
    return {column: value for column, value in side.items() if column != "at"} | {"chosen": 1}


def column_of(side: Side) -> str:
    """The column of a table that one side is about: its task where it names one, else the
    average.
    """
    return str(named(side).get("task", AVERAGE))


def combinations_of(over: Any) -> list[dict[str, Any]]:
    """What a claim about several experiments or models is about each of: one choice of every list.

    over: a list of [role, pool], or lists by word: place, upstream (of both sides), against (the
    right side's method).
    """
    lists = over if isinstance(over, dict) else {"place": over}
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def studied_setting(suite: str) -> str:
    """Return the settings of FeatCal in studies and controls, which run it at one setting only."""
    return "paper" if suite == "paper" else "suite"
