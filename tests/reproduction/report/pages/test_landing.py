"""The landing page: its averages recomputed by plain pandas, its words by hand, the paper's column by counting."""

import pandas as pd
import pytest

from pipeline import RESULTS, ROOT
from reproduction.report.pages import landing
from reproduction.report.statistics import Estimate

PRINTED = ROOT / "reproduction" / "report" / "paper_tables"
FILES = {
    "ViT-S/14": "scores/vit_s-8/scores.csv",
    "MiniLM": "scores/minilm-8/scores.csv", "MPNet": "second_encoder/minilm-8/second_encoder.csv",
    "CLIP, smaller": "scores/clip_b32-8/scores.csv", "CLIP, larger": "scores/clip_l14-8/scores.csv",
    "T5, smaller": "scores/flan_t5_base-glue/scores.csv", "T5, larger": "scores/flan_t5_large-glue/scores.csv",
    "SmolLM2": "scores/smollm2-chat/scores.csv",
    "Llama, smaller": "scores/llama_3b-mergebench/scores.csv", "Llama, larger": "scores/llama_8b-mergebench/scores.csv",
}  # fmt: skip
STUDIED = {"MPNet": "mpnet-8"}
MERGERS = {name: key for key, name in landing.MERGERS.items()}


def means(file):
    """Return averages over tasks (of chats the experts'), then seeds, by upstream, method and setting."""
    if not (RESULTS / file).is_file():
        return {}
    rows = pd.read_csv(RESULTS / file, keep_default_na=False)
    if file == FILES["SmolLM2"]:
        tasks = set(rows[(rows["method"] == "expert") & (rows["setting"] == "")]["task"])
        rows = rows[rows["task"].isin({task for task in tasks if "-greedy" not in task})]
    if "default" in file:
        rows = rows[rows["samples"] == 32]  # which the page names
    model = ["upstream", "method", "setting"]
    result = dict(rows.groupby([*model, "seed"])["value"].mean().groupby(model).mean())
    if "llama" in file:  # of each test the highest of base and experts
        models = rows[rows["method"].isin(["base", "expert"])]
        result["", "expert", ""] = models.groupby("task")["value"].max().mean()
    return result


def test_every_average_is_that_of_the_files():
    lines = landing.averages("mini").text.splitlines()[2:]
    assert len(lines) > 20
    for line in lines:
        name, merger, *cells = (cell.strip() for cell in line.split("  ") if cell.strip())
        scores, upstream = means(FILES[name]), MERGERS[merger]
        study = means(f"default/{STUDIED.get(name, FILES[name].split('/')[1])}/default.csv")
        keys = [(upstream, a, s) for a in landing.ADAPTERS for s in ("suite", "paper")]
        as_run = [scores.get(key, 0) for key in keys]
        tuned = [study.get((upstream, a, ""), 0) for a in landing.ADAPTERS]
        merged = upstream, "merged", ""
        expected = [scores.get(merged) or study[merged], scores.get((upstream, "featcal", "paper"))]
        expected += [study.get((upstream, "featcal", "auto")), max(as_run) or None]
        expected += [max(tuned) or None, scores.get(("", "expert", ""))]
        shown = [None if cell == "–" else float(cell) for cell in cells if cell[:2] != "sd"]
        assert shown == [value and pytest.approx(value, abs=0.0501) for value in expected], line


@pytest.mark.parametrize(
    ("gaps", "word", "counts"),
    [
        ((3, 2), "yes", "2 · 0 · 2"), ((3, 2, 0.5), "mostly", "2 · 0 · 3"), ((3, 0.5, -0.5), "unclear", "1 · 0 · 3"),
        ((3, -3, 0), "sometimes", "1 · 1 · 3"), ((-3, 0.5), "no", "0 · 1 · 2"), ((0.5, -0.5), "unclear", "0 · 0 · 2"),
    ],
)  # fmt: skip
def test_a_word_needs_two_standard_errors(gaps, word, counts):
    """Two standard errors of a difference are 2·√(0.125 + 0.125) = 1 point here."""
    means = [Estimate(80.0 + gap, None, 0, known_variance=0.125) for gap in (0, *gaps)]
    pairs = [(mean, means[0]) for mean in means[1:]]
    assert landing.verdict_cell(pairs) == f"<strong>{word}</strong><small>{counts}</small>"


def test_the_default_s_time_is_compared_on_all_four_real_models():
    *_, kept = landing.measured_pairs(landing.models("mini")["Real models"], "auto").values()
    assert len(kept) == 4 * len(landing.ADAPTERS)


def test_few_samples_are_those_of_each_model_s_own_study():
    for model in landing.models("mini")["Real models"]:
        study = next(iter(model.defaults.values())).data.folder_of("default")
        rows = pd.read_csv(study / "default.csv", keep_default_na=False)
        few = rows[(rows["samples"] == 8) & rows["setting"].isin(["", "auto"])]
        means = dict(few.groupby(["upstream", "method"])["value"].mean())
        leads = [means[m, "featcal"] - means[m, a] for m, a in means if a in landing.ADAPTERS]
        shown = [first.mean - second.mean for first, second in model.few_sample_pairs("auto")]
        assert sorted(shown) == pytest.approx(sorted(leads)), model.name


@pytest.mark.parametrize(("covered", "weak"), [(49.9, True), (50.0, False), (None, True)])
def test_a_merger_is_weak_below_half_of_the_way(covered, weak):
    assert landing.is_weak(covered) == weak


def test_the_papers_column_counts_the_rows_of_its_tables():
    """Every block with FeatCal stands once in some printed table, and names a merger and both adapters."""
    blocks = 0
    for number in ("01", "03", "04", "07", "08", "09", "10", "11"):
        rows = pd.read_csv(PRINTED / f"table{number}.csv")
        featcal_rows = rows[(rows["column"] == "Avg.") & (rows["method"] == "featcal")]
        blocks += len(featcal_rows.drop_duplicates(["model", "upstream"]))
    weak, strong, adapters, *_ = landing.printed_pairs().values()
    assert len(weak) + len(strong) == blocks and len(adapters) == 2 * blocks
    assert all(featcal.mean > merged.mean for featcal, merged in weak + strong)
