"""Which samples were right: packed and read back, and in the results of git the same numbers as the
scores.
"""

from pathlib import Path

import numpy as np
import pytest

from featcal.errors import BadData, BadFile
from pipeline import read_rows
from reproduction.report.statistics import bits
from reproduction.results import SCORES, correct_columns, packed, write_scores

RESULTS = Path(__file__).parents[3] / "results"
KEPT = sorted(RESULTS.rglob("*.correct.csv"))


def test_the_first_sample_is_the_highest_bit_and_zeros_stand_behind_the_last():
    assert packed([True, False, False, True, True, False, False, False, True]) == "9880"
    assert packed([]) == packed(None) == ""
    assert bits("9880", 9).tolist() == [True, False, False, True, True, False, False, False, True]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 500])
def test_what_is_read_back_is_what_was_packed(count):
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


@pytest.mark.skipif(not KEPT, reason="no results with correctness in git")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_scores_in_git_are_the_shares_of_right_samples(path):
    scores = read_rows(path.with_name(path.name.replace(".correct", "")))
    kept = read_rows(path)
    assert len(scores) == len(kept)
    for row, right in zip(scores, kept, strict=True):
        keys = {c: v for c, v in right.items() if c != "correct"}
        assert keys == {c: row[c] for c in keys}
        if right["correct"]:
            assert row["value"] == round(
                100 * int(bits(right["correct"], row["count"]).sum()) / row["count"], 4
            )
        else:
            assert row["metric"] != "accuracy"
