"""The table of the real language model, against a plain count of the rows in git."""

import csv
from statistics import mean

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
