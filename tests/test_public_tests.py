"""The public tests of the harness by name: what a machine lacks for them is told at once, before a model runs."""

import importlib.metadata
import sys
from pathlib import Path

import datasets
import pytest

from featcal.data.public import PUBLIC
from featcal.errors import NoHarness, UnknownKey
from featcal.language import harness, public_tests
from featcal.language.public_tests import PAPER, load_public

installed = pytest.mark.skipif(not harness.installed(), reason="needs the extra `language`")


@installed
def test_what_public_tests_lack_is_told_at_once(monkeypatch):
    monkeypatch.delenv(harness.ALLOW_PROGRAMS, raising=False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(NoHarness) as told:
        load_public(PAPER | {"gsm8k": "gsm8k_strict"})
    message = str(told.value)
    assert message.count("\n") < 16 and "Traceback" not in message
    for test in (PUBLIC[key] for key in ("math500", "gsm8k", "humaneval_plus", "mbpp_plus", "ifeval", "arc_challenge")):
        assert f"{test.task}: " in message
    assert "humaneval_plus: runs generated programs, which HF_ALLOW_CODE_EVAL=1 would allow" in message
    with pytest.raises(UnknownKey, match="did you mean 'gsm8k_strict'"):
        load_public({"gsm8k": "gsm8k_strikt"})


@installed
def test_public_tests_have_the_names_that_the_harness_knows():
    import lm_eval

    for key, test in PUBLIC.items():
        file = Path(lm_eval.__file__).parent / "tasks" / test.file
        texts = [path.read_text() for path in file.parent.glob("*.yaml")]
        assert f"task: {test.task}\n" in file.read_text(), key
        for word in (test.data, f"test_split: {test.split}\n"):
            assert any(word in text for text in texts), (key, word)
        if test.filter != "none":
            assert any(test.filter in text for text in texts), key
        metric = {"pass@1": "pass_at_k"}.get(test.metric, test.metric)  # the function, and what it calls its score
        assert any(metric in text for text in texts), key
    assert set(PAPER) < set(PUBLIC)


def test_without_the_harness_its_extra_is_named(monkeypatch):
    monkeypatch.setattr(harness, "installed", lambda: False)
    with pytest.raises(NoHarness, match="lm_eval.*is not installed.\n  - install the extra: pip install"):
        load_public()


@installed
def test_the_data_of_a_test_are_read_at_the_pinned_commit(monkeypatch):
    asked = []
    rows = datasets.Dataset.from_dict({"question": ["1 + 1?"], "answer": ["#### 2"]})

    def given(path, name=None, **options):
        asked.append((path, name, options))
        return datasets.DatasetDict({"train": rows, "test": rows})

    monkeypatch.setattr(datasets, "load_dataset", given)
    loaded = load_public({"gsm8k": "gsm8k"}, {"gsm8k": "a" * 40})["gsm8k"]
    assert asked == [("openai/gsm8k", "main", {"revision": "a" * 40})]
    assert (
        loaded.task.config.task == "gsm8k_cot" and loaded.task.config.num_fewshot == 8
    )
    load_public({"gsm8k": "gsm8k"})
    assert "revision" not in asked[-1][2], "without a pin whatever is there"


def test_the_antlr_of_sympy_is_taken_from_its_own_folder_and_any_other_is_one_line(monkeypatch, tmp_path):
    """omegaconf, which DVC installs, needs 4.9; an environment can hold only one of the two under one name."""
    monkeypatch.setattr(public_tests, "_antlr_version", lambda: "4.9.3")
    monkeypatch.setattr(public_tests, "ANTLR_FOLDER", tmp_path / "none")
    with pytest.raises(ImportError, match="antlr4 4.11 is needed, 4.9.3 is installed"):
        public_tests.require_antlr()
    monkeypatch.undo()
    own = tmp_path / "antlr4_python3_runtime-4.11.1.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: antlr4-python3-runtime\nVersion: 4.11.1\n")
    monkeypatch.setattr(public_tests, "ANTLR_FOLDER", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "antlr4", raising=False)
    public_tests.require_antlr()
    assert sys.path[0] == str(tmp_path) and importlib.metadata.version("antlr4-python3-runtime") == "4.11.1"
