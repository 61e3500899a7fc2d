"""Paired errors: the variance of a difference by simulation, and where it is not known."""

import numpy as np
import pandas as pd
import pytest

from featcal.errors import BadData, BadFile
from pipeline import ROOT, read_rows
from reproduction.report.evidence import Evidence
from reproduction.report.statistics import bits, difference, estimate, lead
from reproduction.results import SCORES, correct_columns, packed, write_scores


def rows(answers, seeds=("42",)):
    """Return result rows of one model. answers: right rows by task, (seeds, n)."""
    return pd.DataFrame(
        {"task": task, "seed": seed, "metric": "accuracy", "correct": packed(right)}
        | {"value": 100 * right.mean(), "count": len(right)}
        for task, by_seed in answers.items()
        for seed, right in zip(seeds, by_seed, strict=True)
    )


def against(left, right):
    return difference([(1.0, estimate(left)), (-1.0, estimate(right))])


def test_the_paired_variance_is_that_of_simulated_test_sets():
    draw = np.random.default_rng([7, 3])
    counts, differences, estimated = {"a": 300, "b": 120}, [], []
    for _ in range(3000):
        left, right = {}, {}
        for task, n in counts.items():
            difficulty = draw.random(n)
            left[task] = (0.8 * difficulty + 0.2 * draw.random(n) < 0.7)[None]
            right[task] = (0.8 * difficulty + 0.2 * draw.random(n) < 0.6)[None]
        differences.append(np.mean([100 * (left[t].mean() - right[t].mean()) for t in counts]))
        if len(estimated) < 100:
            result = against(rows(left), rows(right))
            estimated.append(result.variance)
            assert result.pairing == "" and result.value == pytest.approx(differences[-1])
    assert np.mean(estimated) == pytest.approx(np.var(differences), rel=0.08)
    unpaired = [estimate(rows(answers)).variance for answers in (left, right)]
    assert np.mean(estimated) < 0.5 * sum(unpaired), "the models stumble over the same rows"


def test_discordant_rows_alone_count():
    left, right = np.ones(100, bool), np.ones(100, bool)
    right[:6] = False
    left[6:8] = False
    result = against(rows({"t": [left]}), rows({"t": [right]}))
    assert result.value == pytest.approx(4)
    # McNemar, with s² of n − 1
    assert result.variance == pytest.approx(100**2 * (8 / 100 - 0.04**2) / 99)
    both = estimate(rows({"t": [left]})), estimate(rows({"t": [right]}))
    assert lead(*both) == (result.value, result.noise)
    same = against(rows({"t": [left]}), rows({"t": [left]}))
    assert (same.value, same.variance, same.has_error) == (0, 0, True)


def test_answers_of_another_run_are_refused(results):
    path = results / "scores/clip_b32-8/scores.csv"
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    frame.loc[0, "value"] = "12.0000"
    frame.to_csv(path, index=False)
    with pytest.raises(BadFile, match=r"clip_b32-8/scores\.correct\.csv"):
        Evidence("mini", "clip_b32", "8", results).table("scores")


KEPT = sorted((ROOT / "results").rglob("*.correct.csv"))


def test_the_first_sample_is_the_highest_bit_and_zeros_stand_behind_the_last():
    assert packed([True, False, False, True, True, False, False, False, True]) == "9880"
    assert packed([]) == packed(None) == ""
    for count in (1, 7, 8, 9, 500):
        flags = np.random.default_rng(count).random(count) < 0.5
        assert np.array_equal(bits(packed(flags), count), flags)


@pytest.mark.parametrize(
    ("text", "count"), [("9880", 8), ("98", 9), ("9881", 9), ("xy", 8), ("", 1)]
)
def test_another_number_of_samples_or_no_text_of_them_is_refused(text, count):
    with pytest.raises(BadData, match=f"not the hexadecimal text of {count} samples"):
        bits(text, count)


def test_scores_are_written_as_without_correctness_which_lies_beside_them(tmp_path):
    row = dict.fromkeys(SCORES, "") | {"value": 66.6667, "count": 3, "correct": "c0"}
    write_scores(tmp_path / "x.csv", [row])
    assert (tmp_path / "x.csv").read_bytes().endswith(b",66.6667,3\n")
    assert read_rows(tmp_path / "x.correct.csv", correct_columns())[0]["correct"] == "c0"
    with pytest.raises(BadFile, match="correct"):
        write_scores(tmp_path / "y.csv", [{c: v for c, v in row.items() if c != "correct"}])


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_scores_in_git_are_the_shares_of_right_samples(path):
    scores = read_rows(path.with_name(path.name.replace(".correct", "")))
    for row, right in zip(scores, read_rows(path), strict=True):
        text = right.pop("correct")
        assert right == {column: row[column] for column in right}
        share = 100 * int(bits(text, row["count"]).sum()) / row["count"] if text else None
        assert row["value"] == round(share, 4) if text else row["metric"] != "accuracy"
