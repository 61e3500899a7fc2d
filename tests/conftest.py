"""Before any test: one thread and no hub; garbage collection waits until all is imported."""

import gc
import os
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()


def pytest_collection_finish():
    """Leave to the collector only what comes after the imports: torch is large."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.enable()


def nothing_missing(report):
    """Fail what is skipped where CI=true, but for a GPU or an index out of reach."""
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
