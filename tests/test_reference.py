"""Pages of the reference: whatever they are generated from is complete, and nothing in their lists
is left over.
"""

import sys
from pathlib import Path

import yaml

import featcal
from featcal import errors

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "book" / "_ext"))

from reference import api, commands, messages, params, results  # noqa: E402

WORDS = yaml.safe_load((ROOT / "book" / "reference" / "words.yaml").read_text("utf-8"))


def test_every_public_name_has_its_place():
    assert {f"featcal.{name}" for name in featcal.__all__ if name != "__version__"} == set(
        api.PUBLIC
    )
    text = api.text(ROOT)
    assert (
        "ridge: Positive" in text
        and "anchor_blend: float" in text
        and "experts: Mapping[str, Model]" in text
    )


def test_every_command_and_option_has_its_place():
    from featcal.cli.main import all_commands

    text = commands.text(ROOT)
    for name, command in all_commands().items():
        assert f"## featcal {name}\n" in text
        assert all(
            parameter.opts[0].strip("-").upper() in text.upper() for parameter in command.params
        ), name


def test_every_key_of_params_yaml_has_a_meaning_and_no_meaning_is_left_over():
    found = {group: params.keys_of(entries) for group, entries in params.groups(ROOT).items()}
    pairs = [(group, key) for group, keys in found.items() for key in keys]
    assert not [f"{group}.{key}" for group, key in pairs if not params.meaning(ROOT, group, key)], (
        "add to book/reference/words.yaml"
    )
    used = {name for group, key in pairs for name in (f"{group}.{key}", key)}
    assert not set(WORDS["keys"]) - used


def test_every_result_file_and_column_has_a_meaning_and_no_meaning_is_left_over():
    kinds = results.kinds_of(ROOT / "results" / "mini")
    named = {kind if kind in WORDS["files"] else results.ending_of(kind) for kind in kinds}
    assert named == set(WORDS["files"]), "book/reference/words.yaml: files"
    assert {column for columns in kinds.values() for column in columns} == set(WORDS["columns"]), (
        "book/reference/words.yaml: columns"
    )


def test_every_error_has_an_example_and_every_message_says_what_to_do():
    defined = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert defined - set(messages.SILENT) == set(messages.EXAMPLES)
    assert all(len(messages.message(name)) > 30 for name in messages.EXAMPLES)
