"""Every number of the landing page's tables, recomputed from the committed files by other code than
the page's.

Nothing of reproduction.report computes here: files are read by `csv` and `json`, and what the page
shows is parsed from its HTML.
"""

import csv
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean

import pytest

from reproduction.report import cost, overview, shares
from reproduction.report.page import Page

ROOT = Path(__file__).parents[2]
RESULTS, PAPER = ROOT / "results" / "mini", ROOT / "reproduction" / "report" / "paper"
UPSTREAMS = {
    "Simple Averaging": "average", "Task Arithmetic": "task_arithmetic", "AdaMerging": "adamerging", "WUDI-Merging": "wudi",
}  # fmt: skip
PLACES = {
    "8 tasks, real encoder": "minilm-8", "8 tasks, smaller model": "clip_b32-8", "8 tasks, larger model": "clip_l14-8",
    "Smaller T5": "flan_t5_base-glue", "Larger T5": "flan_t5_large-glue", "Smaller Llama": "llama_3b-mergebench",
    "Larger Llama": "llama_8b-mergebench",
}  # fmt: skip
SETTINGS = {"suite’s settings": "suite", "paper’s settings": "paper"}
METHODS = {"FeatCal": "featcal", "Surgery": "surgery", "ProbSurgery": "prob_surgery"}
PRINTED = {"8": "table01", "14": "table08", "20": "table10"}
PAPERS = {
    "average": "simple_averaging",
    "prob_surgery": "probsurgery",
    "expert": "finetuned",
}  # words of the printed tables
NUMBER = re.compile(r"[-−+]?\d+(?:\.\d+)?")


class Rows(HTMLParser):
    """Cells of every table row as text, parts of a cell between bars."""

    def __init__(self, html):
        super().__init__()
        self.rows = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag in ("small", "details") and self.rows and self.rows[-1]:
            self.rows[-1][-1] += "|"

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def shown(html):
    """Head and body of the one table in a piece of HTML."""
    head, *body = Rows(html).rows
    return head, body


def score(place, upstream, method, setting=""):
    """Average over tasks, and over seeds, of one model; None where it has no rows."""
    seeds = defaultdict(list)
    path = RESULTS / "scores" / place / "scores.csv"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as text:
        for row in csv.DictReader(text):
            if (row["upstream"], row["method"], row["setting"]) == (upstream, method, setting):
                seeds[row["seed"]].append(float(row["value"]))
    return (mean(map(mean, seeds.values())), len(seeds)) if seeds else None


def printed(table, upstream, method):
    """Mean of a printed row over its tasks."""
    with (PAPER / f"{table}.csv").open(encoding="utf-8") as text:
        key = (PAPERS.get(upstream, upstream), PAPERS.get(method, method))
        rows = [row for row in csv.DictReader(text) if (row["upstream"], row["method"]) == key]
    return mean(float(row["value"]) for row in rows if row["column"] != "Avg.")


def same(cell, value, digits):
    """Whether a cell shows a value, rounded to so many digits; a dash where there is none."""
    if value is None:
        return cell.strip() == "–"
    number = float(NUMBER.findall(cell)[0].replace("−", "-"))
    return abs(number - value) <= 0.5 * 10**-digits + 1e-6


def share(merged, ours, expert):
    return 100 * (ours - merged) / (expert - merged)


def test_every_cell_of_what_was_run_is_that_of_the_files():
    head, rows = shown(overview.runs("mini").html)
    assert head == ["Merger", "Base", "Merged", "FeatCal", "Experts", "Gap recovered", "Seeds"]
    assert len(rows) == 2 * (3 * len(UPSTREAMS) + 4)
    for name, *cells in rows:
        merger, told = name.split("|")
        words, setting = told.rsplit(", ", 1)
        place, upstream = PLACES[words], UPSTREAMS[merger]
        found = [
            score(place, "", "base"),
            score(place, upstream, "merged"),
            score(place, upstream, "featcal", SETTINGS[setting]),
        ]
        found.append(score(place, "", "expert"))
        base, merged, ours, expert = (one and one[0] for one in found)
        for cell, value in zip(cells[:4], (base, merged, ours, expert), strict=True):
            assert same(cell.split("|")[0], value, 1), (name, cell, value)
        assert same(cells[4], share(merged, ours, expert) if expert and ours else None, 0), (
            name,
            cells[4],
        )
        assert cells[5] == (str(found[2][1]) if found[2] else "not run"), name


def test_every_share_of_the_gap_is_that_of_the_files_and_of_the_printed_cells():
    head, rows = shown(shares.by_tasks(Page("landing", "mini")).html)
    pools = [column.split()[0] for column in head[1:4]]
    assert pools == list(PRINTED) and len(rows) == 8
    for name, *cells in rows:
        method, told = name.split("|")
        merger, setting = told.rsplit(", ", 1)
        upstream, at = UPSTREAMS[merger], SETTINGS[setting]
        for pool, here, there in zip(pools, cells[:3], cells[3:], strict=True):
            place = f"clip_b32-{pool}"
            ours, merged = (
                score(place, upstream, METHODS[method], at),
                score(place, upstream, "merged"),
            )
            value = ours and share(merged[0], ours[0], score(place, "", "expert")[0])
            assert same(here, value, 0), (name, pool, here, value)
            if at == "suite":
                table = PRINTED[pool]
                keys = (upstream, "merged"), (upstream, METHODS[method]), ("", "expert")
                paper = share(*(printed(table, *key) for key in keys))
                assert same(there.split("|")[0], paper, 0), (name, pool, there, paper)
            else:
                assert not there


def test_the_sentence_below_the_shares_says_what_the_table_does():
    """Differences of unrounded shares, of FeatCal and of both adapters, least and most over the
    numbers of tasks.
    """
    for words, upstream in zip(
        shares.words(Page("landing", "mini")).split(". "),
        ("average", "task_arithmetic"),
        strict=True,
    ):
        apart = defaultdict(list)
        for pool, table in PRINTED.items():
            place = f"clip_b32-{pool}"
            merged, expert = score(place, upstream, "merged")[0], score(place, "", "expert")[0]
            for method in METHODS.values():
                here = share(merged, score(place, upstream, method, "suite")[0], expert)
                there = share(
                    *(
                        printed(table, *key)
                        for key in ((upstream, "merged"), (upstream, method), ("", "expert"))
                    )
                )
                apart["featcal" if method == "featcal" else "adapters"].append(here - there)
        told = [float(number.replace("−", "-")) for number in NUMBER.findall(words)]
        wanted = [limit(apart[who]) for who in ("featcal", "adapters") for limit in (min, max)]
        assert told == pytest.approx(wanted, abs=0.0501), words


def test_the_cost_is_shown_by_both_procedures_as_recorded():
    record = json.loads((RESULTS / "cost/clip_b32-8/run.json").read_text(encoding="utf-8"))["cost"]
    here = {(run["method"], run["encode"]): run["seconds"] for run in record}
    with (PAPER / "table05.csv").open(encoding="utf-8") as text:
        seconds = {row["method"]: float(row["seconds"]) for row in csv.DictReader(text)}
    there = {("featcal", "once"): seconds["featcal"]}
    there |= {
        ("surgery", "each_step"): seconds["surgery"],
        ("prob_surgery", "each_step"): seconds["probsurgery"],
    }
    _, rows = shown(cost.procedures(Page("landing", "mini")).html)
    assert len(rows) == len(here) == 5
    for name, *cells in rows:
        method, _, procedure = name.partition(", ")
        key = (METHODS[method], "each_step" if procedure == "as published" else "once")
        for found, (own, times) in ((here, cells[:2]), (there, cells[2:])):
            value = found.get(key)
            assert same(own, value, 0 if value and value >= 100 else 1), (name, own, value)
            assert same(times, value and value / found["featcal", "once"], 1), (name, times)


def test_the_measured_numbers_of_the_abstracts_claims_are_those_of_the_files():
    """Both averages, or seconds, of every claim of the abstract, and the margin between them."""
    ours = {
        ("clip_b32", m): score("clip_b32-8", "task_arithmetic", m, "suite")[0]
        for m in METHODS.values()
    }
    ours |= {
        ("t5", m): score("flan_t5_base-glue", "task_arithmetic", m, "suite")[0]
        for m in METHODS.values()
    }
    merged = score("clip_b32-8", "task_arithmetic", "merged")[0]
    runs = json.loads((RESULTS / "cost/clip_b32-8/run.json").read_text(encoding="utf-8"))["cost"]
    took = {(run["method"], run["encode"]): run["seconds"] for run in runs}
    drawn = defaultdict(list)  # method and number of images → accuracies of all tasks and seeds
    with (RESULTS / "samples/clip_b32-8/samples.csv").open(encoding="utf-8") as text:
        for row in csv.DictReader(text):
            if row["setting"] == "suite":
                drawn[row["method"], row["samples"]].append(float(row["value"]))
    wanted = {
        "On Task Arithmetic, FeatCal is above Surgery.": (
            ours["clip_b32", "featcal"],
            ours["clip_b32", "surgery"],
        ),
        "On Task Arithmetic, FeatCal is above ProbSurgery.": (
            ours["clip_b32", "featcal"],
            ours["clip_b32", "prob_surgery"],
        ),
        "FeatCal raises the average of Task Arithmetic.": (ours["clip_b32", "featcal"], merged),
        "On FLAN-T5-base and GLUE, FeatCal is above Surgery.": (
            ours["t5", "featcal"],
            ours["t5", "surgery"],
        ),
        "On FLAN-T5-base and GLUE, FeatCal is above ProbSurgery.": (
            ours["t5", "featcal"],
            ours["t5", "prob_surgery"],
        ),
    }
    for method, name in (("surgery", "Surgery"), ("prob_surgery", "ProbSurgery")):
        published, kept = (
            (took["featcal", "once"], took[method, "each_step"]),
            (took["featcal", "once"], took[method, "once"]),
        )
        wanted[
            f"Calibrating with FeatCal takes at most a quarter of {name}'s time, as published."
        ] = published
        wanted[f"Calibrating with FeatCal takes less time than {name} with kept features."] = kept
    head, rows = shown(overview.abstract("mini").html)
    told = {
        row[0].split("|")[0].strip(): row[
            head.index("Drawn images and texts, at the suite’s settings")
        ]
        for row in rows
    }
    cell = told.pop(
        "Better sample efficiency: with 8 examples per task FeatCal is above both adapters with as many."
    )
    adapter = re.search(r"(?:decided by|least clear): (\w+)", cell)[1]
    assert same(
        cell[cell.index("margin") :],
        mean(drawn["featcal", "8"]) - mean(drawn[METHODS[adapter], "8"]),
        1,
    ), cell
    assert set(told) == set(wanted), "every other claim of the abstract is about two numbers"
    for sentence, (left, right) in wanted.items():
        cell = told[sentence]
        one, two = NUMBER.findall(cell)[:2]
        assert same(one, left, 1) and same(two, right, 1), (sentence, cell)
        margin = re.search(r"margin ([-−+]\d+\.\d+)", cell)
        more = (
            right - (4 if "a quarter" in sentence else 1) * left
            if "time" in sentence
            else left - right
        )
        assert margin and abs(float(margin[1].replace("−", "-")) - more) <= 0.05 + 1e-6, (
            sentence,
            cell,
        )
