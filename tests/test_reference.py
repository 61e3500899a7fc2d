"""Generated pages are complete, and their lists name nothing that is gone."""

import ast
import sys
from inspect import Parameter, signature

import pytest
import yaml

import featcal
from featcal import errors
from pipeline import ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))

from reference import api, messages, params, results, steps  # noqa: E402

MEANINGS = yaml.safe_load((ROOT / "book" / "reference" / "words.yaml").read_text("utf-8"))


def test_the_reference_has_every_public_name():
    assert {f"featcal.{name}" for name in featcal.__all__} == set(api.PUBLIC)


@pytest.mark.parametrize("name", sorted(featcal.__all__))
def test_no_public_function_takes_just_anything(name):
    public = getattr(featcal, name)
    if name == "Calibration":  # pydantic puts off what is not used yet
        public.model_rebuild()
    parameters = signature(public).parameters.values()
    loose = [p.name for p in parameters if p.kind == Parameter.VAR_KEYWORD]
    assert loose == (["settings"] if name == "merge" else [])


def test_every_step_of_a_calibration_is_defined_and_documented():
    assert len(steps.STEPS) == 9
    text = steps.text(ROOT)
    for names in steps.STEPS.values():
        for name in names:
            path, node, _ = steps.definition(ROOT, name)
            assert f"{path}, line {node.lineno}" in text
            assert ast.get_docstring(node), name


def test_every_key_of_params_yaml_has_a_meaning_and_no_meaning_is_left_over():
    keys_of_groups = {g: params.keys_of(entries) for g, entries in params.groups(ROOT).items()}
    pairs = [(group, key) for group, keys in keys_of_groups.items() for key in keys]
    missing = [f"{group}.{key}" for group, key in pairs if not params.meaning(ROOT, group, key)]
    assert not missing, "add to book/reference/words.yaml"
    used = {name for group, key in pairs for name in (f"{group}.{key}", key)}
    assert not set(MEANINGS["keys"]) - used


def test_every_result_file_and_column_has_a_meaning_and_no_meaning_is_left_over():
    kinds = results.kinds_of(ROOT / "results" / "mini")
    named = {kind if kind in MEANINGS["files"] else results.ending_of(kind) for kind in kinds}
    assert named == set(MEANINGS["files"]), "book/reference/words.yaml: files"
    columns = {column for each in kinds.values() for column in each}
    assert columns == set(MEANINGS["columns"]), "book/reference/words.yaml: columns"


def test_every_error_has_an_example_and_every_message_says_what_to_do():
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    defined = {name for name, kind in kinds.items() if issubclass(kind, Exception)}
    assert defined - set(messages.SILENT) == set(messages.EXAMPLES)
    assert all(len(messages.message(name)) > 30 for name in messages.EXAMPLES)
