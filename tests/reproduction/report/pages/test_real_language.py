"""The tables of the real language model, against a plain count of the rows in git and rows made here."""

import csv
from statistics import mean

from pipeline import ROOT
from reproduction.report import evidence
from reproduction.report.pages import real_language
from reproduction.results import EXAMPLE, write_rows

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


def test_the_example_shows_the_answers_before_and_after_calibration(tmp_path, monkeypatch):
    answers = {
        ("", "base", "", ""): "of the <base>", ("average", "merged", "", ""): "of another merger",
        ("task_arithmetic", "merged", "", ""): "before", ("task_arithmetic", "featcal", "paper", 42): "after,\nand more",
        ("task_arithmetic", "featcal", "paper_8b", 42): "at another setting",
    }  # fmt: skip
    common = {
        "suite": "mini",
        "role": "smollm2",
        "pool": "chat",
        "drawn_by": 7,
        "question": "a < b?",
    }
    keys = ("upstream", "method", "setting", "seed")
    rows = [
        common | dict(zip(keys, key, strict=True)) | {"answer": a} for key, a in answers.items()
    ]
    folder = tmp_path / "scores" / "smollm2-chat"
    folder.mkdir(parents=True)
    write_rows(folder / "example.csv", rows, EXAMPLE)
    monkeypatch.setattr(evidence, "results_folder", lambda suite: tmp_path)
    page = real_language.example("mini")
    assert [line.split("  ")[-1] for line in page.text.splitlines()[2:]] == [
        "of the <base>", "before", "after,", "and more",
    ]  # fmt: skip
    assert "seed 7: “a < b?”" in page.text and "a &lt; b?" in page.html
