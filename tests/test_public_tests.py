"""The public tests of the harness by name: what a machine lacks for them is told at once, before a model runs."""

from pathlib import Path

import pytest

from featcal.errors import NoHarness, UnknownKey
from featcal.language import harness
from featcal.language.public_tests import PAPER, PUBLIC, load_public

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
        folder = Path(lm_eval.__file__).parent / "tasks" / test.folder
        texts = [path.read_text() for path in folder.glob("*.yaml")]
        own = [text for text in texts if f"task: {test.task}\n" in text]
        assert len(own) == 1, key
        if test.filter != "none":
            assert any(test.filter in text for text in texts), key
        metric = {"pass@1": "pass_at_k"}.get(test.metric, test.metric)  # the function, and what it calls its score
        assert any(metric in text for text in texts), key
    assert set(PAPER) < set(PUBLIC)


def test_without_the_harness_its_extra_is_named(monkeypatch):
    monkeypatch.setattr(harness, "installed", lambda: False)
    with pytest.raises(NoHarness, match="lm_eval.*is not installed.\n  - install the extra: pip install"):
        load_public()
