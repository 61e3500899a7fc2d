"""Before any test: one thread and no hub.

And what tests would do over and over: count the work of the same small model, and look for garbage
in all that was imported.
"""

import gc
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
SHAPES = {}


def remembered(model_shape, signature):
    """What counts the work of a model on a batch: every calibration ends with it, and of a tiny one
    it takes half the time.

    It knows no numbers: the same modules, configuration, plan and shapes give the same count.
    Functions are told apart by the addresses in their texts, which is why plan and question are
    kept.
    """

    def shape(model, plan, batch, asked):
        config = getattr(model, "config", None)
        if config is None:
            return model_shape(model, plan, batch, asked)
        told = (
            repr(model),
            repr(config),
            getattr(config, "_attn_implementation", None),
            repr(plan),
            repr(asked),
        )
        known = told + signature(batch)
        if known not in SHAPES:
            SHAPES[known] = model_shape(model, plan, batch, asked), plan, asked
        return SHAPES[known][0]

    return shape


def pytest_collection_finish():
    """What is there by now stays: the collector need not walk through torch and transformers again
    and again.
    """
    if cost := sys.modules.get("featcal.planning.cost"):  # of the parts that calibrate
        cost.model_shape = remembered(cost.model_shape, cost.signature)
    gc.collect()
    gc.freeze()


def nothing_missing(report):
    """Where CI=true all that tests need is installed: what is skipped there but for a GPU or an
    index out of reach has failed.
    """
    excused = any(reason in str(report.longrepr) for reason in ("needs a GPU", "no package index"))
    if report.skipped and os.environ.get("CI") == "true" and not excused:
        report.outcome, report.longrepr = "failed", f"skipped where CI=true: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return nothing_missing((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return nothing_missing((yield))
