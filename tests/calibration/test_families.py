"""Every family, residual targets and chosen modules: against least squares in float64."""

from functools import partial

import plain
import pytest
import torch
import transformers as tf
from families import FAMILIES, KINDS, Family, experiment, family, text, tokens, without_float32
from test_mixtures import KINDS as MIXTURE_KINDS
from test_mixtures import mixture
from tiny import PAPER, SIZES, TEXT, difference, images, same_bits

from featcal import calibrate
from featcal.calibration.calibrate import check
from featcal.calibration.features import open_models
from featcal.errors import BadSetting, FeatCalError, UnknownKey
from featcal.models.blocks import check_replay, last_outputs, replay
from featcal.models.plan import plan_for


@pytest.mark.parametrize("name", FAMILIES)
def test_replay_is_bit_identical_to_the_models_own_forward(name):
    given = experiment(FAMILIES[name], torch.float32, experts=("a",))
    model, batch = given["merged"], given["batches"]["a"][0]
    plan = plan_for(model)
    assert {stack.name: stack.blocks for stack in plan.stacks} == FAMILIES[name].stacks
    check_replay(model, plan, batch)
    with torch.no_grad():
        replayed = replay(model, plan, batch)
        with last_outputs(model, plan) as own:
            model(**batch)
    torch.testing.assert_close(own, replayed, rtol=0, atol=0)


# with four tokens, heads and tokens are equally many
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3 of four tokens", "gemma3 of four tokens"])
def test_calibrated_model_equals_the_plain_version_of_its_family(name, monkeypatch):
    name, *few = name.split(" of ")
    family, settings = FAMILIES[name], PAPER.but(interpolation=0.6)
    given = experiment(family)
    for seed, task in enumerate(given["batches"] if few else ()):
        ids, mask = tokens(seed, length=4, shortest=2)
        given["batches"][task] = [{"input_ids": ids, "attention_mask": mask}]
    without_float32(monkeypatch, given["base"])
    own = {"paths": family.stacks.values(), "offset": family.offset}
    expected = plain.calibrate(**given, settings=settings, **own)
    assert difference(given["merged"], expected) > 1e-3
    assert difference(calibrate(**given, settings=settings).model, expected) < 1e-9


def test_tied_embeddings_stay_merged_and_tied_in_memory_and_in_a_folder(tmp_path):
    given = experiment(FAMILIES["t5"], torch.float32)
    model, merged = calibrate(**given, settings=PAPER).model, given["merged"]
    shared = model.shared.weight
    for tied in (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head):
        assert tied.weight is shared
    assert torch.equal(shared, merged.shared.weight)
    for stack in ("encoder", "decoder"):
        for name in ("final_layer_norm", "block.0.layer.0.SelfAttention.relative_attention_bias"):
            path = f"{stack}.{name}"
            assert same_bits(model.get_submodule(path), merged.get_submodule(path))
    folder = calibrate(**given, settings=PAPER, out=tmp_path / "out").folder
    back = tf.T5ForConditionalGeneration.from_pretrained(folder)
    assert same_bits(back, model) and back.lm_head.weight is back.shared.weight
    again = calibrate(**given | {"merged": folder}, settings=PAPER)
    assert same_bits(again.model, calibrate(**given | {"merged": back}, settings=PAPER).model)


STREAM = {"order": "sites", "residual": 1.0, "affine": "joint", "ridge": "auto"}
ENDS = ("down_proj", "fc2", "wo", "c_proj", "output.dense")
MATRIX = ["auto", PAPER.but(order="stale", norm=False), PAPER.but(**STREAM, modules=ENDS)]
MIXTURES = {f"{name}_moe": Family(partial(mixture, name), text, {}) for name in MIXTURE_KINDS}
BOTTLENECK = TEXT | {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32}
OTHERS = {  # its norms are of a kind that cannot be solved; its head is not called
    "deberta": family("DebertaModel", TEXT | {"position_biased_input": False}, "encoder.layer"),
    "mobilebert": family("MobileBertForMaskedLM", BOTTLENECK, "mobilebert.encoder.layer"),
}


@pytest.mark.parametrize("name", [*KINDS, *MIXTURES, *OTHERS])
def test_a_check_ends_as_the_calibration_does(name):
    def checked(batches, settings, labels=None, **models):
        opened = open_models(**models, plan=None, settings=settings)
        check(opened, batches, settings == "auto", labels or {})

    given = experiment((FAMILIES | MIXTURES | OTHERS)[name], torch.float32)
    if name in OTHERS:  # enough samples for auto
        given["batches"] = {task: own * 2 for task, own in given["batches"].items()}
    for settings in MATRIX:
        ended = []
        for call in (checked, calibrate):
            try:
                call(**given, settings=settings)
                ended.append("")
            except FeatCalError as error:
                ended.append(str(error))
        assert ended[0] == ended[1], settings
        assert settings not in MATRIX[:2] or ended[0] == ""
    for call in (checked, calibrate) if name == "deberta" else ():
        with pytest.raises(FeatCalError, match="rows of 3"):
            call(**given, settings="auto", labels={"a": torch.ones(2, 3)})


# every linear whose output is added to the stream, of the first block
WRITERS = {
    "clip_text": ("self_attn.out_proj", "mlp.fc2"),
    "bert": ("attention.output.dense", "output.dense"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "t5_encoder": ("layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"),
    "vit": ("attention.o_proj", "mlp.fc2"),
    "opt": ("self_attn.out_proj", "fc2"),
    "dinov2": ("attention.o_proj", "mlp.fc2"),
}


@pytest.mark.parametrize("family", WRITERS)
def test_residual_target_changes_only_linears_that_write_into_the_stream(family):
    given = experiment(FAMILIES[family])
    path = next(iter(FAMILIES[family].stacks.values()))
    models = (calibrate(**given, settings=PAPER.but(residual=beta)).model for beta in (0.0, 1.0))
    paper, residual = (model.get_submodule(f"{path}.0") for model in models)
    pairs = zip(paper.named_parameters(), residual.parameters(), strict=True)
    changed = {name.rpartition(".")[0] for (name, p), q in pairs if not torch.equal(p, q)}
    assert changed == set(WRITERS[family])


PARALLEL = family("FalconModel", SIZES | {"vocab_size": 97}, "h")


@pytest.mark.parametrize("family", [FAMILIES["gemma2"], PARALLEL], ids=["normed", "summed"])
def test_a_model_whose_outputs_are_changed_before_the_addition_is_refused(family):
    with pytest.raises(BadSetting, match=r"calibrate\.residual"):
        calibrate(**experiment(family), settings=PAPER.but(residual=1.0))


def test_patches_that_pad_a_small_picture_do_not_count():
    config = tf.Siglip2VisionConfig(**SIZES, intermediate_size=64, patch_size=8, num_patches=4)
    given = experiment(Family(lambda: tf.Siglip2VisionModel(config), images, {}), experts=("a",))
    shapes, x = torch.tensor([[2, 2], [1, 2], [3, 1]]), torch.randn(3, 4, 192).double()
    mask = (torch.arange(4) < shapes.prod(1, keepdim=True)).long()
    batch = {"pixel_attention_mask": mask, "spatial_shapes": shapes}
    own = [{"a": [batch | {"pixel_values": pixels}]} for pixels in (x, x * mask[..., None])]
    assert same_bits(*(calibrate(**given | {"batches": b}, settings=PAPER).model for b in own))


LINEARS = PAPER.but(norm=False)
NORMS = ("input_layernorm", "post_attention_layernorm")
CASES = [
    ("t5", LINEARS, ("q", "v"), ()),
    ("t5", LINEARS, ("EncDecAttention.k",), ()),  # the encoder has none, and is passed as it is
    ("t5", LINEARS.but(order="sites"), ("EncDecAttention.k",), ()),
    ("t5_gated", LINEARS, ("wi_0", "wi_1", "wo"), ()),
    ("llama", LINEARS, ("q_proj", "k_proj", "v_proj", "o_proj"), ()),
    ("llama", PAPER, ("q_proj", "v_proj"), NORMS),  # which are solved whatever the list says
]


@pytest.mark.parametrize(("family", "settings", "modules", "norms"), CASES)
def test_what_is_named_is_solved_and_nothing_else(family, settings, modules, norms, monkeypatch):
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


def test_a_name_that_no_linear_has_is_refused_with_the_nearest_one():
    given = experiment(FAMILIES["llama"], torch.float32)
    with pytest.raises(UnknownKey, match="calibrate.modules: 'q_prj'.*did you mean 'q_proj'"):
        calibrate(**given, settings=PAPER.but(modules=("q_prj",)))
    with pytest.raises(UnknownKey, match="'proj' is not known"):  # not the last letters of a name
        calibrate(**given, settings=PAPER.but(modules=("q_proj", "proj")))
