"""Public tests of the harness: everything a machine lacks is reported before a model runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from rehearsal_rows import ENGLISH, punkt_tab

from featcal.errors import BadEnvironment, UnknownKey
from reproduction.language import harness
from reproduction.language.harness import load_public
from reproduction.prepare.suite import DOMAINS
from reproduction.prepare.tasks import PUBLIC

installed = pytest.mark.skipif(not harness.installed(), reason="needs the extra `language`")
FINAL = "Final Answer: The final answer is ${}$. I hope it is correct."
MATH, ORDERS = "HuggingFaceH4/MATH-500", "google/IFEval"
SCORED = [  # a test, whose rows, answers of which some are right, and the share of those
    ("math500", MATH, [FINAL.format(x) for x in (r"\frac{1}{2}", r"(3, \sqrt{2})", "41")], 200 / 3),
    ("math500_verified", MATH, [r"It is $\boxed{0.5}$.", "It is $7$.", "$42$"], 200 / 3),
    ("ifeval", ORDERS, ["the ship comes back in the evening", "One sentence only.", "The SHIP sails."], 200 / 3),
    ("ifeval", ORDERS, ["the ship, it sails", "Dr. Who came. The ship sailed.", "THE SHIP SAILS"], 100 / 3),
]  # fmt: skip

SCORING = """
import json, sys
import featcal, datasets
from rehearsal_rows import TESTS
from test_harness import model, texts
from reproduction.prepare.tasks import PUBLIC
from reproduction.language import harness
from reproduction.language.harness import load_public

reader, found = harness._language_model, []
for key, rows, answers in json.loads(sys.argv[1]):
    table = datasets.Dataset.from_list([TESTS[rows][1](i) for i in range(len(answers))])
    datasets.load_dataset = lambda *_, **__: datasets.DatasetDict({PUBLIC[key].split: table})
    loaded = load_public({key: key})

    def speaking(*arguments):
        made = reader(*arguments)
        made.generate_until = lambda requests: answers
        return made

    harness._language_model = speaking
    found.append(harness.score_tests(model(0), texts(), loaded, 4)[key])
print(json.dumps(found))
"""


@installed
def test_what_public_tests_lack_is_told_at_once(monkeypatch):
    monkeypatch.delenv(harness.ALLOW_PROGRAMS, raising=False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(BadEnvironment) as refused:
        load_public({key: key for key in DOMAINS} | {"gsm8k": "gsm8k_strict"})
    message = str(refused.value)
    assert message.count("\n") < 16 and "Traceback" not in message
    for key in "math500 gsm8k humaneval_plus mbpp_plus ifeval arc_challenge".split():
        assert f"{PUBLIC[key].task}: " in message
    assert "humaneval_plus: runs generated programs, which is not allowed here" in message
    assert message.count("HF_ALLOW_CODE_EVAL=1 lets the harness run generated programs") == 1
    with pytest.raises(UnknownKey, match="did you mean 'gsm8k_strict'"):
        load_public({"gsm8k": "gsm8k_strikt"})


@installed
def test_the_data_of_a_test_are_read_at_the_pinned_commit(monkeypatch):
    calls = []
    rows = datasets.Dataset.from_dict({"question": ["1 + 1?"], "answer": ["#### 2"]})

    def load(path, name=None, **options):
        calls.append((path, name, options))
        return datasets.DatasetDict({"train": rows, "test": rows})

    monkeypatch.setattr(datasets, "load_dataset", load)
    loaded = load_public({"gsm8k": "gsm8k"}, {"gsm8k": "a" * 40})["gsm8k"]
    assert calls == [("openai/gsm8k", "main", {"revision": "a" * 40})]
    assert loaded.task.config.task == "gsm8k_cot" and loaded.task.config.num_fewshot == 8
    load_public({"gsm8k": "gsm8k"})
    assert "revision" not in calls[-1][2], "without a pin whatever is there"


def test_the_antlr_of_sympy_comes_from_its_own_folder(monkeypatch, tmp_path):
    """DVC's omegaconf needs 4.9, and an environment holds only one version."""
    monkeypatch.setattr(sys, "path", [str(antlr(tmp_path / "installed", "4.9.3"))])
    monkeypatch.setattr(harness, "ANTLR_FOLDER", tmp_path / "own")
    problem = "antlr4 4.11 is needed, 4.9.3 is installed"
    assert problem in [what for what, _ in harness.unmet(PUBLIC["math500"])]
    antlr(tmp_path / "own", "4.11.1")
    assert problem not in [what for what, _ in harness.unmet(PUBLIC["math500"])]
    assert len(sys.path) == 1


def antlr(folder: Path, version: str) -> Path:
    """Write the metadata that pip leaves of a version, without its code."""
    metadata = folder / f"antlr4_python3_runtime-{version}.dist-info"
    metadata.mkdir(parents=True)
    header = f"Name: antlr4-python3-runtime\nVersion: {version}\n"
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\n{header}")
    return folder


@pytest.mark.parametrize(
    ("offline", "here", "lacks"), [(False, False, 0), (True, False, 1), (True, True, 0)]
)
def test_nltk_data_that_cannot_be_fetched_are_lacking(monkeypatch, tmp_path, offline, here, lacks):
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [*punkt_tab(tmp_path).values()] if here else [])
    monkeypatch.setattr(harness.constants, "HF_HUB_OFFLINE", offline)
    assert len(harness.unmet(PUBLIC["ifeval"])) == lacks
    assert not harness.unmet(PUBLIC["gsm8k"])


@installed
def test_the_harness_scores_rows_as_the_hub_has_them(tmp_path):
    """Run in a new process, since a pytest plugin has loaded omegaconf's antlr4."""
    environment = os.environ | punkt_tab(tmp_path) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    lacks = [lack for key in ("math500", "ifeval") for lack in harness.unmet(PUBLIC[key])]
    assert all("punkt" in what for what, _ in lacks)
    questions = json.dumps([test[:3] for test in SCORED])
    options = {"env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", SCORING, questions], **options)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert [value for value, *_ in scores] == pytest.approx([share for *_, share in SCORED])
    for value, count, right in scores:
        assert len(right) == count and value == pytest.approx(100 * sum(right) / count)
    names = [file.name for file in tmp_path.rglob("*") if file.is_file()]
    assert sorted(names) == sorted(ENGLISH)  # nothing was fetched
