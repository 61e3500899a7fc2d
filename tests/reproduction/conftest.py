"""Invented results, for tests of pages."""

import pytest


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder of invented results, the project around it as the current folder."""
    from synthetic_results import write_project

    monkeypatch.chdir(tmp_path)
    return write_project(tmp_path)


@pytest.fixture
def ours(results):
    """Those of the smaller image model with eight tasks."""
    from reproduction.report.evidence import Evidence

    return Evidence("mini", "clip_b32", "8", results)
