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
from pipeline import ROOT
from reproduction.report.evidence import Evidence
from reproduction.report.pages import default, differences, field, gain, real_encoder, resources
from reproduction.report.paper import errata, packaged, paper_table
from reproduction.results import BEYOND

RESULTS = ROOT / "results" / "mini"


def line(page, start):
    """Return the cells of the line of a table that begins with some words."""
    return next(one for one in page.text.splitlines() if one.startswith(start)).split("  ")


# the field


def test_every_method_of_the_field_has_its_facts():
    known = field.METHODS
    assert set(known) == {*method_names(), *field.BEHIND, *field.TRAINED, field.TANGENT}
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


# settings


def test_a_search_shows_paired_differences(results):
    """Two tasks of 400 samples, which every candidate saw."""
    right = defaultdict(dict)
    with (results / "tune/clip_b32-8/tune.correct.csv").open() as text:
        for row in csv.DictReader(text):
            right[int(row["trial"])][row["task"]] = [
                int(bit) for bit in f"{int(row['correct'], 16):0400b}"
            ]

    def paired(one, other):
        pairs = [zip(right[one][t], right[other][t], strict=True) for t in ("mnist", "dtd")]
        apart = [[100 * (a - b) for a, b in pair] for pair in pairs]
        return 2 * math.sqrt(sum(variance(each) / 400 for each in apart) / 4)

    cells = line(default.searches("mini"), "Smaller CLIP, 8")
    assert [cells[1], cells[3], cells[6]] == ["74.0", "60.0", "75.0"]
    assert (cells[5], cells[8]) == (f"+14.0 ± {paired(2, 0):.1f}", f"-1.0 ± {paired(2, 1):.1f}")
    forget_answers(results)
    alone = {v: v * (100 - v) / 400 / 2 for v in (60.0, 74.0, 75.0)}
    cells = line(default.searches("mini"), "Smaller CLIP, 8")
    assert cells[5] == f"+14.0 ± {2 * math.sqrt(alone[60.0] + alone[74.0]):.1f}"


@pytest.fixture
def beyond(results):
    """Invented results of variants: one merger, two tasks, two draws."""
    values = {
        "merged": 60.0,
        "paper": 70.0,
        "suite": 75.0,
        "sites": 74.0,
        "both": 90.0,
        default.PRESET: 60.0,
    }
    shared = {
        "suite": "mini",
        "role": "clip_b32",
        "pool": 8,
        "upstream": "task_arithmetic",
        "metric": "accuracy",
    }
    rows = []
    for variant, value in values.items():
        for samples, seed in ((256, 42), (256, 43), (32, 42)):
            one = {
                "variant": variant,
                "method": "featcal",
                "setting": "beyond",
                "samples": samples,
                "seed": seed,
            }
            if variant == "merged":
                one |= {"samples": 0, "seed": "", "method": "merged", "setting": ""}
            one |= {"count": 400, "chosen": int(variant == "both"), "validation": value}
            rows += [
                shared | one | {"task": t, "value": value - 10 * (samples == 32)}
                for t in ("mnist", "dtd")
            ]
            if variant == "merged":
                break
    rows = [row | {"value": 60.0} if row["variant"] == "merged" else row for row in rows]
    write_answers(results / "beyond/clip_b32-8/beyond.csv", rows, BEYOND)
    study = {"seeds": [42, 43], "samples": 256, "few": [32, 256], "chosen_on": ["task_arithmetic"]}
    facts = {"study": study, "chosen": "both", "validation": {"sites": 74.0, "both": 90.0}}
    (results / "beyond/clip_b32-8/beyond.settings.json").write_text(json.dumps(facts))
    return default.studies("mini")["Smaller CLIP, 8 image tasks"]


def test_the_chosen_variant_is_compared_with_the_papers_method_and_adapters_apart_from_scored_rows(
    beyond,
):
    cells = line(default.against("mini"), "Task Arithmetic  Smaller CLIP")
    assert cells[2:6] == ["60.0", "75.0", "60.0", "90.0"] and cells[6].startswith("+15.0 ±")
    found = beyond.adapter("task_arithmetic", "surgery")
    assert found is None or set(found.rows["setting"]) <= {"suite_train", "paper_train"}
    rows = [one.split("  ")[2:5] for one in default.few("mini").text.splitlines()[2:]]
    assert rows == [["32", "65.0", "50.0"], ["256", "75.0", "60.0"]]
    assert "image/svg+xml" in default.figure("clip_b32", "8", "mini").bundle


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


def test_the_preset_best_ends_alike_from_every_merger_as_the_page_says():
    table = pd.read_csv(RESULTS / "beyond/minilm-8/beyond.csv")
    one_draw = table[table.seed.isna() | ((table.samples == 64) & (table.seed == 42))]
    mean = one_draw.groupby(["variant", "upstream"])["value"].mean()
    best, paper, merged = (mean[variant] for variant in (default.PRESET, "paper", "merged"))
    assert best.max() - best.min() < 1 < merged.max() - merged.min()
    weak = merged < merged.mean()
    assert weak.any() and (best > paper)[weak].all() and (best < paper)[~weak].all()


# cost


def test_a_choice_is_compared_with_what_another_draw_and_other_test_texts_may_do(results):
    found = {
        one[:2]: one[2:] for one in resources.moved(Evidence("mini", "llama_3b", "mergebench"))
    }
    assert [round(change, 6) for _, change, _ in found.values()] == [-10.0, -0.5, 2.0]
    drawn = 1 + 1 / 3  # the draws deviate by 1 around 80; unpaired, 400 texts of one task add
    for mean, _, noise in found.values():
        assert (
            2 * math.sqrt(drawn)
            <= noise
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
