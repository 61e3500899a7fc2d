"""The table of merging methods: what each does, needs and comes from. What each can be told stands
in settings.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from featcal.errors import BadSetting
from featcal.merging.adamerging import adamerging
from featcal.merging.arithmetic import average, moved, task_arithmetic
from featcal.merging.breadcrumbs import breadcrumbs
from featcal.merging.consensus import consensus
from featcal.merging.dare import dare, dare_ties
from featcal.merging.fisher import fisher
from featcal.merging.gradient_matching import gradient_matching
from featcal.merging.iso import iso_c, iso_cts
from featcal.merging.job import Job, Named
from featcal.merging.lot import lot
from featcal.merging.mats import mats
from featcal.merging.pcb import pcb
from featcal.merging.regmean import regmean, regmean_plus_plus
from featcal.merging.settings import settings_of
from featcal.merging.ties import ties
from featcal.merging.tsv import tsv_merge
from featcal.merging.wudi import wudi, wudi_closed_form


@dataclass(frozen=True)
class Method:
    """One merging method.

    found:   yields every merged tensor of a job, or with `scaled` its task vector in float64: then
             the tensor is θ₀ + scale · τ.
    source:  where the method is from.  data: needs `batches`.  head: needs `head`.  note: what a
             reader of its results must know.
    """

    name: str
    found: Callable[[Job], Iterator[Named]]
    source: str
    scaled: bool = False
    data: bool = False
    head: bool = False
    note: str = ""

    def tensors(self, job: Job) -> Iterator[Named]:
        """Every merged tensor of a job."""
        return moved(job, self.found(job), job.settings.scale) if self.scaled else self.found(job)

    def check_needs(self, batches: object, head: object) -> None:
        """Raise BadSetting unless data and heads are there exactly where the method uses them."""
        needs = (
            ("batches", "calibration data", self.data, batches),
            ("head", "zero-shot heads", self.head, head),
        )
        for key, what, needed, given in needs:
            if given is not None and not needed:
                raise BadSetting(f"merge.{key}", what, f"must be left out: {self.name} uses none")
            if given is None and needed:
                raise BadSetting(
                    f"merge.{key}", None, f"must be given: {self.name} needs {what} of every task"
                )


METHODS = {
    method.name: method
    for method in (
        Method("average", average, "Wortsman et al., 2022"),
        Method("task_arithmetic", task_arithmetic, "Ilharco et al., 2023", scaled=True),
        Method("ties", ties, "Yadav et al., 2023; defaults of FusionBench", scaled=True),
        Method("wudi", wudi, "Cheng et al., 2025; defaults of FusionBench"),
        Method("regmean", regmean, "Jin et al., 2023; defaults of FusionBench", data=True),
        Method("regmean_plus_plus", regmean_plus_plus, "Nguyen et al., 2025", data=True),
        Method(
            "lot",
            lot,
            "Sun et al., 2025 (arXiv 2505.23859)",
            data=True,
            note="from the published formula: its authors' code could not be consulted",
        ),
        Method(
            "adamerging",
            adamerging,
            "Yang et al., 2024; defaults of FusionBench",
            data=True,
            head=True,
        ),
        Method(
            "wudi_closed_form", wudi_closed_form, "Cheng et al., 2025, at the minimum of its loss"
        ),
        Method(
            "tsv_merge", tsv_merge, "Gargiulo et al., 2025; defaults of FusionBench", scaled=True
        ),
        Method("iso_c", iso_c, "Marczak et al., 2025; defaults of FusionBench", scaled=True),
        Method("iso_cts", iso_cts, "Marczak et al., 2025; defaults of FusionBench", scaled=True),
        Method(
            "dare",
            dare,
            "Yu et al., 2024, with task arithmetic; defaults of FusionBench",
            scaled=True,
        ),
        Method(
            "dare_ties",
            dare_ties,
            "Yu et al., 2024, with TIES; defaults of FusionBench",
            scaled=True,
        ),
        Method("breadcrumbs", breadcrumbs, "Davari and Belilovsky, 2024", scaled=True),
        Method("consensus", consensus, "Wang et al., 2024", scaled=True),
        Method("pcb", pcb, "Du et al., 2024", scaled=True),
        Method("mats", mats, "Tam et al., 2024", data=True),
        Method(
            "fisher",
            fisher,
            "Matena and Raffel, 2022; normalised as FusionBench does",
            data=True,
            head=True,
        ),
        Method(
            "gradient_matching",
            gradient_matching,
            "Daheim et al., 2024",
            data=True,
            head=True,
            note="the base's curvature is that of its answers to the experts' samples, as its own are not at hand",
        ),
    )
}


def method_named(name: str) -> Method:
    """The method of that name. Raises: UnknownKey with the nearest name."""
    if name not in METHODS:
        settings_of(name, {}, "merge")  # refuses the name
    return METHODS[name]
