"""Every verdict, held against a second computation that shares no code (recomputed_verdicts.py)."""

import json
import re

import pytest
from recomputed_verdicts import Results, all_claims
from synthetic_correct import forget_answers
from synthetic_results import write_project

from pipeline import RESULTS, ROOT
from reproduction.report.claims import claims
from reproduction.report.paper import IMAGES, REAL, TEXT_SETS
from reproduction.report.verdicts import judge, sources

ENTRIES = all_claims(ROOT / "reproduction" / "report" / "claims.yaml")


def recomputed(folder, setting):
    """Return word, margin and noise of every claim by the second computation."""
    again = Results(folder, setting)
    return {entry["id"]: again.verdict(entry) for entry in ENTRIES}


def agreed(folder, setting, expected):
    """Return the verdicts of the report, which are those of the second computation."""
    verdicts = {claim.id: judge(claim, "mini", setting, folder) for claim in claims()}
    assert list(verdicts) == list(expected)
    for name, verdict in verdicts.items():
        word, *values = expected[name]
        near = pytest.approx(values, rel=1e-6, abs=1e-9, nan_ok=True)
        assert verdict.word == word and [verdict.margin, verdict.noise] == near, name
    return verdicts


@pytest.mark.parametrize("setting", ["suite", "paper"])
def test_every_verdict_on_the_results_in_git_is_what_other_code_computes(setting):
    verdicts = agreed(RESULTS, setting, recomputed(RESULTS, setting))
    if setting == "suite":  # energy needs a GPU; memory of Table 13 is not of published adapters
        not_run = [name for name, verdict in verdicts.items() if verdict.word == "not run"]
        assert len(not_run) <= 9 and all("energy" in n or "t13_memory" in n for n in not_run)


def test_every_verdict_is_the_same_where_correctness_is_kept(tmp_path):
    folder = write_project(tmp_path)
    kept = {path: path.read_bytes() for path in folder.rglob("*.correct.csv")}
    forget_answers(folder)
    before = agreed(folder, "suite", recomputed(folder, "suite"))
    for path, content in kept.items():
        path.write_bytes(content)
    after = agreed(folder, "suite", recomputed(folder, "suite"))
    assert [verdict.word for verdict in after.values()].count("holds") > 40
    scored = [c.id for c in claims() if c.file == "scores" and before[c.id].word != "not run"]
    assert all(before[name].pairing for name in scored)
    assert not any(after[name].pairing for name in scored if name[:2] == "t7")
    text_claims = [name for name in scored if name[:2] == "t3" and "gain" not in name]
    assert {after[name].pairing for name in text_claims} <= {"", "partly unpaired"}


@pytest.mark.parametrize("setting", ["paper", "suite"])
@pytest.mark.parametrize("name", ["t1_upstreams", "t1_adapters", "t1_ta_upstream", "f1_every_task"])
def test_verdicts_on_the_second_encoder_are_what_other_code_computes(name, setting):
    """Of the four mergers it has averaging and task arithmetic."""
    entry = next(entry for entry in ENTRIES if entry["id"] == name)
    entry = entry | {"role": REAL, "file": "second_encoder"}
    if isinstance(entry["over"], dict):
        entry["over"] = entry["over"] | {"upstream": ["average", "task_arithmetic"]}
    word, margin, noise = Results(RESULTS, setting).verdict(entry)
    (source,) = (candidate for candidate in sources("mini") if candidate.key == "second_encoder")
    (verdicts,) = source.judged([next(claim for claim in claims() if claim.id == name)])
    actual = dict(zip(source.settings, verdicts, strict=True))[setting]
    assert actual.word == word and (actual.margin, actual.noise) == pytest.approx((margin, noise))


def test_a_claim_is_judged_on_texts_as_on_images_that_have_the_same_numbers(tmp_path):
    """Results of the smaller image model as the real encoder's: every claim comes out the same."""
    images = json.loads((RESULTS / "suite.json").read_text())["pools"]["20"]
    renames = dict(zip(images, TEXT_SETS, strict=True)) | {IMAGES: REAL}
    pattern = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, renames)) + r")(?![\w-])")
    for path in RESULTS.glob(f"*/{IMAGES}-*/*"):
        if path.suffix != ".png":
            renamed = pattern.sub(lambda match: renames[match[1]], path.read_text())
            copy = tmp_path / str(path.relative_to(RESULTS)).replace(IMAGES, REAL)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(renamed)
    pairs = [(claim, claim.on_real_model(REAL)) for claim in claims() if claim.on_real_model(REAL)]
    assert len(pairs) > 90 and {claim.role for claim, _ in pairs} <= {IMAGES, "clip_l14"}
    for claim, counterpart in pairs:
        if len(claim.parts) == len(counterpart.parts):  # no larger model among them
            image = judge(claim, "mini", "suite", RESULTS)
            text = judge(counterpart, "mini", "suite", tmp_path)
            expected = pytest.approx((text.margin, text.noise), nan_ok=True)
            assert image.word == text.word and (image.margin, image.noise) == expected, claim.id
