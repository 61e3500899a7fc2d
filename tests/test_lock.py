"""dvc.lock: an entry for every stage, and none of a stage that is gone."""

import yaml
from resolved import ROOT, resolved


def test_the_stages_in_the_lock_are_those_of_the_pipeline():
    locked = set(yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"])
    stages = set(resolved())
    assert locked - stages == set(), "dvc.lock: entries of stages that dvc.yaml does not have; delete them there"
    assert stages - locked == set(), "dvc.yaml: stages that were never run; run `dvc repro`"
