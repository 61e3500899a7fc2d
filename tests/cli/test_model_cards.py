"""Model cards of result folders, read by the hub's own class."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from test_cli import CALIBRATE, DATA, EVALUATE, EXPERTS, MERGE, models, ready, told  # noqa: F401 - two fixtures

from featcal.card import add_results, front_matter, licences_of, render_card
from featcal.cli import main as cli
from featcal.cli import output
from featcal.data.places import Location
from featcal.errors import BadFile


def with_card(folder: Path, front: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(f"---\n{front}\n---\n# A model\n")
    return folder


def card_of(inputs: dict[str, object]) -> ModelCard:
    settings = [["a|b", ["x", "y"]], ["rtol", None]]
    return ModelCard(render_card("A merge", "Merged.", inputs, settings, {}))


def test_the_card_agrees_with_featcal_json_and_has_no_local_path(models):  # noqa: F811
    assert cli.main([*MERGE[:-1], "fused"]) == 0
    assert cli.main(["calibrate", "--merged", "fused", *CALIBRATE[3:]]) == 0
    card = ModelCard.load(models / "new/README.md")
    assert card.data.tags == ["merge", "featcal"] and card.data.license is None
    blocks = json.loads((models / "new/featcal.json").read_text())["blocks"]
    rows = ["| {name} | {relative_drift:.3f} | {cosine:.3f} |".format(**block) for block in blocks]
    rows += ["| λ, ridge | 0.05 |", "| modules | all |", "| expert dtd | dtd |"]
    rows += ["| samples of each task | 6 |", "by featcal's task_arithmetic"]
    rows += ["No licence stated: base, merged model, expert dtd, expert mnist."]
    rows += ["CLIPVisionModel.from_pretrained"]
    assert not [row for row in rows if row not in card.text]
    assert str(models) not in card.content and "\n\n\n" not in card.content


def test_measured_results_are_in_the_table_and_in_the_hub_s_model_index(models, capsys):  # noqa: F811
    assert cli.main([*MERGE[:-1], "fused"]) == 0
    evaluate = [*EVALUATE[:2], "fused", *EVALUATE[3:], "--template", "a photo of a {}", "--set"]
    for split in ("train", "test", "test"):
        scores = told(capsys, *evaluate, f"split={split}", "--card")["tasks"]
    compare = ["compare", "--model", "it=fused", *EXPERTS, *DATA, "--samples", "4", "--skip", "0"]
    agreement = told(capsys, *compare, "--card")["agreement"]
    drift = {one["expert"]: one["relative_drift"] for one in agreement}
    card = ModelCard.load("fused/README.md")
    results = {
        (one.dataset_name, one.metric_type, one.dataset_split): one.metric_value
        for one in card.data.eval_results
    }
    assert {key[1:] for key in results} >= {("accuracy", "train"), ("cosine", "train")}
    for task in ("mnist", "dtd"):
        accuracy = scores[task]["accuracy"]
        assert results[task, "accuracy", "test"] == pytest.approx(accuracy / 100, abs=1e-4)
        assert results[task, "relative_drift", "train"] == pytest.approx(drift[task], rel=1e-5)
        assert card.text.count(f"| {task} | test | {accuracy:.2f} |") == 1
    assert card.data.tags == ["merge", "featcal"] and "Not measured" not in card.text
    assert card.text.count("## Accuracy") == 1 and "## Use" in card.text


def test_results_on_a_file_have_no_split_and_percentages_are_not_in_the_table(tmp_path):
    folder, values = with_card(tmp_path / "m", "license: mit"), {"a": 0.5, "b": 0.5, "c": 85.4}
    data = {"a": Location(tmp_path), "b": Location(folder / "README.md"), "c": Location(folder)}
    results = [(task, "accuracy", "accuracy", value) for task, value in values.items()]
    output.add_to_card(folder, data, "test", "text-classification", results)
    card = ModelCard.load(folder / "README.md")
    splits = {one.dataset_name: one.dataset_split for one in card.data.eval_results}
    assert splits == {"a": "test", "b": None, "c": "test"}
    assert "| a | test | 50.00 |\n| b |  | 50.00 |" in card.text and "85" not in card.text


def test_inputs_on_the_hub_are_the_base_models_of_a_merge(tmp_path):
    names = ("a--base", "b--expert")
    cached = [tmp_path / f"models--{name}/snapshots/{'5' * 40}" for name in names]
    for folder in cached:
        folder.mkdir(parents=True)
    inputs = {"base": cached[0], "expert x": cached[1], "merged": tmp_path, "expert y": object()}
    data = card_of(inputs).data
    assert data.base_model == ["a/base", "b/expert"] and data.base_model_relation == "merge"
    with pytest.raises(BadFile, match="hf download a/base --local-dir"):
        add_results(cached[0], [])
    card = card_of({"base": tmp_path})
    assert not {"base_model", "base_model_relation"} & card.data.to_dict().keys()
    assert "| a\\|b | x, y |\n| rtol | default |" in card.text


def test_a_licence_that_all_cards_share_is_inherited(tmp_path):
    own = "license: [other]\nlicense_name: mine\nlicense_link: https://example.org/terms"
    inputs = {"base": with_card(tmp_path / "a", own), "expert x": with_card(tmp_path / "b", own)}
    card = card_of(inputs | {"merged model": tmp_path})
    data = card.data.license, card.data.license_name, card.data.license_link
    assert data == ("other", "mine", "https://example.org/terms")
    assert card.text.rstrip().endswith("- No licence stated: merged model.")
    assert sum(map(bool, licences_of(inputs))) == 1
    card = card_of({"base": with_card(tmp_path / "c", "license:\n- mit\n- apache-2.0")})
    assert card.data.license == ["mit", "apache-2.0"] and "`mit, apache-2.0`: base" in card.text


def test_licences_that_differ_are_listed_and_none_is_inherited(models, capsys):  # noqa: F811
    with_card(models / "base", "license: mit")
    with_card(models / "dtd", "license: cc-by-nc-4.0")
    assert cli.main(CALIBRATE) == 0
    card = ModelCard.load(models / "new/README.md")
    assert card.data.license is None and "different licences" in card.text
    assert "`mit`: base." in card.text and "`cc-by-nc-4.0`: expert dtd." in card.text
    assert "different licences" in capsys.readouterr().err


BROKEN = ["---\na: [\n---\n", "---\n- 1\n---\n", "\xff"]


@pytest.mark.parametrize("text", ["", "# No metadata", "---\nlicense: mit\n", *BROKEN])
def test_an_unreadable_card_has_no_metadata_and_takes_no_results(tmp_path, text):
    (tmp_path / "README.md").write_bytes(text.encode("latin-1"))
    assert front_matter(tmp_path) == {}
    if text not in BROKEN:
        with_card(tmp_path, "model-index: [{}]")
    with pytest.raises(BadFile, match=r"README\.md: its YAML head or text cannot be read"):
        add_results(tmp_path, [])
