"""Every dvc.lock has exactly the stages of its dvc.yaml."""

import pytest
import yaml
from resolved import resolved

from pipeline import ROOT, files


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.parent.relative_to(ROOT)))
def test_the_stages_in_a_lock_are_those_of_its_part_of_the_pipeline(file):
    lock = file.with_name("dvc.lock")
    locked = set(yaml.safe_load(lock.read_text())["stages"]) if lock.is_file() else set()
    stages = {
        name for name, at in resolved().nodes.data("file") if at == str(file.relative_to(ROOT))
    }
    assert stages
    assert locked - stages == set(), (
        f"{file}: its lock has stages that no longer exist; delete them there"
    )
    assert stages - locked == set(), f"{file}: stages that were never run; run `dvc repro`"
