"""Model cards of result folders: the hub's own reader takes them, licences are inherited or their
conflict told.
"""

import json
from pathlib import Path

import checkpoints
import pytest
from huggingface_hub import ModelCard
from test_cli import CALIBRATE, DATA, EVALUATE, EXPERTS, MERGE, models, ready  # noqa: F401 - two fixtures

from featcal.card import card, front_matter, inherited
from featcal.cli import main as cli


def licence(folder: Path, front: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(f"---\n{front}\n---\n# A model\n")
    return folder


def test_the_card_says_what_featcal_json_says_and_holds_no_path(models):  # noqa: F811
    assert cli.main([*MERGE[:-1], "fused"]) == 0
    assert cli.main(["calibrate", "--merged", "fused", *CALIBRATE[3:]]) == 0
    card = ModelCard.load(models / "new/README.md")
    assert card.data.tags == ["merge", "featcal"] and card.data.license is None
    kept = json.loads((models / "new/featcal.json").read_text())
    assert all(
        f"| {block['name']} | {block['relative_drift']:.3f} |" in card.text
        for block in kept["blocks"]
    )
    assert all(
        f"| {one['expert']} | {one['merged']:.3f} | {one['calibrated']:.3f} |" in card.text
        for one in kept["drift"]
    )
    for said in (
        "λ, ridge | 0.05",
        "expert dtd | dtd",
        "fused, merged by featcal's task_arithmetic",
        "samples of each task | 6",
    ):
        assert said in card.text, said
    assert "No licence is told by: base, merged model, expert dtd, expert mnist." in card.text
    assert str(models) not in card.content and "CLIPVisionModel.from_pretrained" in card.text


def test_a_card_of_the_library_is_the_same_but_for_the_samples(models):  # noqa: F811
    import featcal

    batches = {
        "mnist": [
            {
                "pixel_values": checkpoints.processor()(checkpoints.picture(), return_tensors="pt")[
                    "pixel_values"
                ]
            }
        ]
    }
    settings = featcal.Calibration(
        ridge=0.05, anchor_blend=2.0, interpolation=0.3, modules=("fc1",)
    )
    how = {"experts": {"mnist": "mnist"}, "batches": batches, "settings": settings, "out": "new"}
    featcal.calibrate("merged", base="base", **how)
    text = ModelCard.load("new/README.md").text
    assert "modules | fc1" in text and "samples of" not in text
    module = featcal.merge("average", "mnist", {"dtd": "dtd"})
    featcal.calibrate(module, base="mnist", **how)
    assert "a CLIPVisionModel in memory" in ModelCard.load("new/README.md").text


def test_what_is_measured_stands_in_the_card_for_people_and_as_the_hubs_model_index(models, capsys):  # noqa: F811
    assert cli.main([*MERGE[:-1], "fused"]) == 0
    asked = [*EVALUATE[:2], "fused", *EVALUATE[3:], "--template", "a photo of a {}"]
    for split in ("train", "test", "test"):
        capsys.readouterr()
        assert cli.main([*asked, "--split", split, "--card", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["tasks"]
    agreement = [
        "compare",
        "--model",
        "it=fused",
        *EXPERTS,
        *DATA,
        "--samples",
        "4",
        "--skip",
        "0",
        "--card",
        "--json",
    ]
    assert cli.main(agreement) == 0
    drift = {
        one["expert"]: one["relative_drift"]
        for one in json.loads(capsys.readouterr().out)["agreement"]
    }
    card = ModelCard.load("fused/README.md")
    found = {
        (one.dataset_name, one.metric_type, one.dataset_split): one.metric_value
        for one in card.data.eval_results
    }
    assert {key[1:] for key in found} >= {
        ("accuracy", "test"),
        ("accuracy", "train"),
        ("cosine", "train"),
    }
    for task in ("mnist", "dtd"):
        assert found[task, "accuracy", "test"] == pytest.approx(
            told[task]["accuracy"] / 100, abs=1e-4
        )
        assert found[task, "relative_drift", "train"] == pytest.approx(drift[task], rel=1e-5)
        assert card.text.count(f"| {task} | test | {told[task]['accuracy']:.2f} |") == 1
    assert (
        card.data.tags == ["merge", "featcal"]
        and "No accuracy was measured" not in card.text
        and "## Use" in card.text
    )


def test_inputs_of_the_hub_are_the_base_models_of_a_merge(tmp_path):
    """As the hub's own class reads them; models of folders and of memory have no name there."""
    cached = {
        name: tmp_path / f"models--{name.replace('/', '--')}/snapshots/{'5' * 40}"
        for name in ("a/base", "b/expert")
    }
    for folder in cached.values():
        folder.mkdir(parents=True)
    given = {
        "base": cached["a/base"],
        "expert x": cached["b/expert"],
        "merged model": tmp_path,
        "expert y": object(),
    }
    (tmp_path / "README.md").write_text(card("A merge", given, ["merge"], {}, []))
    told = ModelCard.load(tmp_path / "README.md").data
    assert told.base_model == ["a/base", "b/expert"] and told.base_model_relation == "merge"
    (tmp_path / "README.md").write_text(card("A merge", {"base": tmp_path}, ["merge"], {}, []))
    assert (
        not {"base_model", "base_model_relation"}
        & ModelCard.load(tmp_path / "README.md").data.to_dict().keys()
    )


def test_a_licence_that_all_cards_share_is_inherited(tmp_path):
    own = "license: other\nlicense_name: mine\nlicense_link: https://example.org/terms"
    found = inherited(
        {
            "base": licence(tmp_path / "a", own),
            "expert x": licence(tmp_path / "b", own),
            "merged model": tmp_path,
        }
    )
    assert found.front == {
        "license": "other",
        "license_name": "mine",
        "license_link": "https://example.org/terms",
    }
    assert not found.differs and found.told[-1] == "No licence is told by: merged model."


def test_licences_that_differ_are_told_and_none_is_chosen(models, capsys):  # noqa: F811
    licence(models / "base", "license: mit")
    licence(models / "dtd", "license: cc-by-nc-4.0")
    assert cli.main(CALIBRATE) == 0
    card = ModelCard.load(models / "new/README.md")
    assert card.data.license is None and "has to be settled" in card.text
    assert "`mit`: base." in card.text and "`cc-by-nc-4.0`: expert dtd." in card.text
    assert "different licences" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "# No metadata", "---\na: [\n---\n", "---\n- 1\n---\n", "---\nlicense: mit\n", "\xff"],
)
def test_a_card_that_cannot_be_read_tells_nothing(tmp_path, text):
    (tmp_path / "README.md").write_bytes(text.encode("latin-1"))
    assert front_matter(tmp_path) == {}
