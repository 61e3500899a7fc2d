"""What a list of modules names equals the oracle; everything else keeps the merged model's bits."""

import json

import plain
import pytest
import torch
from families import FAMILIES, experiment, without_float32
from test_cli import CALIBRATE, models, ready, refused  # noqa: F401 - fixtures
from tiny import PAPER, difference, same_bits

from featcal import Calibration, calibrate
from featcal.cli import main as cli
from featcal.errors import UnknownKey

LINEARS = PAPER.but(norm=False)
NORMS = ("input_layernorm", "post_attention_layernorm")
CASES = [
    ("t5", LINEARS, ("q", "v"), ()),
    *[  # the encoder has none, and is passed as it is
        ("t5", LINEARS.but(order=order), ("EncDecAttention.k",), ())
        for order in ("forward", "sites")
    ],
    ("t5_gated", LINEARS, ("wi_0", "wi_1", "wo"), ()),
    ("llama", LINEARS, ("q_proj", "k_proj", "v_proj", "o_proj"), ()),
    ("llama", PAPER, ("q_proj", "v_proj"), NORMS),  # which are solved whatever the list says
]


@pytest.mark.parametrize(("family", "settings", "modules", "norms"), CASES)
def test_what_is_named_equals_the_oracle_and_the_rest_keeps_the_merged_bits(
    family, settings, modules, norms, monkeypatch
):
    given, family = experiment(FAMILIES[family]), FAMILIES[family]
    without_float32(monkeypatch, given["base"])
    settings = settings.but(modules=modules)
    expected = plain.calibrate(**given, settings=settings, paths=family.stacks.values())
    result = calibrate(**given, settings=settings).model
    assert difference(result, expected) < 1e-9
    before = dict(given["merged"].named_parameters())
    changed = {name for name, p in result.named_parameters() if not torch.equal(p, before[name])}
    ends = tuple(f".{module}.weight" for module in (*modules, *norms))
    assert changed == {name for name in before if name.endswith(ends)}


@pytest.mark.parametrize("order", ["forward", "stale"])
def test_the_list_of_all_linears_gives_the_bits_of_no_list(order):
    given = experiment(FAMILIES["llama"], torch.float32)
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    whole, listed = (
        calibrate(**given, settings=PAPER.but(order=order, modules=m)).model for m in (None, every)
    )
    assert same_bits(whole, listed)


def test_a_name_that_no_linear_has_is_refused_with_the_nearest_one():
    given = experiment(FAMILIES["llama"], torch.float32)
    with pytest.raises(UnknownKey, match="calibrate.modules: 'q_prj'.*did you mean 'q_proj'"):
        calibrate(**given, settings=PAPER.but(modules=("q_prj",)))
    with pytest.raises(UnknownKey, match="'proj' is not known"):  # not the last letters of a name
        calibrate(**given, settings=PAPER.but(modules=("q_proj", "proj")))


def test_the_command_takes_names_and_refuses_an_unknown_one(models, capsys):  # noqa: F811
    needed, few = [], ["--set", "modules=q_proj,fc1"]
    for more in ([], few):
        assert cli.main([*CALIBRATE, "--dry-run", "--json", *more]) == 0
        needed.append(json.loads(capsys.readouterr().out)["needs"]["operations"]["solves"])
    assert 0 < needed[1] < needed[0]
    wrong = [*CALIBRATE, "--dry-run", "--set", "modules=q_prj"]
    assert "did you mean 'q_proj'" in refused(wrong, models, capsys)
    assert cli.main([*CALIBRATE, *few]) == 0
    settings = json.loads((models / "new/featcal.json").read_text())["settings"]
    assert settings["modules"] == ["q_proj", "fc1"]
