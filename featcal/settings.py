"""Settings of one experiment as frozen dataclasses, checked once when they are read.

Values of experiments stand in params.yaml only; here is what a value may be. Knows nothing of
torch, models or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from featcal.arguments import Within, require_fits
from featcal.errors import BadSetting, MissingPath, UnknownKey

T = TypeVar("T")


def project_root(start: Path | None = None) -> Path:
    """The nearest folder at or above `start` (the current folder by default) that holds
    params.yaml. Raises: MissingPath.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise MissingPath(
        here / "params.yaml", "the experiments", "start from a folder of the cloned repository"
    )


def require(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise BadSetting unless the condition holds."""
    if not condition:
        raise BadSetting(key, value, expected)


def number(key: str, value: object) -> None:
    """Raise BadSetting unless the value is a finite number."""
    require_fits(key, value, float)


def whole_number(key: str, value: object, least: int = 1) -> None:
    """Raise BadSetting unless the value is a whole number, at least `least`; true and false are
    none.
    """
    require_fits(key, value, Annotated[int, Within(least)])


def several(key: str, values: object, kind: Any = whole_number, **more: Any) -> None:
    """Raise BadSetting unless the value is a list of different numbers."""
    fine = isinstance(values, Sequence) and not isinstance(values, str) and bool(values)
    require(fine, key, values, "must be a list of numbers")
    assert isinstance(values, Sequence)
    for value in values:
        kind(key, value, **more)
    require(len(set(values)) == len(values), key, values, "must name each number once")


def text(key: str, value: object) -> None:
    """Raise BadSetting unless the value is a word or longer text."""
    require_fits(key, value, str)


def from_mapping(cls: type[T], mapping: Mapping[str, Any], place: str) -> T:
    """A settings object from a YAML mapping; unknown and missing keys are errors that name the
    place.

    Returns: `cls(**mapping)`. Raises: UnknownKey with the nearest known key; BadSetting for a
    missing key or a bad value.
    """
    require(isinstance(mapping, Mapping), place, mapping, "must be a mapping of settings")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise UnknownKey(place, str(key), list(known))
    for name, f in known.items():
        needed = f.default is MISSING and f.default_factory is MISSING
        require(name in mapping or not needed, place, list(mapping), f"lacks {name}")
    try:
        return cls(**mapping)
    except BadSetting as error:  # the class knows its own name only, and there are many experiments
        raise BadSetting(
            f"{place}.{error.key.rpartition('.')[-1]}", error.value, error.expected
        ) from None


Count = Annotated[int, Within(1)]
Natural = Annotated[int, Within(0)]  # a seed, or a number of steps that may be none
Share = Annotated[float, Within(0, 1)]
Positive = Annotated[float, Within(0, strictly=True)]


class Checked:
    """A dataclass whose annotations are the check of its values: Literal words, numbers Within
    their ends, lists made tuples.

    place: what messages call the settings, before the name of a field.
    """

    place: ClassVar[str] = ""

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Raises: UnknownKey for a keyword that is no field."""
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for key in named:
            if key not in known:
                raise UnknownKey(cls.place or cls.__name__, key, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raises: BadSetting naming the field and what its annotation allows."""
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            require_fits(f"{self.place}.{field.name}", value, hints[field.name])
            object.__setattr__(self, field.name, tuple(value) if isinstance(value, list) else value)


@dataclass(frozen=True)
class Calibration(Checked):
    """How a merged model is calibrated: λ, ρ and α of the paper, by default those for CLIP, and
    which parts of the method are on.

    ridge:          λ > 0 of Eq. 12, relative to the unit-norm Gram matrices of Eq. 14.
    anchor_blend:   ρ of Eq. 11: 1 is the merged weight, 0 the base weight, above 1 extrapolates
                    away from the base.
    interpolation:  α in [0, 1] of Eq. 10: 0 targets the student's own features, 1 the teacher's.
    bias, norm:     also solve biases (Eq. 55) and LayerNorm scale and shift (Eq. 59).
    task_weights:   "gram" is ω of Eq. 14; "uniform" leaves every task's Gram matrix as it is.
    order:          "forward" looks at the features again after each solved block (Algorithm 1);
                    "stale" uses the merged model's.
    modules:        linears that are solved, by how their names end, such as ("q", "v"); all where
                    None. Norms: see `norm`.

    Beyond the paper, each off by default and then the paper's method to the bit:

    interpolation "auto": α of every block, or with order "sites" of every site, is the one of five
    between 0 and 1 at which the
                    block's output is nearest to the experts' on an eighth of the samples, which
                    nothing is solved with.
    order "sites":  the sites and norms of a block are solved one after another, in forward order,
    and the student's features are
                    looked at again behind each.
    residual:       β in [0, 1]. A linear whose output y = W x + b is added to the residual stream r
                    aims at
                    W_t x_t + b_t + β (r_t − r): at 1 the sum r + y is to be the expert's. A pair is
                    β of the first and the last block of a stack, linear in between.
    affine:         "joint" solves weight and bias as one system; "separate" (Eqs. 17 and 55) the
                    weight as if targets had no
                    bias, then the bias. Linears without a bias are solved as ever.
    prior:          κ ≥ 0, weight of Σ_t ‖(W − W_t) τ_tᵀ‖²/‖τ_t‖² beside the data, with τ_t = W_t −
                    W_base: WUDI's objective.
                    κ → ∞ gives closed-form WUDI in the span of the task vectors, whatever the data
                    say.
    no_harm:        of every block (with order "sites", every site) only that part of the step from
                    the merged weights to the
                    solution is taken, of 0, ¼, ½, ¾ and 1, which brings the block's output nearest
                    to the experts' on the same
                    samples held out: there no block is further from its experts than with its
                    merged weights.
    sweeps:         how often each block is solved before the next one, every further time from what
                    it has become; the anchor
                    stays that of the merged weights. Nothing that reaches a block depends on those
                    behind it, so a sweep of the whole model would do no more; and as many sweeps as
                    a block has sites and norms give order "sites".
    weights:        "attention": the token weights times what a token receives in the expert's
                    attention in this block, averaged
                    over heads and queries, of mean 1 in every sample. Keys from another stack have
                    what they receive there.
    shrinkage:      "ledoit_wolf": λ of every site is the one at which Σ ωG + λI is the Ledoit–Wolf
                    estimate from these tokens, as
                    in `core.ridge.ledoit_wolf`; `ridge` is left for norms. "fixed": `ridge`
                    everywhere.
    """

    place = "calibrate"
    ridge: Positive = 0.05
    anchor_blend: float = 2.0
    interpolation: Share | Literal["auto"] = 0.3
    bias: bool = True
    norm: bool = True
    task_weights: Literal["gram", "uniform"] = "gram"
    order: Literal["forward", "stale", "sites"] = "forward"
    modules: tuple[str, ...] | None = None
    residual: Share | tuple[Share, Share] = 0.0
    affine: Literal["separate", "joint"] = "separate"
    prior: Annotated[float, Within(0)] = 0.0
    no_harm: bool = False
    sweeps: Count = 1
    weights: Literal["rule", "attention"] = "rule"
    shrinkage: Literal["fixed", "ledoit_wolf"] = "fixed"

    def __post_init__(self) -> None:
        """Raises: BadSetting, as of every field, so of what does not go together."""
        super().__post_init__()
        both = self.bias or self.affine == "separate"
        require(
            both,
            "calibrate.affine",
            self.affine,
            "solves weight and bias together, so calibrate.bias must be true",
        )
        stale = self.order == "stale" and self.holds_out
        required = "looks at features that the deployed model never has; no_harm and interpolation auto need another order"
        require(not stale, "calibrate.order", self.order, required)
        once = self.sweeps == 1 or self.order == "forward"
        again = "must be 1 with order sites, where a second sweep finds the same again, and with stale, which looks once"
        require(once, "calibrate.sweeps", self.sweeps, again)
        estimated = self.shrinkage == "fixed" or not self.prior
        require(
            estimated,
            "calibrate.shrinkage",
            self.shrinkage,
            "estimates from samples what a prior without any is added to",
        )
        if self.modules is not None:
            names = self.modules
            require(
                bool(names),
                "calibrate.modules",
                names,
                "must name some, such as [q, v]; leave it out for all linears",
            )
            require(
                len(set(names)) == len(names),
                "calibrate.modules",
                names,
                "must name each kind of linear once",
            )

    @classmethod
    def preset(cls, name: str, changed: Mapping[str, Any] | None = None) -> "Calibration":
        """The settings of PRESETS by name, with some of them changed. Raises: BadSetting."""
        require(name in PRESETS, "calibrate.preset", name, f"must be {' or '.join(PRESETS)}")
        return from_mapping(cls, {**PRESETS[name], **(changed or {})}, "calibrate")

    @property
    def holds_out(self) -> bool:
        """Whether part of the samples is held out, to choose α or a step on."""
        return self.interpolation == "auto" or self.no_harm

    @property
    def aims_at_the_stream(self) -> bool:
        """Whether linears that write into the residual stream aim at the expert's."""
        return self.residual not in (0, (0, 0))

    def residual_at(self, depth: float) -> float:
        """β of a block, by its depth in its stack: 0 is the first block, 1 the last."""
        first, last = (
            self.residual if isinstance(self.residual, tuple) else (self.residual, self.residual)
        )
        return first + (last - first) * depth

    @property
    def stated(self) -> dict[str, Any]:
        """The settings by name, without what goes beyond the paper and is off."""
        of = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in of.items() if name not in OFF or value != OFF[name]}


BEYOND = (
    "residual",
    "affine",
    "prior",
    "no_harm",
    "sweeps",
    "weights",
    "shrinkage",
)  # the paper's method where at its default
OFF: dict[str, Any] = {f.name: f.default for f in fields(Calibration) if f.name in BEYOND}


# "paper": for CLIP, Section 5.1. "best": of what goes beyond the paper the combination that did
# best on validation samples of
# drawn images, with λ, ρ and α that did best on those and on real texts (scripts/choose_preset.py,
# preset_choice.json).
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"ridge": 0.05, "anchor_blend": 2.0, "interpolation": 0.3},
    "best": {
        "ridge": 1e-4,
        "anchor_blend": 1.0,
        "interpolation": 1.0,
        "residual": 1.0,
        "order": "sites",
        "affine": "joint",
    },
}
