"""What params.yaml may tell a merging method, before anything heavy is loaded."""

import pytest
import yaml
from smoke_graph import ROOT, smoke_params
from test_settings_mistakes import project, put

from pipeline import settings, write_settings
from reproduction.experiments import ADAPTERS, STREAMS, Draw, load_experiments

SUITE = yaml.safe_load((ROOT / "tests/smoke/smoke.yaml").read_text())


POOL = "clip_b32-8"
PAPERS = {
    "average",
    "task_arithmetic",
    "ties",
    "wudi",
    "regmean",
    "regmean_plus_plus",
    "lot",
    "adamerging",
}


def asked(folder, method, settings):
    """A merged model of params.yaml with other settings, read."""
    draw = {"samples": 16, "batch": 8} if method in STREAMS else {}
    entry = {"smoke": None if settings is None else settings | draw, "mini": None}
    project(folder, put(smoke_params(), f"merge/{POOL}/{method}", entry), SUITE)
    return load_experiments(folder / "params.yaml").merge[f"{POOL}-{method}"]


@pytest.mark.parametrize(
    ("method", "draw"),
    [
        ("adamerging", Draw(stream="test_unlabelled", samples=16, batch=8)),
        ("regmean", Draw(stream="train", samples=16, batch=8)),
        ("regmean_plus_plus", Draw(stream="train", samples=16, batch=8)),
        ("lot", Draw(stream="train", samples=16, batch=8)),
    ],
)
def test_a_method_that_looks_at_images_sees_those_of_its_source_unless_told_otherwise(
    tmp_path, method, draw
):
    assert asked(tmp_path, method, {}).draw == draw


@pytest.mark.parametrize("suite", ["mini", "paper", "files"])
def test_every_setting_of_params_yaml_is_valid_in_every_suite(tmp_path, suite):
    write_settings(tmp_path, settings() | {"suite": suite})
    found = load_experiments(tmp_path / "params.yaml")
    for role in ("clip_b32", "clip_l14"):
        assert {run.method for run in found.merged_in(role, 8).values()} == PAPERS
        assert {(run.upstream, run.method) for run in found.adapted_in(role, 8).values()} == {
            (upstream, method)
            for upstream in ("average", "task_arithmetic", "adamerging", "wudi", "wudi_closed_form")
            for method in ADAPTERS
        }
