"""The locks of the pipeline: an entry for every stage, and none of a stage that is gone."""

import yaml
from resolved import resolved

import pipeline


def test_the_stages_in_the_lock_are_those_of_the_pipeline():
    locks = pipeline.files(name="dvc.lock")
    locked = {stage for lock in locks for stage in yaml.load(lock.read_text(), yaml.CSafeLoader)["stages"]}
    stages = set(resolved())
    assert locked - stages == set(), "dvc.lock: entries of stages that dvc.yaml does not have; delete them there"
    assert stages - locked == set(), "stages that were never run; run `dvc repro`"
