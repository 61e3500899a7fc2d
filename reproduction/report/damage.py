"""What damaged calibration images leave of the accuracy: the kinds of damage, and the averages by method and kind."""

from reproduction.report.claims import main_setting
from reproduction.report.estimate import Estimate, estimate
from reproduction.report.evidence import Evidence, select
from reproduction.report.values import AVERAGE

KINDS = {"clean": "Clean", "gaussian_noise": "Gaussian noise", "motion_blur": "Motion blur", "fog": "Fog"}
UPSTREAM = "task_arithmetic"


def found(ours: Evidence, method: str, kind: str = AVERAGE, setting: str = "") -> Estimate | None:
    """Mean over tasks from one kind of calibration images, or over all kinds; None where not every kind was run.

    setting: another one than the suite's main settings.
    """
    rows = select(ours.table("corrupted"), {"upstream": UPSTREAM, "method": method})
    if method != "merged":
        rows = select(rows, {"setting": setting or main_setting(ours.suite)})
    if kind != AVERAGE:
        return estimate(select(rows, {"corruption": kind}))
    return estimate(rows) if set(rows["corruption"]) == set(KINDS) else None
