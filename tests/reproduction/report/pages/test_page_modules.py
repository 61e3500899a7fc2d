"""Pages of studies on invented results whose numbers can be counted by hand, and on those in git."""

import json
import math
import re
import shutil
from itertools import product
from statistics import variance

import pandas as pd
import pytest
from synthetic_correct import write_answers

from featcal.files import write_json
from featcal.merging.registry import method_named, method_names
from pipeline import RESULTS, read_rows
from reproduction.report import paper
from reproduction.report.evidence import Evidence
from reproduction.report.pages import (
    cost,
    default,
    differences,
    field,
    gain,
    language,
    real_models,
    sweeps,
)
from reproduction.report.statistics import bits, estimate, lead
from reproduction.report.tables import row_name, rows_of
from reproduction.results import CANDIDATES, DEFAULT, EXTRAPOLATION, write_rows


def line(page, start):
    """Return the cells of the line of a table that begins with some words."""
    return next(text for text in page.text.splitlines() if text.startswith(start)).split("  ")


def test_every_method_of_the_field_has_its_facts():
    methods = field.METHODS
    after = (*field.AFTER, *field.INFERRED, *field.TRAINED)
    assert set(methods) == {*method_names(), "swudi", *after, field.TANGENT}
    facts = paper.packaged("field.yaml")
    references = facts["references"]
    assert {mark for entry in methods.values() for mark in entry.marks} <= set(facts["marks"])
    assert len(references) == 18 and {n for names in references for n in names} <= set(methods)
    for name in method_names():
        needs = method_named(name).needs
        looks = methods[name].sees != field.NOTHING
        assert (looks, "H" in methods[name].marks) == ("batches" in needs, "head" in needs), name


def test_the_field_counts_what_each_way_raises(data):
    assert line(field.summary("mini"), "FeatCal  synthetic")[2] == "3 of 3"
    surgery = line(field.summary("mini"), "Surgery  synthetic")
    assert surgery[2:5] == ["2 of 3", "1", "-1.0 to +10.0"]
    assert line(field.summary("mini"), "FeatCal's default  synthetic")[4] == "+22.5 to +22.5"


def test_mergers_of_the_language_model_are_means_over_its_tasks_best_first():
    rows = pd.read_csv(RESULTS / "field/flan_t5_base-glue/field.csv")
    means = rows.groupby("upstream")["value"].mean().sort_values(ascending=False)
    lines = [row for row in field.language("mini").text.splitlines()[2:] if "validation" not in row]
    for text, (merger, value) in zip(lines, means.items(), strict=True):
        assert text.startswith(f"{field.METHODS[merger].name} ")
        assert text.split()[-1] == f"{value:.1f}"


@pytest.fixture
def invented(results):
    """Invented results of the default after two mergers: two tasks of 400 samples, two draws."""
    experiment = {"suite": "mini", "role": "clip_b32", "pool": 8}
    values = dict(
        average={"merged": 60, "paper": 70, "suite": 80, "auto": 79.5, "surgery": 65},
        tsv_merge={"merged": 80, "paper": 82, "suite": 75, "auto": 70, "surgery": 85},
    )
    seconds = {"paper": 2.0, "auto": 6.0, "surgery": 3.0, "prob_surgery": 4.0}
    rows, cost = [], []
    for (merger, scores), seed in product(values.items(), (42, 43)):
        draw = {"upstream": merger, "samples": 32, "seed": seed}
        cost.append(draw | {"seconds": seconds})
        for (name, value), task in product(scores.items(), ("mnist", "dtd")):
            other = name in ("merged", "surgery")
            model = {"method": name if other else "featcal", "setting": "" if other else name}
            model["candidate"] = {"auto": "stream 4", "surgery": "rank 4"}.get(name, "")
            score = {"task": task, "metric": "accuracy", "count": 400, "value": value}
            rows.append(experiment | draw | model | score)
    folder = results / "default/clip_b32-8"
    write_answers(folder / "default.csv", rows, DEFAULT)
    listed = {"upstream": "average", "method": "auto", "samples": 32, "seed": 42, "divergence": 0.1}
    tried = [{"candidate": "merged", "chosen": 0}, {"candidate": "stream 4", "chosen": 1}]
    candidates = [experiment | listed | candidate for candidate in tried]
    write_rows(folder / "default.candidates.csv", candidates, CANDIDATES)
    (folder / "run.json").write_text(json.dumps({"cost": cost, "host": {}}))
    return Evidence("mini", "clip_b32", "8")


def test_the_default_is_compared_with_the_best_fixed_setting_and_the_better_adapter(invented):
    case = default.Case(invented, "average", 32)
    _, error = lead(case.auto, case.merged)
    shown = {cell.split(" sd")[0] for cell in line(default.answer("mini"), "Simple Averaging")}
    assert {"79.5", "60.0", "70.0", f"+19.5 ± {error:.1f}"} <= shown
    assert case.fixed[0] == "tuned settings" and case.adapter[0] == "Surgery"
    assert line(default.expected("mini"), "CLIP")[1:] == ["2", "1", "1", "1", "1"]
    assert "image/svg+xml" in default.chosen("mini").bundle
    assert line(default.costs("mini"), "CLIP")[2:] == ["2", "6", "7"]


def test_a_choice_is_compared_with_what_another_draw_and_other_test_texts_may_do(results):
    effects = cost.choice_effects(Evidence("mini", "llama_3b", "mergebench"))
    assert [round(change, 6) for *_, change, _ in effects] == [-10.0, -0.5, 2.0]
    spread = 1 + 1 / 3  # the draws deviate by 1 around 80; unpaired, 400 texts of one task add
    for *_, reached, _, room in effects:
        most = spread + (80 * 20 + reached * (100 - reached)) / 400
        assert 2 * math.sqrt(spread) <= room < 2 * math.sqrt(most)
    path = results / "choices/llama_3b-mergebench/choices.csv"
    kept = [row for row in path.read_text().splitlines() if ",43," not in row and ",44," not in row]
    path.write_text("\n".join(kept) + "\n")
    one_draw = cost.choice_effects(Evidence("mini", "llama_3b", "mergebench"))
    assert one_draw == [], "one draw has no deviation"


def test_shares_and_drift_are_counted_by_hand(results):
    cells = line(gain.shares("mini"), "FeatCal  Task Arithmetic, tuned")
    assert cells[5] == "62"  # (80 − 64) / (90 − 64), of equal steps from task to task
    assert line(gain.drift_parts("mini"), "FeatCal  synthetic")[2:] == ["0.200", "0.150", "0.050"]


def test_margins_over_expert_seeds_have_the_error_of_test_texts_and_of_seeds():
    data = Evidence("mini", "minilm", "8")
    featcal, surgery = ("average", "featcal", "suite"), ("average", "surgery", "suite")
    # without the columns of further trainings, whose variance is counted by the seeds
    texts = (rows_of(data, key).filter(regex="^(?!value of)") for key in (featcal, surgery))
    left, right = map(estimate, texts)
    margins, others = [left.mean - right.mean], data.table("expert_seeds")
    for _, retrained in others[others["upstream"] == "average"].groupby("expert_seed"):
        means = retrained[retrained["setting"] == "suite"].groupby("method")["value"].mean()
        margins.append(means["featcal"] - means["surgery"])
    room = 2 * math.sqrt((lead(left, right)[1] / 2) ** 2 + variance(margins) / 3)
    cells = line(real_models.seeds("mini"), "w/ Surgery, smaller")
    assert len(margins) == 3 and cells[-1] == f"{sum(margins) / 3:+.1f} ± {room:.1f}"


def numbers_in(text):
    return [float(match) for match in re.findall(r"-?\d+(?:\.\d+)?", text)]


FACTS = [e for e in paper.errata() if e.facts and not e.id.endswith("_vintage")]


@pytest.mark.parametrize("entry", FACTS, ids=lambda e: e.id)
def test_facts_next_to_an_erratum_are_those_of_the_printed_tables(entry):
    row, frame = differences.printed_row(entry), paper.paper_table(entry.table, entry.model)
    if entry.kind == "average":
        assert numbers_in(entry.facts)[1] == round(row.drop(paper.AVERAGE).mean(), 2)
    elif entry.kind == "change":
        before = paper.paper_row(entry.table, entry.row[0], "merged", entry.model)
        cells = [(row[cell], before[cell], row[cell] - before[cell]) for cell in entry.cells]
        assert entry.facts == "; ".join(f"{a:.1f} − {b:.1f} = {c:.1f}" for a, b, c in cells)
    elif entry.kind == "rotated":  # shifted back, the row is like those that are not shifted
        key = ("rotated", entry.table, entry.model)
        shifted = [tuple(e.row) for e in paper.errata() if (e.kind, e.table, e.model) == key]
        others = frame.set_index(["upstream", "method"]).drop(index=shifted)
        profile = others.groupby("task")["value"].mean()
        gaps = [pd.Series(values)[list(entry.cells)] - profile for values in (row, entry.corrected)]
        before, after = (gap.std() for gap in gaps)
        assert numbers_in(entry.facts) == [round(before, 1), round(after, 1)] and after < before / 2
    elif entry.kind == "foreign":
        rows = frame.pivot(index=["upstream", "method"], columns="task", values="value")
        distances = (rows - row).drop(columns=paper.AVERAGE).abs().drop(index=tuple(entry.row))
        nearest = distances.mean(axis=1).idxmin()
        near = distances.loc[nearest]
        assert entry.facts.startswith(f"nearest row: {row_name(*nearest)}, {near.mean():.2f} apart")
        assert numbers_in(entry.facts)[-1] == round(near.max(), 1)
    elif entry.kind == "unattainable":
        for right, count, share in zip(*[iter(numbers_in(entry.facts))] * 3, strict=True):
            assert share == round(100 * right / count, 2)
    elif entry.kind == "reference":
        fitting = pd.Series(row.to_dict() | entry.corrected)
        means = [round(values.drop(paper.AVERAGE).mean(), 1) for values in (row, fitting)]
        assert numbers_in(entry.facts)[-2:] == means
    else:
        assert entry.kind == "contradiction" and " in Table " in entry.facts
    for value, number in re.findall(r"([\d.]+) in Table (\d+)", entry.facts):
        printed = paper.paper_row(f"table{number:0>2}", *entry.row, read=paper.corrected_table)
        assert float(value) == printed[entry.cells[0]]


@pytest.mark.parametrize(
    ("table", "others"), [("table01", ("table08", "table10")), ("table07", ("table09", "table11"))]
)
def test_another_vintage_is_reported_for_exactly_the_cells_that_differ(table, others):
    row, *rest = (paper.paper_row(name, "", "base") for name in (table, *others))
    row = row.drop("average")
    differing = {cell for cell in row.index if any(other[cell] != row[cell] for other in rest)}
    entry = next(e for e in paper.errata() if e.id == f"t{int(table[-2:])}_vintage")
    assert set(entry.cells) == differing
    listed = [float(cell.rpartition(" ")[2]) for cell in entry.facts.split(", ")]
    assert all(listed == other[list(entry.cells)].tolist() for other in rest)


BLENDS = {1.0: 0.0, 8.0: 6.0}  # what ρ adds
ORDERS = {"forward": 64.0, "sites": 65.0}
TASKS = ("mnist", "dtd")


@pytest.fixture
def study(results):
    """Two tasks of 400 samples; the anchor has 60 and loses 20 at the larger ρ."""
    shutil.rmtree(results / "sweep")
    folder = results / "extrapolation/clip_b32-8"
    models = [("anchor", "", 0.3, 1, 1e9, 60.0), ("anchor", "", 0.3, 8, 1e9, 40.0)]
    for (order, value), alpha, (rho, added) in product(ORDERS.items(), (0.3, 1), BLENDS.items()):
        models.append(("cell", order, alpha, rho, 0.01, value + added))
    models.append(("stream", "", 1, 8, "", 72.0))
    shared = {"suite": "mini", "role": "clip_b32", "pool": 8, "upstream": "task_arithmetic"}
    shared |= {"method": "featcal", "setting": "", "metric": "accuracy", "seed": 42, "count": 400}
    names = ("choice", "variant", "interpolation", "anchor_blend", "ridge", "value")
    named = (shared | dict(zip(names, model, strict=True)) for model in models)
    rows = [row | {"task": task, "divergence": 0.25} for row in named for task in TASKS]
    write_answers(folder / "extrapolation.csv", rows, EXTRAPOLATION)
    settings = {"orders": list(ORDERS), "interpolations": [0.3, 1.0], "blends": list(BLENDS)}
    write_json(folder / "extrapolation.settings.json", {"study": settings, "stream_blend": 8.0})
    return folder


def test_gains_of_rho_and_over_the_merged_model_are_paired_over_samples(study):
    page = sweeps.by_order("mini")
    cells = line(page, "site by site, α 0.3")
    assert cells[2:6] == ["65.0", "0.01", "71.0", "0.01"]
    rows = read_rows(study / "extrapolation.correct.csv")
    right = {}
    for row in rows:
        key = (row["choice"], row["variant"], row["interpolation"], float(row["anchor_blend"]))
        right[key, row["task"]] = bits(row["correct"], 400).astype(float)

    def noise(left, other):
        variances = [variance(100 * (right[left, t] - right[other, t])) / 400 for t in TASKS]
        return 2 * math.sqrt(sum(variances) / 4)

    cell = ("cell", "sites", "0.300000")
    assert cells[6] == f"+5.0 ± {noise((*cell, 1), ('anchor', '', '0.300000', 1)):.1f}"
    assert cells[7] == f"+6.0 ± {noise((*cell, 8), (*cell, 1)):.1f}"
    assert line(page, "anchor alone")[-1].startswith("-20.0 ±")


def test_the_table_shows_the_means_of_the_rows_in_git():
    rows = pd.read_csv(RESULTS / "scores/smollm2-chat/scores.csv")
    rows = rows[(rows["method"] == "merged") & (rows["upstream"] == "task_arithmetic")]
    means = rows.set_index("task")["value"]
    greedy = means.index.str.endswith("-greedy")
    unseen = means.index.str.startswith(("open_trivia", "subjectivity"))
    plain = means.index == "plain_text"
    parts = [~(greedy | unseen | plain), greedy & ~unseen, unseen & ~greedy, plain]
    shown = line(real_models.answers("mini"), "Task Arithmetic")[1:]
    for cell, part, digits in zip(shown, parts, (1, 1, 1, 2), strict=True):
        assert cell.startswith(f"{means[part].mean():.{digits}f}")


def test_every_expert_has_its_scores_on_all_tasks_and_its_change_against_the_base():
    rows = pd.read_csv(RESULTS / "scores/smollm2-chat/scores.csv", keep_default_na=False)
    rows = rows[~rows["task"].str.endswith("-greedy") & (rows["task"] != "plain_text")]
    table = rows.set_index(["method", "setting", "task"])["value"].sort_index()
    base, clickbait, others = table["base", ""], table["expert", "clickbait"], table["expert", ""]
    shown = line(language.real_experts("mini"), "Clickbait")[1:-1]
    assert sorted(shown) == sorted(f"{accuracy:.1f}" for accuracy in clickbait)
    assert clickbait["clickbait"] == others["clickbait"]
    gain = clickbait - base
    means = [gain["clickbait"], gain.drop("clickbait").mean()]
    cells = line(language.won_and_lost("mini"), "Clickbait")
    assert [cells[-4], cells[-2]] == [f"{accuracy:+.1f}" for accuracy in means]
