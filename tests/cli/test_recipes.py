"""mergekit's recipes: what is read from them, what is refused and why, and where their models are
looked for.
"""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from test_worked_paths import llamas, merged_as_mergekit_does, recipe_of_the_page  # noqa: F401 - a fixture

from featcal.cli import main as cli
from featcal.errors import BadFile
from featcal.interchange.mergekit import Reference, read_recipe

TASK = {
    "merge_method": "task_arithmetic",
    "base_model": "base",
    "models": [{"model": "a"}, {"model": "b"}],
}


def written(folder: Path, **changes) -> Path:
    content = {key: value for key, value in (TASK | changes).items() if value is not None}
    (folder / "merge.yaml").write_text(yaml.safe_dump(content))
    return folder / "merge.yaml"


def test_the_base_is_no_expert_and_an_expert_is_named_once(tmp_path):
    models = [
        {"model": "base"},
        {"model": "a", "parameters": {"weight": 0.3}},
        {"model": "a"},
        {"model": "hub/b@v2+lora/c@main"},
    ]
    recipe = read_recipe(written(tmp_path, models=models))
    assert recipe.base == Reference("base") and recipe.base_listed
    assert recipe.experts == (Reference("a"), Reference("hub/b", "v2", Reference("lora/c", "main")))
    assert [model.name for model in recipe.experts] == ["a", "c"] and str(
        recipe.experts[1]
    ) == "hub/b@v2+lora/c@main"


def test_a_model_written_as_a_mapping_is_the_same_model(tmp_path):
    models = [
        {"model": {"model": {"path": "my models/a", "revision": "v1"}, "lora": {"path": "l"}}}
    ]
    assert read_recipe(written(tmp_path, models=models)).experts == (
        Reference("my models/a", "v1", Reference("l")),
    )


def slices(*ranges, names="ab", **more):
    """Slices of the same models."""
    return [
        {"sources": [{"model": name, "layer_range": list(layers), **more} for name in names]}
        for layers in ranges
    ]


def test_slices_that_cover_whole_models_are_these_models(tmp_path):
    weight = {"parameters": {"weight": 0.3}}
    plain = read_recipe(written(tmp_path, models=[{"model": name, **weight} for name in "ab"]))
    for ranges in ([(0, 4)], [(0, 1), (1, 4)]):
        recipe = read_recipe(written(tmp_path, models=None, slices=slices(*ranges, **weight)))
        assert (recipe.experts, recipe.settings, recipe.base) == (
            plain.experts,
            plain.settings,
            plain.base,
        )
    module = {"default": {"slices": slices((0, 4), **weight)}}
    assert read_recipe(written(tmp_path, models=None, modules=module)).settings == plain.settings
    module = {"default": {"models": [{"model": name} for name in "ab"], **weight}}
    assert read_recipe(written(tmp_path, models=None, modules=module)).parameters == {"weight": 0.3}


def test_a_recipe_that_mergekit_s_own_classes_wrote_is_read(tmp_path):
    """With every key in it, those that are not set too."""
    config = pytest.importorskip("mergekit.config")
    own = config.MergeConfiguration.model_validate(
        TASK | {"models": None, "slices": slices((0, 2))}
    )
    for content in (own.model_dump(mode="json"), yaml.safe_load(own.to_yaml())):
        (tmp_path / "merge.yaml").write_text(yaml.safe_dump(content))
        recipe = read_recipe(tmp_path / "merge.yaml")
        assert (
            recipe.base == Reference("base")
            and recipe.experts == (Reference("a"), Reference("b"))
            and not recipe.unknown
        )


@pytest.mark.parametrize("method", ["slerp", "nearswap", "arcee_fusion"])
def test_where_the_base_model_is_one_of_the_merged_models_it_is_an_expert(tmp_path, method):
    recipe = read_recipe(written(tmp_path, merge_method=method, base_model="a"))
    assert recipe.base is None and recipe.experts == (Reference("a"), Reference("b"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"merge_method": None}, "no merge_method"),
        ({"merge_method": None, "merge_methd": "ties"}, "'merge_methd' is not known"),
        ({"models": None, "slices": [{"sources": []}]}, "together of slices"),
        ({"models": None, "slices": slices((0, 1), (2, 3))}, "no whole models"),
        (
            {"models": None, "slices": slices((0, 2))[:1] + slices((2, 3), names="ac")},
            "no whole models",
        ),
        ({"models": None, "slices": slices((1, 3))}, "no whole models"),
        (
            {"models": None, "modules": {"text": {"models": [{"model": "a"}]}}},
            "together of modules",
        ),
        ({"merge_method": "passthrough"}, "merges nothing"),
        ({"models": None}, "no list of models"),
        ({"models": None, "model": [{"model": "a"}]}, "'model' is not known"),
        ({"models": ["a"]}, "names no model"),
        ({"models": [{"model": "a+b+c"}]}, "names no model"),
        ({"models": [{"model": "a@"}]}, "names no model"),
        ({"models": [{"model": "base"}]}, "no model beside its base"),
    ],
)
def test_what_no_calibration_can_follow_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises(BadFile, match=said):
        read_recipe(written(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "7", "a: [", "a: 1\n---\nb: 2\n", "\x00"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text):
    (tmp_path / "merge.yaml").write_text(text)
    with pytest.raises(BadFile, match="merge.yaml"):
        read_recipe(tmp_path / "merge.yaml")


DATA = ["--data", "math=math.jsonl", "--data", "code=code.jsonl", "--samples", "8", "--out", "new"]
CALIBRATE = ["calibrate", "--recipe", "merge.yaml", "--merged", "merged", *DATA]


def refused(arguments: list[str], capsys) -> str:
    before = {path for path in Path().rglob("*")}
    assert cli.main(arguments) == cli.MISTAKE
    assert {path for path in Path().rglob("*")} == before
    message = capsys.readouterr().err
    assert message.count("featcal:") == 1
    return message


def test_every_way_a_recipe_can_fall_short_is_one_message_with_a_way_out(llamas, capsys):  # noqa: F811
    recipe_of_the_page()
    merged_as_mergekit_does(Path("merge.yaml"), Path("merged"))
    for changes, said in (
        ({"merge_method": "linear", "base_model": None}, "--base FOLDER"),
        ({"base_model": None, "base_modle": "base"}, "'base_modle' is not known"),
        ({"base_model": "nowhere"}, "nowhere"),
        ({"base_model": "nobody/nothing"}, "beside merge.yaml and in the current folder"),
        (
            {"models": [{"model": "models/math"}, {"model": "models/../models/math"}]},
            "--expert math-1=FOLDER",
        ),
        ({"models": [{"model": "models/math"}]}, "code"),
    ):
        recipe_of_the_page(**changes)
        assert said in refused(CALIBRATE, capsys), changes
    Path("merged/mergekit_config.yml").unlink()
    assert "--recipe" in refused(["calibrate", "--merged", "merged", *DATA], capsys)
    assert "--recipe" in refused(["merge", "--out", "new"], capsys)
    recipe_of_the_page(merge_method="ties")
    assert "mergekit-yaml" in refused(["merge", "--recipe", "merge.yaml", "--out", "new"], capsys)
    recipe_of_the_page(
        models=[{"model": "models/math", "parameters": {"weight": w}} for w in ([0, 1],)]
    )
    assert "not one number" in refused(["merge", "--recipe", "merge.yaml", "--out", "new"], capsys)
    recipe_of_the_page(dtype="bfloat16")
    assert "stored as float32" in refused(
        ["merge", "--recipe", "merge.yaml", "--out", "new"], capsys
    )


def test_an_expert_of_another_architecture_is_refused_and_an_unknown_key_is_told(llamas, capsys):  # noqa: F811
    import language

    recipe_of_the_page(densty=0.5, paramters={})
    merged_as_mergekit_does(Path("merge.yaml"), Path("merged"))
    language.folder(Path("models/odd"), "bert")
    assert cli.main([*CALIBRATE, "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert "'densty' is no key" in told and "did you mean 'parameters'" in told
    message = refused(
        [*CALIBRATE, "--expert", "math=models/odd", "--expert", "code=models/code"], capsys
    )
    assert "models/odd" in message


def test_models_are_looked_for_beside_the_recipe_and_options_count_more(
    llamas, monkeypatch, capsys
):  # noqa: F811
    recipe_of_the_page(base_model="gone")
    merged_as_mergekit_does(recipe_of_the_page(), Path("merged"))
    elsewhere = llamas / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    data = [
        "--data",
        "math=../math.jsonl",
        "--data",
        "code=../code.jsonl",
        "--samples",
        "8",
        "--out",
        "new",
        "--dry-run",
    ]
    assert cli.main(["calibrate", "--recipe", "../merge.yaml", "--merged", "../merged", *data]) == 0
    assert "nothing was computed" in capsys.readouterr().out
    assert (
        cli.main(
            [
                "calibrate",
                "--recipe",
                "../merge.yaml",
                "--merged",
                "../merged",
                "--base",
                "../base",
                *data,
            ]
        )
        == 0
    )


def test_a_model_of_the_hub_s_cache_is_found_without_a_connection(llamas, tmp_path, monkeypatch):  # noqa: F811
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub/models--owner--base"
    shutil.copytree("base", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    merged_as_mergekit_does(recipe_of_the_page(), Path("merged"))
    (cached / "snapshots" / commit / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    recipe_of_the_page(base_model="owner/base")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert cli.main(CALIBRATE) == 0
    card = Path("new/README.md").read_text()
    assert (
        "base_model:\n- owner/base\n" in card
        and "license: apache-2.0" in card
        and commit[:12] in card
    )
    assert str(tmp_path) not in card
