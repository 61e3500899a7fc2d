"""Tuning without labels: held-out samples, divergences, proposals, and resumed searches."""

from dataclasses import replace

import pytest
import torch
from families import FAMILIES
from tiny import PAPER, averaged, experiment, images, make, same_bits, shifted

import featcal
from featcal.errors import BadBatches, BadSetting
from featcal.tuning import tune as module
from featcal.tuning.search import Candidate, Search, best, grid_point, proposals, split
from featcal.tuning.tune import RIDGES, path_gains, ridge_of, task_divergence

pytest.importorskip("optuna")


def candidate(number, mean, **changed):
    return Candidate(number, "search", PAPER.but(**changed), {"a": mean})


def of_family(name):
    """Arguments of `tune` for a family of text models."""
    family, base = FAMILIES[name], make(FAMILIES[name].build)
    experts = {task: shifted(base, 10 + i) for i, task in enumerate(("a", "b"))}
    batches = {task: family.batches(20 + i) for i, task in enumerate(experts)}
    return {
        "merged": averaged(list(experts.values())),
        "base": base,
        "experts": experts,
        "batches": batches,
    }


def test_a_share_of_the_samples_is_held_out_and_none_is_lost():
    kept, held_out = split("mnist", images(1, count=10, batch=4), 0.3, 42)
    assert [sum(len(b["pixel_values"]) for b in part) for part in (kept, held_out)] == [7, 3]
    rows = torch.cat([b["pixel_values"] for b in (*kept, *held_out)])
    expected = torch.cat([b["pixel_values"] for b in images(1, count=10, batch=4)])
    assert {float(row.sum()) for row in rows} == {float(row.sum()) for row in expected}
    again = split("mnist", images(1, count=10, batch=4), 0.3, 42)[1]
    assert all(
        torch.equal(a["pixel_values"], b["pixel_values"])
        for a, b in zip(held_out, again, strict=True)
    )


def test_one_sample_cannot_be_split():
    with pytest.raises(BadBatches, match="two are needed"):
        split("mnist", images(1, count=1), 0.5, 0)


def test_divergence_of_images_is_the_mean_over_rows_and_zero_for_the_expert_itself():
    given = experiment()
    expert, other = given["experts"]["mnist"], given["experts"]["dtd"]
    pixels, heads = images(5, count=6, batch=4), torch.randn(7, 32, dtype=torch.float64)
    assert task_divergence("mnist", expert, expert, pixels) == pytest.approx(0, abs=1e-12)
    assert task_divergence("mnist", expert, expert, pixels, scores=heads) == pytest.approx(
        0, abs=1e-12
    )
    with torch.no_grad():
        f, g = (
            m(pixel_values=torch.cat([b["pixel_values"] for b in pixels])).pooler_output
            for m in (other, expert)
        )
    f, g = (x / x.norm(dim=1, keepdim=True) for x in (f, g))
    assert task_divergence("mnist", other, expert, pixels) == pytest.approx(
        float((1 - (f * g).sum(1)).mean())
    )
    p, q = ((x @ heads.T).softmax(1) for x in (f, g))
    assert task_divergence("mnist", other, expert, pixels, scores=heads) == pytest.approx(
        float((q * (q / p).log()).sum(1).mean())
    )


def test_divergence_of_text_ignores_padding_and_the_number_of_scores_at_once(monkeypatch):
    given = of_family("llama")
    ours, theirs = given["merged"], given["experts"]["a"]
    batches = given["batches"]["a"]
    with torch.no_grad():
        both = [
            [m(**b).logits[b["attention_mask"].bool()].log_softmax(-1) for b in batches]
            for m in (ours, theirs)
        ]
    p, q = (torch.cat(part) for part in both)
    expected = float((q.exp() * (q - p)).sum(-1).mean())
    assert task_divergence("a", ours, theirs, batches) == pytest.approx(expected)
    monkeypatch.setattr("featcal.calibration.answers.SCORES_AT_ONCE", 200)
    assert task_divergence("a", ours, theirs, batches) == pytest.approx(expected)


def test_proposals_begin_with_the_start_and_the_path_and_depend_on_earlier_rounds_only():
    search = Search(trials=12, seed=3)
    first = proposals(search, range(0, 4), PAPER, 1e-3, [])
    assert [one.origin for one in first] == ["start", "path", "search", "search"]
    assert first[0].settings == PAPER and first[1].settings == PAPER.but(ridge=1e-3)
    assert len({one.settings for one in first}) == 4
    known = [candidate(n, n / 10, ridge=10.0 ** -(n % 5)) for n in range(8)]
    assert proposals(search, range(8, 10), PAPER, 1e-3, known) == proposals(
        search, range(8, 10), PAPER, 1e-3, known
    )
    assert proposals(search, range(8, 10), PAPER, 1e-3, known) != proposals(
        Search(seed=4), range(8, 10), PAPER, 1e-3, known
    )


def test_anchor_blends_are_searched_on_a_logarithmic_scale():
    tried = proposals(Search(trials=60), range(2, 60), PAPER, 1e-3, [])
    anchors = sorted(one.settings.anchor_blend for one in tried)
    assert anchors[0] < 0.5 and anchors[-1] > 12 and anchors[14] < 1.5 < 2 < anchors[29] < 5
    known = [PAPER.but(anchor_blend=rho) for rho in (0.0, 3.0, 15.0, 40.0)]
    assert [round(grid_point(one)["log_blend"], 6) for one in known] == [0.0, 2.0, 4.0, 4.0]


def test_the_best_candidate_has_the_smallest_divergence_and_the_first_of_equals_wins():
    assert best([candidate(0, 0.2), candidate(1, 0.1), candidate(2, 0.1)]).number == 1


def test_the_path_ridge_has_the_largest_gain_over_all_sites():
    low, high = torch.zeros(len(RIDGES)), torch.zeros(len(RIDGES))
    low[3], high[3], high[9] = 1.0, 80.0, 100.0
    assert ridge_of({"a": low, "b": high}) == RIDGES[3]
    assert ridge_of({"a": -low - 1}) == RIDGES[-1]


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_the_path_measures_every_site_once(name):
    given = experiment() if name == "clip" else of_family(name)
    batches = given.pop("batches")
    gains = path_gains(
        given["merged"],
        given["base"],
        given["experts"],
        batches,
        batches,
        PAPER.but(norm=name == "clip"),
    )
    assert len(gains) == {"clip": 9, "t5": 2 * 4 + 2 * 7, "llama": 8}[name]
    assert all(
        gain.shape == (len(RIDGES),) and torch.isfinite(gain).all() for gain in gains.values()
    )
    assert all(
        gain[0] >= gain[-1] for gain in gains.values()
    )  # on the samples that were solved for, the smallest fits best


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_the_chosen_candidate_is_nearest_to_the_experts_and_models_are_not_changed(name):
    given = experiment(count=8, batch=4) if name == "clip" else of_family(name)
    before = [shifted(model, 0, 0.0) for model in (given["merged"], *given["experts"].values())]
    tuned = featcal.tune(**given, settings=PAPER.but(norm=name == "clip"), trials=3, seed=1)
    assert tuned.settings == min(tuned.candidates, key=lambda one: one.mean).settings
    assert [one.number for one in tuned.candidates] == [0, 1, 2]
    assert set(tuned.candidates[0].divergence) == set(given["experts"])
    assert all(
        same_bits(a, b)
        for a, b in zip(before, (given["merged"], *given["experts"].values()), strict=True)
    )


def test_an_interrupted_search_resumes_exactly_and_ignores_the_file_of_another_search(
    tmp_path, monkeypatch
):
    given, file, lines = experiment(count=4), tmp_path / "trials.json", []
    whole = featcal.tune(**given, settings=PAPER, trials=5)

    def stop(text):
        lines.append(text)
        if len(lines) == 4:  # the path and three trials
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        featcal.tune(**given, settings=PAPER, trials=5, kept_in=file, progress=stop)
    calls = []
    calibrate = featcal.calibrate
    monkeypatch.setattr(
        module, "calibrate", lambda *a, **k: (calls.append(1), calibrate(*a, **k))[1]
    )
    assert (
        featcal.tune(**given, settings=PAPER, trials=5, kept_in=file).candidates == whole.candidates
    )
    assert len(calls) == 2
    featcal.tune(**given, settings=PAPER.but(bias=False), trials=2, kept_in=file)
    assert len(calls) == 4


def test_impossible_searches_are_refused():
    given = experiment()
    with pytest.raises(BadSetting, match="trials"):
        featcal.tune(**given, settings=PAPER, trials=0)
    with pytest.raises(BadSetting, match="holdout"):
        featcal.tune(**given, settings=PAPER, holdout=1.0)
    with pytest.raises(BadSetting, match="every task; dtd has none"):
        featcal.tune(**given, settings=PAPER, heads={"mnist": torch.ones(2, 32)})
