"""What damaged calibration images leave of the accuracy: the kinds of damage, and the averages by
method and kind.
"""

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.paper import AVERAGE, REAL
from reproduction.report.statistics import Estimate, estimate

KINDS = {
    "clean": "Clean",
    "gaussian_noise": "Gaussian noise",
    "motion_blur": "Motion blur",
    "fog": "Fog",
}
UPSTREAM = "task_arithmetic"


def kinds(ours: Evidence) -> dict[str, str]:
    """The kinds of calibration inputs, as pages call them: the paper's three of images, or those
    that texts were given.
    """
    if ours.role != REAL:
        return KINDS
    run = dict.fromkeys(ours.table("corrupted")["corruption"]) or {"clean": None}
    return {kind: kind.replace("_", " ").capitalize() for kind in run}


def found(ours: Evidence, method: str, kind: str = AVERAGE, setting: str = "") -> Estimate | None:
    """Mean over tasks from one kind of calibration images, or over all kinds; None where not every
    kind was run.

    setting: another one than the suite's main settings.
    """
    rows = select(ours.table("corrupted"), {"upstream": UPSTREAM, "method": method})
    if method != "merged":
        rows = select(rows, {"setting": setting or main_setting(ours.suite)})
    if kind != AVERAGE:
        return estimate(select(rows, {"corruption": kind}))
    return estimate(rows) if set(rows["corruption"]) == set(kinds(ours)) else None
