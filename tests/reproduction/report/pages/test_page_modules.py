"""Pages of studies on invented results whose numbers can be counted by hand, and on those in git."""

import csv
import json
import math
from collections import defaultdict
from statistics import variance

import pandas as pd
import pytest
from synthetic_correct import forget_answers, write_answers

from featcal.merging.registry import method_named, method_names
from pipeline import ROOT, read_rows
from reproduction.report.evidence import Evidence
from reproduction.report.pages import default, differences, field, gain, real_encoder, resources
from reproduction.report.paper import errata, packaged, paper_table
from reproduction.report.statistics import noise
from reproduction.report.tables import average
from reproduction.results import CANDIDATES, DEFAULT, write_rows

RESULTS = ROOT / "results" / "mini"


def line(page, start):
    """Return the cells of the line of a table that begins with some words."""
    return next(one for one in page.text.splitlines() if one.startswith(start)).split("  ")


# the field


def test_every_method_of_the_field_has_its_facts():
    known = field.METHODS
    after = (*field.BEHIND, *field.INFERRED, *field.TRAINED)
    assert set(known) == {*method_names(), "swudi", *after, field.TANGENT}
    assert {mark for one in known.values() for mark in one.marks} <= set(
        packaged("field.yaml")["marks"]
    )
    references = packaged("field.yaml")["references"]
    assert len(references) == 18 and {n for names in references for n in names} <= set(known)
    for name in method_names():
        needs = method_named(name).needs
        looks = known[name].sees != field.NOTHING
        assert (looks, "H" in known[name].marks) == ("batches" in needs, "head" in needs), name


def test_mergers_are_sorted_by_what_featcal_makes_of_them_and_the_control_is_last(ours):
    assert field.mergers(ours) == ["wudi_closed_form", "iso_c", "average"]
    names = [one.split("  ")[0] for one in field.values("clip_b32", "mini").text.splitlines()[2:]]
    assert "tangent" in names[-1] and len(names) == 4
    assert field.seconds(ours, "average", "prob_surgery") == 7.0


def test_the_field_counts_what_each_way_raises(ours):
    assert line(field.summary("mini"), "FeatCal  synthetic")[2] == "3 of 3"
    assert line(field.summary("mini"), "Surgery  synthetic")[2:5] == [
        "2 of 3",
        "1",
        "-1.0 to +10.0",
    ]
    assert line(field.summary("mini"), "FeatCal extended  synthetic")[4] == "+22.5 to +22.5"


def test_only_a_chosen_scale_is_marked_and_an_end_of_its_range_is_told(ours):
    assert field._marks(ours, "iso_c") == "<sup>V</sup>" and field._marks(ours, "average") == " [1]"
    assert "an end" in field._scale(ours, "iso_c") and field._scale(ours, "average") == ""


def test_mergers_of_the_language_model_are_means_over_its_tasks_best_first():
    rows = read_rows(ROOT / "results/mini/field/flan_t5_base-glue/field.csv")
    means = {}
    for merger in {row["upstream"] for row in rows}:
        own = [float(row["value"]) for row in rows if row["upstream"] == merger]
        means[field.METHODS[merger].name] = sum(own) / len(own)
    lines = [one for one in field.language("mini").text.splitlines()[2:] if "validation" not in one]
    assert len(lines) == len(means)
    best_first = sorted(means, key=lambda name: -means[name])
    for text, name in zip(lines, best_first, strict=True):
        assert text.startswith(f"{name} ") and text.split()[-1] == f"{means[name]:.1f}"


# the default


@pytest.fixture
def invented(results):
    """Invented results of the default after two mergers: two tasks of 400 samples, two draws."""
    shared = {"suite": "mini", "role": "clip_b32", "pool": 8, "metric": "accuracy", "count": 400}
    values = dict(
        average={"merged": 60, "paper": 70, "suite": 80, "auto": 79.5, "surgery": 65},
        tsv_merge={"merged": 80, "paper": 82, "suite": 75, "auto": 70, "surgery": 85},
    )
    rows, cost = [], []
    for merger, own in values.items():
        for seed in (42, 43):
            for name, value in own.items():
                featcal = name not in ("merged", "surgery")
                one = {"upstream": merger, "method": "featcal" if featcal else name, "seed": seed}
                one |= {"setting": name if featcal else "", "samples": 32, "value": value}
                one |= {"candidate": {"auto": "stream 4", "surgery": "rank 4"}.get(name, "")}
                rows += [shared | one | {"task": task} for task in ("mnist", "dtd")]
            seconds = {"paper": 2.0, "auto": 6.0, "surgery": 3.0, "prob_surgery": 4.0}
            cost += [{"upstream": merger, "samples": 32, "seed": seed, "seconds": seconds}]
    folder = results / "default/clip_b32-8"
    write_answers(folder / "default.csv", rows, DEFAULT)
    listed = {name: shared[name] for name in ("suite", "role", "pool")}
    listed |= {"upstream": "average", "method": "auto", "samples": 32, "seed": 42}
    candidates = [
        listed | {"candidate": name, "divergence": 0.1, "chosen": int(name == "stream 4")}
        for name in ("merged", "stream 4")
    ]
    write_rows(folder / "default.candidates.csv", candidates, CANDIDATES)
    (folder / "run.json").write_text(json.dumps({"cost": cost, "host": {}}))
    return Evidence("mini", "clip_b32", "8")


def test_the_default_is_compared_with_the_best_fixed_setting_and_the_better_adapter(invented):
    one = default.Place(invented, "average", 32)
    error = noise(one.auto, one.merged)
    cells = line(default.answer("mini"), "Simple Averaging")
    assert {"79.5", "60.0", "70.0", f"+19.5 ± {error:.1f}"} <= {
        cell.split(" sd")[0] for cell in cells
    }
    assert one.fixed[0] == "tuned settings" and one.adapter[0] == "Surgery; rank 4"
    assert line(default.expected("mini"), "Synthetic")[1:] == ["2", "1", "1", "1", "1"]
    assert "image/svg+xml" in default.chosen("mini").bundle
    assert line(default.costs("mini"), "Synthetic")[2:9] == ["–", "–", "–", "2", "6", "–", "7"]


def test_dropped_ideas_are_compared_with_the_same_settings_without_them():
    kept = pd.read_csv(default.DROPPED, dtype={"pool": str})
    assert kept["variant"].str.endswith(default.IDEAS).sum() == 322
    one = kept[(kept["role"] == "clip_b32") & (kept["upstream"] == "wudi_closed_form")]
    means = one.groupby("variant")["value"].mean()
    together, plain = means["residual, sites, joint, α 1"], means["suite"]
    shown = {row.split("  ")[0]: row for row in default.dropped().text.splitlines()}
    assert f"{means['two sweeps']:.1f}  {means['two sweeps'] - plain:+.1f} ±" in shown["two sweeps"]
    name = "residual, sites, joint, α 1, no harm"
    assert f"{means[name]:.1f}  {round(means[name] - together, 1) + 0.0:+.1f} ±" in shown[name]


# cost


def test_a_choice_is_compared_with_what_another_draw_and_other_test_texts_may_do(results):
    found = {
        one[:2]: one[2:] for one in resources.moved(Evidence("mini", "llama_3b", "mergebench"))
    }
    assert [round(change, 6) for _, change, _ in found.values()] == [-10.0, -0.5, 2.0]
    drawn = 1 + 1 / 3  # the draws deviate by 1 around 80; unpaired, 400 texts of one task add
    for mean, _, room in found.values():
        assert (
            2 * math.sqrt(drawn)
            <= room
            < 2 * math.sqrt(drawn + (80 * 20 + mean * (100 - mean)) / 400)
        )
    path = results / "choices/llama_3b-mergebench/choices.csv"
    kept = [one for one in path.read_text().splitlines() if ",43," not in one and ",44," not in one]
    path.write_text("\n".join(kept) + "\n")
    assert resources.moved(Evidence("mini", "llama_3b", "mergebench")) == [], (
        "one draw has no deviation"
    )


def test_seconds_are_those_on_record():
    records = [json.loads(path.read_text())["seconds"] for path in RESULTS.glob("*/*/run.json")]
    found = resources.quickest("mini")
    assert set(found) == {stage for one in records for stage in one}
    assert found["prepare_data"] == min(
        one["prepare_data"] for one in records if "prepare_data" in one
    )


# what the gain is made of, real models


def test_equal_values_share_a_rank_and_the_next_one_is_left_out():
    assert gain._ranks([70.04, 80.0, None, 69.96, 60.0]) == ["2", "1", "–", "2", "4"]


def test_shares_and_drift_are_counted_by_hand(results):
    cells = line(gain.shares("mini"), "FeatCal  Task Arithmetic, tuned")
    assert cells[5] == "62"  # (80 − 64) / (90 − 64), of equal steps from task to task
    assert line(gain.drift_parts("mini"), "FeatCal  drawn")[2:] == ["0.200", "0.150", "0.050"]


def test_experts_of_other_seeds_are_averaged_with_the_first(results):
    cells = line(real_encoder.seeds("mini"), "Fine-tuned")
    first, one, two = map(float, cells[1:4])
    assert float(cells[4]) == pytest.approx((first + one + two) / 3, abs=0.1) and len(cells) == 6


def test_margins_over_expert_seeds_have_the_error_of_test_texts_and_of_seeds():
    ours = Evidence("mini", "minilm", "8")
    featcal, surgery = ("average", "featcal", "suite"), ("average", "surgery", "suite")
    left, right = average(ours, featcal), average(ours, surgery)
    margins, others = [left.mean - right.mean], ours.table("expert_seeds")
    for _, one in others[others["upstream"] == "average"].groupby("expert_seed"):
        means = one[one["setting"] == "suite"].groupby("method")["value"].mean()
        margins.append(means["featcal"] - means["surgery"])
    room = 2 * math.sqrt((noise(left, right) / 2) ** 2 + variance(margins) / 3)
    cells = line(real_encoder.seeds("mini"), "w/ Surgery, in proportion")
    assert len(margins) == 3 and cells[-1] == f"{sum(margins) / 3:+.1f} ± {room:.1f}"


# errata


def facts(name):
    return "; ".join(differences.evidence_of(next(entry for entry in errata() if entry.id == name)))


def test_facts_next_to_an_erratum_are_computed_from_the_printed_tables():
    assert facts("t10_average") == "mean of the 20 cells: 73.15"
    assert facts("t4_change") == "60.8 − 45.3 = 15.5"
    assert facts("t3_unattainable") == "347 of 408 right: 85.05; 348 of 408 right: 85.29"
    assert "C100 63.7 in Table 10" in facts("t8_c100") and "56.9 with what fits" in facts("t8_c100")
    assert "Task Arithmetic w/ FeatCal, 0.08 apart" in facts("t9_foreign_adamerging")


@pytest.mark.parametrize("entry", [e for e in errata() if e.kind == "rotated"], ids=lambda e: e.id)
def test_shifting_cells_back_makes_a_row_like_the_others(entry):
    """An erratum of this kind whose evidence spoke against it would be a mistake of ours."""
    printed, shifted = differences.scatter(entry)
    assert shifted < printed / 2


@pytest.mark.parametrize(
    ("table", "others"), [("table01", ("table08", "table10")), ("table07", ("table09", "table11"))]
)
def test_another_vintage_is_reported_for_exactly_the_cells_that_differ(table, others):
    def base(name):
        return (
            paper_table(name)
            .set_index(["upstream", "method", "task"])["value"]
            .sort_index()["", "base"]
        )

    here = base(table).drop("average")
    differing = {
        cell for cell in here.index if any(base(other)[cell] != here[cell] for other in others)
    }
    entry = next(e for e in errata() if e.id == f"t{int(table[-2:])}_vintage")
    assert set(entry.cells) == differing
