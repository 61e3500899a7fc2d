"""The tables of the real language model, against a plain count of the rows in git and rows made here."""

import csv
from statistics import mean

from featcal.files import write_json
from pipeline import ROOT
from reproduction.report.pages import real_language

SCORES = ROOT / "results" / "mini" / "scores" / "smollm2-chat" / "scores.csv"
UNSEEN = ("open_trivia", "subjectivity")


def test_the_table_shows_the_means_of_the_rows_in_git():
    rows = [one for one in csv.DictReader(SCORES.open()) if one["method"] == "merged"]
    rows = [one for one in rows if one["upstream"] == "task_arithmetic"]
    page = real_language.answers("mini").text.splitlines()
    shown = next(one for one in page if one.startswith("Task Arithmetic")).split("  ")[1:]
    expected = {"likely": [], "greedy": [], "unseen": [], "plain": []}
    for row in rows:
        task, greedy, _ = row["task"].partition("-greedy")
        if task == "plain_text":
            expected["plain"].append(float(row["value"]))
        elif task not in UNSEEN:
            expected["greedy" if greedy else "likely"].append(float(row["value"]))
        elif not greedy:
            expected["unseen"].append(float(row["value"]))
    for cell, (part, values) in zip(shown, expected.items(), strict=True):
        digits = 2 if part == "plain" else 1
        assert cell.startswith(f"{mean(values):.{digits}f}"), part


def test_the_example_shows_every_answer_with_its_model(tmp_path, monkeypatch):
    keys = ("upstream", "method", "setting", "answer")
    answers = [
        ("", "base", "", "of the <base>"), ("task_arithmetic", "merged", "", "before"),
        ("task_arithmetic", "featcal", "paper", "after"),
    ]  # fmt: skip
    found = {"suite": "mini", "seed": 7, "new_tokens": 5, "question": "a < b?"}
    found["answers"] = [dict(zip(keys, one, strict=True)) for one in answers]
    write_json(tmp_path / real_language.EXAMPLE, found)
    monkeypatch.setattr(real_language, "project_root", lambda: tmp_path)
    page = real_language.example("mini")
    assert [line.split("  ") for line in page.text.splitlines()[2:]] == [
        ["Pre-trained", "of the <base>"], ["Task Arithmetic", "before"],
        ["w/ FeatCal, as printed for the smaller Llama", "after"],
    ]  # fmt: skip
    assert "seed 7: “a < b?”" in page.text and "a &lt; b?" in page.html
    assert "not run" in real_language.example("paper").text
