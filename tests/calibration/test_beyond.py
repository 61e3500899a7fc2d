"""What goes beyond the paper: residual writers are found in every family, choices are the best on
samples held out, limits.
"""

import copy
from dataclasses import replace

import families
import pytest
import torch
from families import FAMILIES
from test_resume import deep, finished, killed_behind
from test_streaming import written
from tiny import PAPER, clip, difference, experiment, same_bits, shifted

from featcal import calibrate
from featcal.blocks.attention import received
from featcal.calibration.choice import GRID
from featcal.calibration.drift import model_drift
from featcal.core.weighting import every_token
from featcal.errors import BadBatches, BadSetting
from featcal.merging.wudi import Interference
from featcal.models.load import load_as_calibrated
from featcal.settings import Calibration

ALL = Calibration(
    ridge=1e-3,
    anchor_blend=1.0,
    interpolation="auto",
    order="sites",
    residual=(0.5, 1.0),
    affine="joint",
    prior=0.1,
    no_harm=True,
    weights="attention",
)
# every linear whose output is added to the stream, of the first block
WRITERS = {
    "clip_text": ("self_attn.out_proj", "mlp.fc2"),
    "bert": ("attention.output.dense", "output.dense"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "t5_encoder": ("layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"),
    "vit": ("attention.o_proj", "mlp.fc2"),
    "opt": ("self_attn.out_proj", "fc2"),
}


def shallow(dtype):
    return clip(dtype=dtype, num_hidden_layers=1)


def one_block(count=20):
    return experiment(build=shallow, count=count) | {"token_weights": every_token}


def without_held_out(batches):
    """The samples that a calibration that holds some out solves with, and those it does not."""
    x = torch.cat([batch["pixel_values"] for batch in batches])
    held = torch.arange(len(x)) % 8 == 1
    return [{"pixel_values": x[~held]}], [{"pixel_values": x[held]}]


def held_out_drift(model, given):
    """What the choices look at: the mean over tasks of the squared relative drift behind the only
    block.
    """
    found = [
        model_drift(model, expert, without_held_out(given["batches"][task])[1])[-1][
            "relative_drift"
        ]
        ** 2
        for task, expert in given["experts"].items()
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize("family", WRITERS)
def test_only_the_targets_of_linears_that_write_into_the_residual_stream_change(family):
    given = families.experiment(FAMILIES[family])
    path = next(iter(FAMILIES[family].stacks.values()))
    paper, residual = (
        calibrate(**given, settings=replace(PAPER, residual=beta)).model for beta in (0.0, 1.0)
    )
    first = (
        dict(model.get_submodule(f"{path}.0").named_parameters()) for model in (paper, residual)
    )
    changed = {
        name.rpartition(".")[0]
        for (name, p), q in zip(next(first).items(), next(first).values(), strict=True)
        if not torch.equal(p, q)
    }
    assert changed == set(WRITERS[family])


@pytest.mark.parametrize(
    "family", ["gemma2", "dinov2"]
)  # outputs are normed or scaled before they are added
def test_models_without_such_linears_are_refused(family):
    with pytest.raises(BadSetting, match=r"calibrate\.residual"):
        calibrate(**families.experiment(FAMILIES[family]), settings=replace(PAPER, residual=1.0))


def test_residual_target_lessens_the_lag_of_a_stream_that_comes_in_wrong():
    given = one_block(count=400)
    task = next(iter(given["experts"]))
    given |= {part: {task: given[part][task]} for part in ("experts", "batches")}
    lagging = shifted(
        given["merged"], 5
    )  # its embeddings, which are not calibrated, are not the expert's
    settings = replace(PAPER, ridge=1e-10, anchor_blend=1.0, interpolation=1.0, order="sites")
    drift = [
        calibrate(**given | {"merged": lagging}, settings=replace(settings, residual=beta))
        .blocks[0]
        .relative_drift
        for beta in (0.0, 0.5, 1.0)
    ]
    assert drift[2] < drift[1] < drift[0]


def test_chosen_interpolation_is_the_one_of_five_that_is_best_on_samples_held_out():
    given = one_block()
    kept = given | {
        "batches": {
            task: without_held_out(batches)[0] for task, batches in given["batches"].items()
        }
    }
    candidates = [
        calibrate(**kept, settings=replace(PAPER, interpolation=alpha)).model for alpha in GRID
    ]
    best = min(candidates, key=lambda model: held_out_drift(model, given))
    assert (
        difference(calibrate(**given, settings=replace(PAPER, interpolation="auto")).model, best)
        < 1e-12
    )


def test_step_taken_is_the_one_of_five_that_is_best_on_samples_held_out():
    given = one_block()
    kept = given | {
        "batches": {
            task: without_held_out(batches)[0] for task, batches in given["batches"].items()
        }
    }
    settings = replace(PAPER, ridge=1e-6, interpolation=1.0)  # too bold for so few samples
    whole = calibrate(**kept, settings=settings).model
    found = calibrate(**given, settings=replace(settings, no_harm=True)).model
    between = []
    for share in GRID:
        model = calibrate(**kept, settings=settings).model
        with torch.no_grad():
            for p, merged, solved in zip(
                model.parameters(), given["merged"].parameters(), whole.parameters(), strict=True
            ):
                p.copy_(merged.lerp(solved, share))
        between.append(model)
    best = min(between, key=lambda model: held_out_drift(model, given))
    assert difference(found, best) < 1e-9 and difference(found, whole) > 1e-4


@pytest.mark.parametrize("order", ["forward", "sites"])
def test_no_harm_leaves_a_merged_model_that_is_the_expert_to_the_bit(order):
    given = one_block()
    expert = given["experts"]["dtd"]
    given |= {"merged": expert, "experts": dict.fromkeys(given["experts"], expert)}
    settings = replace(PAPER, order=order)
    assert (
        difference(calibrate(**given, settings=settings).model, expert) > 1e-3
    )  # the anchor pulls away
    assert same_bits(calibrate(**given, settings=replace(settings, no_harm=True)).model, expert)


def test_overwhelming_prior_with_the_base_as_anchor_is_wudi_in_closed_form():
    given = one_block()
    settings = Calibration(ridge=1e-9, anchor_blend=0.0, interpolation=1.0, prior=1e6)
    model = calibrate(**given, settings=settings).model
    for name in ("self_attn.out_proj", "mlp.fc1"):
        base, found, *theirs = (
            m.encoder.layers[0].get_submodule(name).weight.detach()
            for m in (given["base"], model, *given["experts"].values())
        )
        torch.testing.assert_close(
            found - base, Interference.of([w - base for w in theirs]).minimum(), rtol=0, atol=1e-5
        )


def test_everything_together_streamed_interrupted_and_resumed_gives_the_bits_of_one_run_in_memory(
    tmp_path, monkeypatch
):
    given = experiment(torch.float32, build=deep, count=20)
    in_memory = calibrate(**given, settings=ALL).model
    folders = written(given, tmp_path)
    killed_behind(monkeypatch, 2, tmp_path / "out", folders, ALL)
    _, lines = finished(tmp_path / "out", folders, ALL, host_memory=0)
    assert [line.endswith("(solved before)") for line in lines] == [True, True, False, False]
    assert same_bits(load_as_calibrated(tmp_path / "out"), in_memory)


def test_presets_are_the_papers_settings_and_those_beyond_it_with_any_value_changed():
    assert Calibration.preset("paper") == PAPER
    best = Calibration.preset("best", {"ridge": 1e-3})
    assert (best.residual, best.order, best.ridge) == (1.0, "sites", 1e-3)
    with pytest.raises(BadSetting, match="paper or best"):
        Calibration.preset("better")


def test_combinations_without_meaning_and_too_few_samples_are_refused():
    alone = (
        {"bias": False, "affine": "joint"},
        {"order": "stale", "no_harm": True},
        {"residual": (0.0, 2.0)},
        {"sweeps": 0},
    )
    for wrong in (
        *alone,
        {"order": "stale", "sweeps": 2},
        {"order": "sites", "sweeps": 2},
        {"shrinkage": "ledoit_wolf", "prior": 0.1},
    ):
        with pytest.raises(BadSetting):
            replace(PAPER, **wrong)
    with pytest.raises(BadBatches, match="one sample"):
        calibrate(**experiment(count=1), settings=replace(PAPER, no_harm=True))


def test_second_sweep_begins_at_the_first_ones_model_and_keeps_the_anchor():
    given, settings = one_block(), replace(PAPER, residual=1.0)
    found = calibrate(**given, settings=replace(settings, sweeps=2)).model
    once = calibrate(**given, settings=settings).model
    base = copy.deepcopy(
        given["base"]
    )  # the base whose anchor from the calibrated weights is that of the merged ones, at ρ = 2
    with torch.no_grad():
        for p, first, merged in zip(
            base.parameters(), once.parameters(), given["merged"].parameters(), strict=True
        ):
            p += 2 * (first - merged)
    twice = calibrate(**given | {"merged": once, "base": base}, settings=settings).model
    assert difference(found, twice) < 1e-9 and difference(found, once) > 1e-6


def test_as_many_sweeps_as_a_block_has_parts_solve_its_sites_in_turn():
    given = experiment(build=deep, count=20)
    sites = calibrate(**given, settings=replace(PAPER, order="sites")).model
    gaps = [
        difference(calibrate(**given, settings=replace(PAPER, sweeps=n)).model, sites)
        for n in (1, 3, 6)
    ]
    assert gaps[2] < 1e-9 < gaps[1] < gaps[0]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_tokens_count_by_what_they_receive_in_the_experts_attention(implementation):
    given = one_block(count=3)
    task, expert = next(iter(given["experts"].items()))
    for model in (given["merged"], given["base"], expert):
        model.set_attn_implementation(implementation)
    given |= {"experts": {task: expert}, "batches": {task: given["batches"][task]}}
    twin = copy.deepcopy(expert)
    twin.set_attn_implementation("eager")
    told = twin(**given["batches"][task][0], output_attentions=True).attentions[
        0
    ]  # (batch, heads, queries, keys)
    share = told.mean((1, 2)) * told.shape[-1]
    found = calibrate(**given, settings=replace(PAPER, weights="attention")).model
    expected = calibrate(
        **given | {"token_weights": lambda module, last, shape: share.detach()}, settings=PAPER
    ).model
    rounding = 1e-6  # of softmax, which the eager attention computes in float32
    assert (
        difference(found, expected)
        < rounding
        < difference(found, calibrate(**given, settings=PAPER).model)
    )


@pytest.mark.parametrize("family", ["bert", "llama", "gemma2", "t5"])
def test_attention_is_found_in_every_kind_of_block(family):
    given = families.experiment(FAMILIES[family])
    found, paper = (
        calibrate(**given, settings=replace(PAPER, weights=weights)).model
        for weights in ("attention", "rule")
    )
    assert difference(found, paper) > 1e-6


def test_blocks_that_show_no_attention_from_token_to_token_are_refused():
    hidden, windows = torch.zeros(2, 16, 8), torch.full((8, 4, 4), 0.25)  # of four tokens each
    for seen in ([], [windows]):
        with pytest.raises(BadSetting, match=r"calibrate\.weights"):
            received("vision.00", seen, hidden, None, None, None)


def test_ridge_of_every_site_comes_from_its_tokens_and_is_left_for_norms():
    given = one_block(count=40)
    settings = replace(PAPER, shrinkage="ledoit_wolf")
    found, other = (
        calibrate(**given, settings=replace(settings, ridge=ridge)).model for ridge in (0.05, 0.5)
    )
    for (name, p), q in zip(found.named_parameters(), other.parameters(), strict=True):
        if ".layers." in name:
            assert torch.equal(p, q) == ("norm" not in name)
