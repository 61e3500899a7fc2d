"""Every family: bit-identical replay, and whole forwards with least squares in float64."""

from functools import partial

import plain
import pytest
import torch
import transformers as tf
from families import FAMILIES, SHORT, Family, experiment, family, text, tokens, without_float32
from test_mixtures import KINDS as MIXTURE_KINDS
from test_mixtures import mixture
from tiny import PAPER, difference, make, same_bits

from featcal import calibrate
from featcal.calibration.calibrate import check
from featcal.errors import FeatCalError
from featcal.models.blocks import block_outputs, check_replay, replay
from featcal.models.plan import blocks_of, plan_for


@pytest.mark.parametrize("name", FAMILIES)
def test_replay_is_bit_identical_to_the_models_own_forward(name):
    given = experiment(FAMILIES[name], torch.float32, experts=("a",))
    model, batch = given["merged"], given["batches"]["a"][0]
    plan = plan_for(model)
    assert {stack.name: stack.blocks for stack in plan.stacks} == FAMILIES[name].stacks
    check_replay(model, plan, batch)
    with torch.no_grad():
        replayed = replay(model, plan, batch)
        for stack in plan.stacks:
            with block_outputs(model, blocks_of(model, stack)) as own:
                model(**batch)
            assert torch.equal(replayed[stack.name], list(own.values())[-1])


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
    expected = plain.calibrate(
        **given, settings=settings, paths=family.stacks.values(), offset=family.offset
    )
    assert difference(given["merged"], expected) > 1e-3
    assert difference(calibrate(**given, settings=settings).model, expected) < 1e-9


@pytest.mark.parametrize("name", ["t5", "clip", "gemma3"])
def test_size_and_order_of_batches_are_irrelevant(name, monkeypatch):
    family = FAMILIES[name]
    without_float32(monkeypatch, make(family.build))
    given = experiment(family)
    expected = calibrate(**given, settings=PAPER).model
    turned = {task: batches[::-1] for task, batches in given["batches"].items()}
    for other in (*(experiment(family, batch=n) for n in (1, 6)), given | {"batches": turned}):
        assert difference(calibrate(**other, settings=PAPER).model, expected) < 1e-9


@pytest.fixture
def t5(monkeypatch):
    given = experiment(FAMILIES["t5"])
    without_float32(monkeypatch, given["base"])
    return given


def padded(batch, lengths):
    """The batch with every tensor filled up on the right."""
    pad = torch.nn.functional.pad
    return {
        k: pad(batch[k], (0, length - batch[k].shape[1]), value=-100 if k == "labels" else 0)
        for k, length in lengths.items()
    }


def test_two_unpadded_batches_equal_one_padded_batch_of_encoder_and_decoder(t5):
    lengths, bare, joined = {"input_ids": 7, "attention_mask": 7, "labels": 5}, {}, {}
    for seed, task in enumerate(t5["experts"]):
        ids, labels = (tokens(seed + i, 6, 7, 7)[0] for i in (0, 50))
        halves = (ids[:3, :4], labels[:3, :2].contiguous()), (ids[3:], labels[3:, :5].contiguous())
        bare[task] = [
            {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": y} for i, y in halves
        ]
        wide = [padded(batch, lengths) for batch in bare[task]]
        joined[task] = [{k: torch.cat([b[k] for b in wide]) for k in lengths}]
    first, second = (calibrate(**t5 | {"batches": b}, settings=PAPER) for b in (bare, joined))
    assert difference(first.model, second.model) < 1e-9
    for result in (first, second):
        counts = {block.name: block.tokens for block in result.blocks}
        assert counts == {
            f"{name}.{i:02d}": n for name, n in (("encoder", 66), ("decoder", 42)) for i in (0, 1)
        }
    for one, other in zip(first.blocks, second.blocks, strict=True):
        assert one.relative_drift == pytest.approx(other.relative_drift, rel=1e-4)


def decoders(batches, model):
    """The same batches with the decoder's own tokens and mask instead of labels."""
    own = {"decoder_attention_mask": lambda labels: (labels != -100).long()}
    own |= {"decoder_input_ids": model._shift_right}
    rest = ("input_ids", "attention_mask")
    return [
        {k: b[k] for k in rest} | {k: of(b["labels"]) for k, of in own.items()} for b in batches
    ]


def test_forms_of_the_decoders_tokens_give_one_model(t5):
    """Without a mask it counts its first token and all that do not pad."""
    own = {task: decoders(batches, t5["base"]) for task, batches in t5["batches"].items()}
    bare, masked = {}, {}
    for task, batches in own.items():
        bare[task] = [
            {k: v for k, v in b.items() if k != "decoder_attention_mask"} for b in batches
        ]
        masked[task] = []
        for b in bare[task]:
            mask = (b["decoder_input_ids"] != 0).long()
            mask[:, 0] = 1
            masked[task].append(b | {"decoder_attention_mask": mask})
    labels, tokens, first, second = (
        calibrate(**t5 | {"batches": b}, settings=PAPER) for b in (t5["batches"], own, bare, masked)
    )
    assert difference(labels.model, tokens.model) < 1e-12
    assert difference(first.model, second.model) < 1e-12
    assert first.blocks[-1].tokens == second.blocks[-1].tokens


def test_tied_embeddings_stay_merged_and_tied_in_memory_and_in_a_folder(tmp_path):
    given = experiment(FAMILIES["t5"], torch.float32)
    model, merged = calibrate(**given, settings=PAPER).model, given["merged"]
    shared = model.shared.weight
    for tied in (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head):
        assert tied.weight is shared
    assert torch.equal(shared, merged.shared.weight)
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias"
    for stack in ("encoder", "decoder"):
        for name in ("final_layer_norm", bias):
            path = f"{stack}.{name}"
            assert same_bits(model.get_submodule(path), merged.get_submodule(path))
    folder = calibrate(**given, settings=PAPER, out=tmp_path / "out").folder
    back = tf.T5ForConditionalGeneration.from_pretrained(folder)
    assert same_bits(back, model) and back.lm_head.weight is back.shared.weight
    again = calibrate(**given | {"merged": folder}, settings=PAPER)
    assert same_bits(again.model, calibrate(**given | {"merged": back}, settings=PAPER).model)


@pytest.mark.parametrize(("ridge", "bound"), [(0.05, 1e-5), (1e-5, 1e-3)])
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_float32_models_differ_from_float64_by_rounding(name, ridge, bound):
    exact, single = (
        calibrate(**experiment(FAMILIES[name], dtype), settings=PAPER.but(ridge=ridge)).model
        for dtype in (torch.float64, torch.float32)
    )
    for p, q in zip(exact.parameters(), single.parameters(), strict=True):
        assert (q.double() - p).norm() < bound * p.norm()


STREAM = {"order": "sites", "residual": 1.0, "affine": "joint", "ridge": "auto"}
MATRIX = [
    "auto",
    PAPER,
    PAPER.but(order="stale", norm=False, bias=False),
    PAPER.but(**STREAM),
    PAPER.but(**STREAM, modules=("down_proj", "fc2", "wo", "c_proj", "output.dense")),
]
MIXTURES = {f"{name}_moe": Family(partial(mixture, name), text, {}) for name in MIXTURE_KINDS}
NORMLESS = {  # its norms are of a kind that cannot be solved
    "deberta": family("DebertaModel", SHORT | {"position_biased_input": False}, "encoder.layer")
}


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES, *NORMLESS])
def test_a_check_ends_as_the_calibration_does(name):
    given = experiment((FAMILIES | MIXTURES | NORMLESS)[name], torch.float32)
    ended = []
    for settings in MATRIX:
        pair = []
        for call in (check, calibrate):
            try:
                call(**given, settings=settings)
                pair.append("")
            except FeatCalError as error:
                pair.append(str(error))
        assert pair[0] == pair[1], settings
        ended += pair[:1]
    assert name in NORMLESS or ended[1] == ""
