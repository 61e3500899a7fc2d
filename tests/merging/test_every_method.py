"""What holds for every method: folders as modules, bytes, order, its record, one expert, mistakes."""

import json

import checkpoints
import families
import pytest
import tiny
import torch
from folders import same
from test_adamerging import head, vit
from test_merge import folders
from transformers.modeling_utils import local_torch_dtype

from featcal import errors
from featcal.merging.merge import merge
from featcal.merging.registry import method_named, method_names
from featcal.models.load import load_vision

TASKS = ("dtd", "mnist")
FEW = {"adamerging": {"steps": 3}, "wudi": {"steps": 5}}
WIDE = head() | {"head/dtd": torch.ones(5, 9)}
PACKED = torch.nn.ParameterDict({"gate_up_proj": torch.ones(2, 4, 3)})
DATA = [n for n in method_names() if "batches" in method_named(n).needs]


def needed(method, tasks=TASKS, dtype=torch.float32, size=32):
    data = {t: tiny.images(i, 12, 6, dtype, size) for i, t in enumerate(tasks)}
    return {key: {"batches": data, "head": head(tasks)}[key] for key in method_named(method).needs}


@pytest.mark.parametrize("method", method_names())
def test_folders_are_merged_as_modules_in_any_order_to_the_same_bytes(method, folders, tmp_path):
    (base, folders), clip = folders, checkpoints.clip()
    modules = {"dtd": checkpoints.vision(2), "mnist": checkpoints.vision(1)}
    lines, more = list[str](), FEW.get(method, {})
    how = {"progress": lines.append, **needed(method), **more}
    merged = tiny.merged_with_record(method, clip, modules, **how)
    outs = [tmp_path / "one", tmp_path / "two"]
    elsewhere = torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)
    for out, experts in zip(outs, (folders, dict(reversed(folders.items()))), strict=True):
        given = needed(method)
        if method in DATA:
            given["batches"] = {t: tiny.refilled(own) for t, own in given["batches"].items()}
        with elsewhere[0], elsewhere[1], elsewhere[2], local_torch_dtype(torch.bfloat16):
            assert merge(method, base, experts, out=out, **given, **more) == out
    one, two = ({f.name: f.read_bytes() for f in out.iterdir()} for out in outs)
    assert one == two and "preprocessor_config.json" in one
    for written in (checkpoints.tensors(outs[0]), load_vision(outs[0])):
        assert same(merged.result, written)
    assert json.loads(json.dumps(merged.record)) == json.loads(one.get("merge.json", "{}"))
    originals = checkpoints.clip(), checkpoints.vision(2), checkpoints.vision(1)
    for model, original in zip((clip, *modules.values()), originals, strict=True):
        assert tiny.same_bits(model, original)  # models that are given stay as they are
    if method in ("regmean", "regmean_plus_plus", "lot", "mats"):
        assert merged.record["tokens"] == dict.fromkeys(TASKS, 12 * 17) and len(lines) == 2
        assert ("note" in merged.record) == (method == "lot")


ONE = {"task_arithmetic": {"scale": 1.0}, "ties": {"density": 1.0, "scale": 1.0}}
ONE |= dict.fromkeys(("average", "tsv_merge", "wudi", "wudi_closed_form"), {})
ONE |= dict.fromkeys(("regmean", "regmean_plus_plus"), {})


@pytest.mark.parametrize("method", ONE)
def test_one_expert_is_that_expert(method):
    base, expert = tiny.clip(), tiny.clip(1)
    given = needed(method, ("mnist",), torch.float64, 16)
    merged = merge(method, base, {"mnist": expert}, **given, **ONE[method])
    if method == "regmean_plus_plus":  # what follows the last block stays the base's
        expert.post_layernorm = base.post_layernorm
    assert tiny.difference(merged, expert) < 1e-6


@pytest.mark.parametrize(
    ("method", "changes", "error", "said"),
    [
        ("avrage", {}, "UnknownKey", "avrage.*did you mean 'average'"),
        ("average", {"scale": 0.5}, "UnknownKey", "merge.average: 'scale' is not known here"),
        ("average", {"batches": {}}, "FeatCalError", r"merge\.batches"),
        ("average", {"head": {}}, "FeatCalError", "merge.head.*uses no"),
        ("average", {"experts": {}}, "BadSetting", r"merge\.experts"),
        ("average", {"experts": {"": "."}}, "BadSetting", "names that are texts"),
        ("average", {"n_jobs": 0}, "BadSetting", "merge.n_jobs"),
        ("regmean", {"batches": None}, "BadSetting", "merge.batches.*must be given"),
        ("adamerging", {"head": None}, "BadSetting", "merge.head.*every task"),
        ("adamerging", {"head": {"head/dtd": torch.ones(5, 8)}}, "MissingTensor", "logit_scale"),
        ("adamerging", {"head": WIDE}, "BadSetting", "head/dtd.*rows? of 8"),
        ("lot", {"base": "clip"}, "BadSetting", "must have texts too.*experts of CLIPVisionModel"),
        ("adamerging", {"head": "nowhere"}, "MissingPath", "nowhere"),
        ("adamerging", {"base": "llama"}, "BadSetting", "language head.*LlamaForCausalLM"),
        ("adamerging", {"base": vit(pools=False)}, "BadSetting", "ViTModel.*pooled features"),
        ("task_arithmetic", {"scale": float("nan")}, "BadSetting", r"arithmetic\.scale"),
        ("ties", {"density": 1.5}, "BadSetting", r"merge\.ties\.density"),
        ("adamerging", {"clamp": 1}, "BadSetting", r"merge\.adamerging\.clamp"),
        ("wudi", {"rate": 1e300}, "BadSetting", r"merge\.wudi\.rate"),
        ("iso_c", {"exclude": ("q_proj",)}, "BadSetting", "merge.exclude: 'q_proj'"),
        ("iso_c", {"base": PACKED}, "FeatCalError", r"gate_up_proj: packs[\s\S]*token tables"),
        ("wudi", {"variant": "offical"}, "BadSetting", r"merge\.wudi\.variant"),
        ("wudi", {"variant": "closed_form", "steps": 5}, "BadSetting", r"merge\.wudi\.steps"),
        ("breadcrumbs", {"keep": 0.8, "remove": 0.3}, "BadSetting", r"merge\.breadcrumbs\.keep"),
    ],
)
def test_a_mistake_is_named(method, changes, error, said):
    base = changes.get("base") or tiny.clip()
    base = tiny.make(families.FAMILIES[base].build) if isinstance(base, str) else base
    experts = {task: tiny.shifted(base, 10 + i) for i, task in enumerate(TASKS)}
    given = needed(method, TASKS, torch.float64, 16) if method in method_names() else {}
    with pytest.raises(getattr(errors, error), match=said):
        merge(**{"method": method, "experts": experts} | given | changes | {"base": base})


@pytest.mark.parametrize("method", DATA)
@pytest.mark.parametrize(
    ("of_mnist", "said"),
    [
        (None, "mnist"),
        ([], "mnist.*is empty"),
        ([{"x": torch.ones(1)}], "pixel_values"),
        ([{"pixel_values": torch.zeros(1, 3, 9, 9)}], r"batches\['mnist'\].*refused by the model"),
    ],
)
def test_batches_that_cannot_be_used_are_named(method, of_mnist, said):
    base = tiny.clip()
    given = needed(method, TASKS, torch.float64, 16)
    given["batches"] |= {"mnist": of_mnist}
    if of_mnist is None:
        del given["batches"]["mnist"]
    with pytest.raises(errors.BadBatches, match=said):
        merge(method, base, dict.fromkeys(TASKS, base), **given)
