"""Result files: the same text for the same numbers."""

import os

import pytest

from featcal.errors import BadFile
from featcal.files import write_json
from pipeline import read_rows
from reproduction import results


def score(**changed):
    row = dict.fromkeys(results.SCORES, "") | {"suite": "mini", "pool": "8", "task": "mnist"}
    return row | {"value": 85.5, "count": 10000} | changed


def test_rows_written_are_the_rows_read(tmp_path):
    rows = [score(), score(task='a,b"c', value=1 / 3), score(value=-1e-9, seed="42")]
    results.write_rows(tmp_path / "x.csv", rows, results.SCORES)
    back = read_rows(tmp_path / "x.csv", results.SCORES)
    assert back == [rows[0], rows[1] | {"value": 0.3333}, rows[2] | {"value": 0.0}]
    written = (tmp_path / "x.csv").read_bytes()
    assert b"\r" not in written and b"-0.0" not in written and b",85.5000,10000\n" in written


@pytest.mark.parametrize("row", [score(value=float("nan")), score(extra=1), {"value": 1.0}])
def test_bad_rows_are_refused_and_nothing_is_written(tmp_path, row):
    with pytest.raises(BadFile, match=r"x\.csv"):
        results.write_rows(tmp_path / "x.csv", [row], results.SCORES)
    assert os.listdir(tmp_path) == []


def test_json_is_stable_and_refuses_nan(tmp_path):
    write_json(tmp_path / "x.json", {"b": 1, "a": "é"})
    assert (tmp_path / "x.json").read_text("utf-8") == '{\n  "b": 1,\n  "a": "é"\n}\n'
    with pytest.raises(BadFile, match="NaN"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
