"""Every verdict, held against a second computation that shares no code with the report
(recomputed_verdicts.py).
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from recomputed_verdicts import Results, all_claims
from synthetic_correct import forget_answers
from synthetic_results import write_project

from reproduction.report.claims import claims
from reproduction.report.page import tally
from reproduction.report.paper import IMAGES, REAL, texts
from reproduction.report.verdicts import WORDS, judge, sources

ROOT = Path(__file__).parents[3]
YAML = ROOT / "reproduction" / "report" / "claims.yaml"


def compare(folder, suite, setting):
    """Claims on which the two computations differ, with both answers; how often each word was said;
    and all verdicts.
    """
    again = Results(folder, setting)
    differing, words, verdicts = {}, Counter(), {}
    for entry, claim in zip(all_claims(YAML), claims(), strict=True):
        assert entry["id"] == claim.id
        verdicts[claim.id] = ours = judge(claim, suite, setting, folder)
        word, margin, noise = again.verdict(entry)
        words[word] += 1
        told, expected = (ours.word, ours.margin, ours.noise), (word, margin, noise)
        near = pytest.approx(expected[1:], rel=1e-6, abs=1e-9, nan_ok=True)
        if ours.word != word or told[1:] != near:
            differing[claim.id] = told, expected
    return differing, words, verdicts


@pytest.mark.parametrize("setting", ["suite", "paper"])
def test_every_verdict_on_the_results_in_git_is_what_other_code_computes(setting):
    differing, words, _ = compare(ROOT / "results" / "mini", "mini", setting)
    assert differing == {} and sum(words.values()) == len(claims())
    if setting == "suite":
        assert words["not run"] <= 7, "energy needs a GPU; everything else was run"


def test_every_verdict_is_the_same_where_correctness_is_kept(tmp_path):
    folder = write_project(tmp_path)
    kept = {path: path.read_bytes() for path in folder.rglob("*.correct.csv")}
    forget_answers(folder)
    unpaired, _, before = compare(folder, "mini", "suite")
    for path, content in kept.items():
        path.write_bytes(content)
    differing, words, after = compare(folder, "mini", "suite")
    assert unpaired == differing == {} and words["holds"] > 40
    scored = [c.id for c in claims() if c.file == "scores" and before[c.id].word != "not run"]
    assert all(before[name].pairing for name in scored)
    assert not any(after[name].pairing for name in scored if name[:2] == "t7")
    texts = [name for name in scored if name[:2] == "t3" and "gain" not in name]
    assert {after[name].pairing for name in texts} <= {"", "partly unpaired"}


def test_the_counts_on_the_page_of_claims_are_those_of_the_other_code():
    """The last column is that of the suite's own models, the printed settings before the tuned."""
    lines = {one.split("  ")[0]: one for one in tally("mini").text.splitlines()}
    for place, setting in enumerate(("paper", "suite")):
        again, counted = Results(ROOT / "results" / "mini", setting), {}
        for entry in all_claims(YAML):
            if entry.get("group"):
                counted.setdefault(entry["group"], Counter())[again.verdict(entry)[0]] += 1
        for group, words in counted.items():
            cell = lines[group].split("tuned: ")[-2 + place]
            cell = cell.rsplit("  ", 1)[-1] if place else cell.rstrip().rsplit("  ", 1)[-1]
            shown = {w: int(one[1]) for w in WORDS if (one := re.search(rf"{w} (\d+)", cell))}
            assert shown == dict(words), (group, setting)


@pytest.mark.parametrize("setting", ["paper", "suite"])
@pytest.mark.parametrize("name", ["t1_upstreams", "t1_adapters", "t1_ta_upstream", "f1_every_task"])
def test_verdicts_on_the_second_encoder_are_what_other_code_computes(name, setting):
    """Of the four mergers it has averaging and task arithmetic."""
    entry = next(entry for entry in all_claims(YAML) if entry["id"] == name)
    entry |= {"role": REAL, "file": "second_encoder"}
    if isinstance(entry["over"], dict):
        entry["over"] = entry["over"] | {"upstream": ["average", "task_arithmetic"]}
    word, margin, noise = Results(ROOT / "results" / "mini", setting).verdict(entry)
    (source,) = (one for one in sources("mini") if one.key == "second_encoder")
    found = source.judged([next(claim for claim in claims() if claim.id == name)])
    (ours,) = dict(zip(source.settings, found, strict=True))[setting]
    assert (ours.word, ours.margin, ours.noise) == (
        word, pytest.approx(margin), pytest.approx(noise)
    )  # fmt: skip


def test_a_claim_is_judged_on_texts_as_on_images_that_have_the_same_numbers(tmp_path):
    """Results of the smaller image model under the real encoder's name: every claim that has a
    counterpart comes out the same.
    """
    source = ROOT / "results" / "mini"
    images = json.loads((source / "suite.json").read_text())["pools"]["20"]
    named = dict(zip(images, texts(), strict=True)) | {IMAGES: REAL}
    words = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, named)) + r")(?![\w-])")
    for path in source.glob(f"*/{IMAGES}-*/*"):
        if path.suffix != ".png":
            renamed = words.sub(lambda found: named[found[1]], path.read_text())
            copy = tmp_path / str(path.relative_to(source)).replace(IMAGES, REAL)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(renamed)
    pairs = [(claim, claim.on(REAL)) for claim in claims() if claim.on(REAL)]
    assert len(pairs) > 90 and {claim.role for claim, _ in pairs} <= {IMAGES, "clip_l14"}
    for claim, counterpart in pairs:
        if len(claim.parts) == len(counterpart.parts):  # no larger model among them
            ours = judge(claim, "mini", "suite", source)
            theirs = judge(counterpart, "mini", "suite", tmp_path)
            expected = pytest.approx((theirs.margin, theirs.noise), nan_ok=True)
            assert ours.word == theirs.word and (ours.margin, ours.noise) == expected, claim.id
