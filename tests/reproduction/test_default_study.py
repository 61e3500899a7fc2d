"""The study of the default: adapters tuned on the samples that auto uses."""

from types import SimpleNamespace

import pytest
import torch
from tiny import experiment
from torch.nn.functional import kl_div, log_softmax, normalize

from featcal.baselines.corrections import Surgery
from featcal.baselines.training import pool_features
from featcal.calibration import choose
from featcal.settings import Calibration
from reproduction.studies import default
from reproduction.studies.default import NO_ADAPTER, Case, DefaultStudy

PAPER = Calibration()
COUNT = 16


@pytest.fixture
def cell():
    arguments = experiment(torch.float32, count=COUNT, batch=8)
    settings = {"mergers": {"average": {}}, "draws": [(COUNT, 1)], "batch": 8, "rank": [2, 4]}
    settings |= {"hidden": [4], "lr": [1e-3, 1e-2], "steps": [3, 9]}
    settings |= {"role": "clip_b32", "pool": 8, "paper": PAPER, "suite": PAPER}
    context = SimpleNamespace(device=torch.device("cpu"))
    setup = SimpleNamespace(of_texts=False, context=context, projection=lambda: None)
    pairs = pool_features(arguments["merged"], arguments["experts"], arguments["batches"])
    width, draws = pairs["mnist"].merged.shape[1], torch.Generator().manual_seed(0)
    heads = {task: 10 * torch.randn(5, width, generator=draws) for task in pairs}
    study = DefaultStudy.from_mapping(settings, "default")
    models = (arguments["base"], arguments["experts"], arguments["merged"])
    return Case(setup, study, *models, arguments["batches"], pairs, heads, seed=1)


@pytest.mark.parametrize("file", ["code.py", "model-00001-of-00002.safetensors"])
def test_draws_of_other_code_or_experts_are_not_taken_over(cell, tmp_path, monkeypatch, file):
    monkeypatch.setattr(default, "LIBRARY", tmp_path)
    context, stores = SimpleNamespace(unfinished=str), set()
    for content in ("one", "one", "other"):
        (tmp_path / file).write_text(content)
        stores.add(cell.study.store(SimpleNamespace(experts={"a": tmp_path}, context=context)))
    assert len(stores) == 2


def test_adapters_are_trained_on_what_auto_keeps_and_chosen_on_what_it_holds_out(cell):
    chosen, divergence = cell.tuned("surgery")
    assert len(divergence) == 2 * 2 * 2 + 1
    held_out = {task: cell.last_and_held_out(task)[1] for task in cell.pairs}
    assert all(mask.sum() == COUNT / 4 for mask in held_out.values())
    training = {t: choose.Part(samples, ~held_out[t]) for t, samples in cell.batches.items()}
    expected, trials = {NO_ADAPTER: None}, {}
    for rank in (2, 4):
        for lr in (1e-3, 1e-2):
            for steps in (3, 9):
                pairs = pool_features(cell.merged, cell.experts, training)
                trial = Surgery(rank=rank, lr=lr, steps=steps)
                name = f"rank {rank}, rate {lr:g}, {steps} steps"
                expected[name], trials[name] = trial.fit(pairs, cell.seed), trial
    for name, adapters in expected.items():
        kl = []
        for task, pair in cell.pairs.items():
            features = adapters.apply(task, pair.merged) if adapters else pair.merged
            rows = (normalize(f[held_out[task]]) for f in (features, pair.expert))
            log_p, log_q = (log_softmax(f @ cell.heads[task].T, dim=1) for f in rows)
            kl.append(kl_div(log_p, log_q, reduction="batchmean", log_target=True))
        assert divergence[name] == pytest.approx(float(torch.stack(kl).mean()), rel=1e-4), name
    name = min(divergence, key=divergence.get)
    last = trials[name].fit(cell.pairs, cell.seed)  # few samples: all of them
    for task in cell.pairs:
        for name, weight in last.of(task).items():
            torch.testing.assert_close(chosen.of(task)[name], weight, rtol=1e-5, atol=1e-7)
