"""Public functions name all their arguments, and load_batches says what is missing."""

from inspect import Parameter, signature

import checkpoints
import pytest

import featcal
from featcal.errors import BadSetting, MissingPath


@pytest.mark.parametrize("name", sorted(featcal.__all__))
def test_no_public_function_takes_just_anything(name):
    public = getattr(featcal, name)
    if name == "Calibration":  # pydantic puts off what is not used yet
        public.model_rebuild()
    parameters = signature(public).parameters.values()
    loose = [p.name for p in parameters if p.kind == Parameter.VAR_KEYWORD]
    assert loose == (["settings"] if name == "merge" else [])


def test_batches_can_be_read_again_and_what_is_missing_is_said(tmp_path):
    checkpoints.vision_folder(tmp_path / "base")
    (tmp_path / "a/train").mkdir(parents=True)
    for i in range(6):
        checkpoints.picture(seed=i).save(tmp_path / "a/train" / f"{i}.png")
    batches = featcal.load_batches({"a": tmp_path / "a"}, tmp_path / "base", samples=5, batch=2)
    for _ in range(2):  # they can be read again
        assert [len(one["pixel_values"]) for one in batches["a"]] == [2, 2, 1]
    with pytest.raises(BadSetting, match="at most 6"):
        featcal.load_batches({"a": tmp_path / "a"}, tmp_path / "base", samples=7)
    with pytest.raises(MissingPath, match="nowhere"):
        featcal.load_batches({"a": "nowhere"}, tmp_path / "base")
