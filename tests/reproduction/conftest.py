"""Invented results, for tests of pages."""

import pytest


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Return the folder of invented results; the current folder is their project."""
    from synthetic_results import write_project

    monkeypatch.chdir(tmp_path)
    return write_project(tmp_path)


@pytest.fixture
def data(results):
    """Return the results of the smaller image model with eight tasks."""
    from reproduction.report.evidence import Evidence

    return Evidence("mini", "clip_b32", "8", results)
