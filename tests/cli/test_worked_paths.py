"""Every command of the page *Use it on your model* runs on tiny models, with fewer samples."""

import json
import re
import shlex
import shutil
from pathlib import Path

import checkpoints
import datasets
import language
import peft
import pytest
import torch
import yaml
from checkpoints import tensors
from encoders import dinov2
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import save_file
from test_cli import here
from tiny import shifted
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoTokenizer

from featcal.cli import main as cli
from featcal.cli import output
from featcal.models.load import load_model, save_model
from reproduction.prepare import photos

PAGE = (Path(__file__).parents[2] / "book/use.md").read_text("utf-8")
SAMPLES = 12
PICTURES = {"train/cat": SAMPLES, "test/cat": 1, "test/dog": 1}
DATA = "--data math=math.jsonl --data code=code.jsonl"


def section(name: str) -> str:
    return PAGE.split(f"({name})=", 1)[1].split("\n(use-", 1)[0].split("\n## What is written", 1)[0]


def commands(part: str) -> list[list[str]]:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", part, re.S)).replace("\\\n", " ")
    return [shlex.split(line) for line in blocks.splitlines() if line.strip()]


def run(part: str, skip: int = 0) -> None:
    for program, *arguments in commands(part)[skip:]:
        assert program == "featcal" and command(arguments) == 0, arguments


def command(arguments: list[str]) -> int:
    few = ["--samples", str(SAMPLES)] if arguments[0] in ("calibrate", "plan") else []
    return cli.main([*arguments, *few])


def calibrate(text: str) -> int:
    return command(f"calibrate --merged merged {DATA} {text}".split())


def solved() -> set[str]:
    """Return the tensors that calibration changed, after checking that the folder is complete."""
    after, before = tensors(Path("calibrated")), tensors(Path("merged"))
    assert after.keys() == before.keys()
    metadata = ModelCard.load("calibrated/README.md").data
    assert {"merge", "featcal"} <= set(metadata.tags) and metadata.library_name == "transformers"
    assert Path("calibrated/featcal.json").is_file()
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


def fine_tuned(base: Path, out: Path, seed: int) -> Path:
    return save_model(shifted(load_model(base), seed, 0.02), out, like=base)


def texts(name: str, pairs: bool = False) -> None:
    rows = [f"{name} {language.WORDS[i % len(language.WORDS)]} {i}" for i in range(SAMPLES)]
    made = [{"input": row, "target": row[-5:]} if pairs else {"text": row} for row in rows]
    language.jsonl(Path(f"{name}.jsonl"), made)


@pytest.fixture
def llamas(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    language.folder(Path("base"), "llama")
    for seed, name in enumerate(("math", "code"), start=1):
        fine_tuned(Path("base"), Path("models") / name, seed)
        texts(name)
    return tmp_path


def merged_as_mergekit_does(recipe: Path, out: Path) -> None:
    content = yaml.safe_load(recipe.read_text())
    state = base = tensors(Path(content["base_model"]))
    for entry in content["models"]:
        expert, weight = tensors(Path(entry["model"])), entry["parameters"]["weight"]
        state = {n: value + weight * (expert[n] - base[n]) for n, value in state.items()}
    shutil.copytree(content["base_model"], out)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(recipe, out / "mergekit_config.yml")


def recipe_of_the_page(**changes) -> Path:
    (written,) = re.findall(r"```yaml\n(.*?)```", section("use-mergekit"), re.S)
    changed = yaml.safe_dump(yaml.safe_load(written) | changes) if changes else written
    Path("merge.yaml").write_text(changed)
    return Path("merge.yaml")


def merge_with_mergekit(written: str, **options) -> None:
    merging = pytest.importorskip("mergekit.merge")
    from mergekit.config import MergeConfiguration
    from mergekit.options import MergeOptions

    configuration = MergeConfiguration.model_validate(yaml.safe_load(written))
    how = MergeOptions(quiet=True, **options)
    merging.run_merge(configuration, "merged", how, config_source=written)


def blocks_alone_changed() -> None:
    parts = [name.removeprefix("vision_model.").split(".") for name in solved()]
    assert {part for _, part, *_ in parts} == {"layers"}


def test_a_merge_in_mergekit_s_layout_is_calibrated_by_its_recipe(llamas, capsys):
    merged_as_mergekit_does(recipe_of_the_page(), Path("merged"))
    part = section("use-mergekit")
    assert commands(part)[0] == ["mergekit-yaml", "merge.yaml", "merged"]
    run(part, skip=1)
    assert "samples of each task" in Path("calibrated/README.md").read_text()
    blocks_alone_changed()
    experts = "--base base --expert math=models/math --expert code=models/code"
    for models, out in ((experts, "named"), ("--set recipe=merge.yaml", "by_recipe")):
        assert calibrate(f"{models} --preset paper --out {out}") == 0
    by_recipe = tensors(Path("by_recipe"))
    assert all(torch.equal(v, by_recipe[name]) for name, v in tensors(Path("named")).items())
    assert "mergekit's task_arithmetic" in Path("calibrated/README.md").read_text()
    capsys.readouterr()
    run(PAGE.split("(use-mergekit)=")[0])
    printed = capsys.readouterr()
    assert "merged by mergekit: task_arithmetic" in printed.out
    assert "\x1b" not in printed.out + printed.err


def test_a_merge_of_vocabularies_is_calibrated_and_keeps_all_tokens(llamas, capsys):
    for name, words in {"math": ["<think>"], "code": ["<fim>", "<eot>"]}.items():
        model, tokenizer = load_model(Path("models") / name), language.tokenizer()
        tokenizer.add_tokens(words)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        save_model(model, Path("wider") / name)
        tokenizer.save_pretrained(Path("wider") / name)
    wider = [{"model": f"wider/{name}", "parameters": {"weight": 0.4}} for name in ("math", "code")]
    written = recipe_of_the_page(tokenizer_source="union", models=wider).read_text()
    merge_with_mergekit(written, write_model_card=False)
    assert calibrate("--set recipe=merge.yaml --out calibrated") == 0
    assert "base 259" in capsys.readouterr().err
    blocks_alone_changed()
    model, tokenizer = load_model("calibrated"), AutoTokenizer.from_pretrained("calibrated")
    ids = tokenizer("<think><fim><eot>", return_tensors="pt").input_ids
    assert len(tokenizer) == 262 and set(ids[0].tolist()) >= {259, 260, 261}
    assert model(ids).logits.shape[-1] == 262
    experts = "--expert math=wider/math --expert code=wider/code"
    compared = f"compare --model merged=merged {experts} {DATA} --samples {SAMPLES} --skip 0"
    assert cli.main(compared.split()) == cli.MISTAKE  # with whose vocabulary?
    assert "--base" in capsys.readouterr().err
    assert cli.main([*compared.split(), "--base", "base"]) == 0


def test_vision_experts_of_fusionbench_are_merged_and_evaluated(here, capsys):
    checkpoints.clip_folder(Path("clip"))
    for seed, name in enumerate(("mnist", "dtd"), start=1):
        checkpoints.legacy_folder(Path("models") / name, seed)
        checkpoints.pictures(Path("images") / name, seed, PICTURES)
    run(section("use-clip"))
    blocks_alone_changed()
    printed = capsys.readouterr().out
    assert 0 <= json.loads(printed[printed.index('{\n  "model"') :])["average"] <= 100


def test_dinov2_is_calibrated_compared_and_scored_by_class_means(here, capsys):
    base, processor = dinov2(Path("dinov2")), json.dumps(photos.processor(28))
    (base / "preprocessor_config.json").write_text(processor)
    for seed, name in enumerate(("flowers", "birds"), start=1):
        fine_tuned(base, Path("models") / name, seed)
        checkpoints.pictures(Path("images") / name, seed, PICTURES)
        shutil.copytree(Path("images") / name / "test/dog", Path("images") / name / "train/dog")
    run(section("use-dinov2"))
    assert all(name.startswith("encoder.layer.") for name in solved())
    printed = capsys.readouterr().out
    result = json.loads(printed[printed.index('{\n  "model": "calibrated",\n  "tasks"') :])
    model, vision = load_model("calibrated"), load_model("dinov2")
    for name in ("flowers", "birds"):
        assert result["tasks"][name]["accuracy"] == by_nearest_mean(vision, model, name)
    wrong = ["evaluate", "--model", "calibrated", "--class-means", "dinov2", "--data"]
    names = ["dog", "cat"]  # in the other order
    columns = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
    picture = {"image": [Image.new("RGB", (32, 32))], "label": [0]}
    table = datasets.Dataset.from_dict(picture, columns)
    table.to_parquet("images/birds/test.parquet")
    table.save_to_disk("saved")
    for path in ("images/birds", "images/birds/test.parquet", "saved"):
        assert cli.main([*wrong, f"birds={path}"]) == 2
        said = "cat, dog" if path == "images/birds" else "pictures of a split train"
        assert said in capsys.readouterr().err
    few = [*wrong, "birds=images/birds", "--split", "few"]
    Path("images/birds/few.csv").write_text("image,label\ntest/dog/000.png,dog\n")
    assert cli.main(few) == 2 and "or name all with --classes" in capsys.readouterr().err
    assert cli.main([*few, "--classes", "birds=cat,dog"]) == 0
    assert cli.main([*wrong, "birds=images/birds", "--template", "a {}"]) == 2


def by_nearest_mean(vision, model, task: str) -> float:
    processor = AutoImageProcessor.from_pretrained("dinov2", backend="pil")

    def features(of, split: str, label: str) -> torch.Tensor:
        files = sorted(Path("images", task, split, label).glob("*.png"))
        pixels = processor([Image.open(file) for file in files], return_tensors="pt")
        with torch.no_grad():
            return F.normalize(of(**pixels).last_hidden_state[:, 0], dim=-1)

    classes = ("cat", "dog")
    means = torch.stack([features(vision, "train", c).mean(0) for c in classes])
    means = F.normalize(means, dim=-1)
    right = [(features(model, "test", c) @ means.T).argmax(-1) == i for i, c in enumerate(classes)]
    return 100 * float(torch.cat(right).double().mean())


def test_open_clip_is_converted_calibrated_and_converted_back(here):
    pytest.importorskip("open_clip")
    from test_open_clip import folder_of, theirs

    for seed, name in enumerate(("base", "mnist", "dtd")):
        folder_of(theirs(seed=seed), Path("open_clip") / name)
    for seed, name in enumerate(("mnist", "dtd")):
        checkpoints.pictures(Path("images") / name, seed, PICTURES)
    run(section("use-open-clip"))
    blocks_alone_changed()


def lora(folder: Path, base: Path, seed: int = 3) -> Path:
    torch.manual_seed(seed)
    how = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(load_model(base), how)
    adapted.save_pretrained(folder)
    save_model(adapted.merge_and_unload(), folder.with_name("whole"), like=base)
    return folder


def test_a_lora_is_an_expert_and_equals_the_model_it_makes(llamas):
    """Also as `base+adapter` of a recipe; nothing of the models made for the run is left."""
    lora(Path("adapters/math"), Path("base"))
    run(section("use-lora"))
    assert solved()
    recipe_of_the_page(models=[{"model": "base+adapters/math"}, {"model": "models/code"}])
    experts = "--base base --expert code=models/code --expert math=adapters/"
    ways = {"adapter": f"{experts}math", "whole": f"{experts}whole"}
    for out, models in (ways | {"recipe": "--set recipe=merge.yaml"}).items():
        assert calibrate(f"{models} --preset paper --out {out}") == 0
    for other in ("adapter", "recipe"):
        for name, value in tensors(Path(other)).items():
            torch.testing.assert_close(value, tensors(Path("whole"))[name], rtol=0, atol=1e-6)
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


def test_an_interrupted_run_with_a_lora_goes_on_where_it_was(llamas, monkeypatch):
    """The adapter's model is made with the same bytes and dates, so solved blocks serve again."""
    lora(Path("adapters/math"), Path("base"))
    shutil.copytree("models/code", "merged")
    experts = "--base base --expert math=adapters/math --expert code=models/code --preset paper"
    assert calibrate(f"{experts} --out whole") == 0
    printed, show = [], output.progress.print

    def interrupted(text, **how):
        printed.append(text)
        if ".00  " in text and len(printed) < 9:
            raise KeyboardInterrupt
        show(text, **how)

    monkeypatch.setattr(output.progress, "print", interrupted)
    assert calibrate(f"{experts} --out new") == cli.INTERRUPTED
    assert Path(".new.unfinished/experts/0/config.json").is_file() and not Path("new").exists()
    printed[:] = [""] * 9
    assert calibrate(f"{experts} --out new") == 0
    new, whole = (Path(name, "model.safetensors").read_bytes() for name in ("new", "whole"))
    assert new == whole and any("solved before" in line for line in printed), printed
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


def test_a_t5_is_calibrated_in_both_stacks(here):
    language.folder(Path("base"), "t5")
    for seed, name in enumerate(("qnli", "sst2"), start=1):
        fine_tuned(Path("base"), Path("models") / name, seed)
        texts(name, pairs=True)
    run(section("use-t5"))
    assert {name.split(".")[0] for name in solved()} == {"encoder", "decoder"}
