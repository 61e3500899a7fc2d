"""Every family: replay to the bit, and the calibrated model against whole forwards and least
squares in float64.
"""

import copy
from dataclasses import replace

import plain_families
import pytest
import torch
import transformers as tf
from families import FAMILIES, experiment, tokens, without_float32
from tiny import PAPER, difference, make, same_bits

from featcal import calibrate
from featcal.models.batch import PROVING
from featcal.models.blocks import block_outputs, check_replay, replay
from featcal.models.families import plan_for
from featcal.models.plan import blocks_of
from reproduction.engine.drift import model_drift


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


@pytest.mark.parametrize("name", FAMILIES)
def test_calibrated_model_equals_the_plain_version_of_its_family(name, monkeypatch):
    family = FAMILIES[name]
    given = experiment(family)
    without_float32(monkeypatch, given["base"])
    settings = PAPER.but(interpolation=0.6)
    expected = plain_families.calibrate(
        **given, settings=settings, paths=family.stacks.values(), offset=family.offset
    )
    result = calibrate(**given, settings=settings)
    assert difference(given["merged"], expected) > 1e-3
    assert difference(result.model, expected) < 1e-9


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_heads_and_tokens_of_equal_number_are_distinguished(name, monkeypatch):
    family = FAMILIES[name]  # four heads
    given = experiment(family) | {
        "batches": {task: short_text(seed) for seed, task in enumerate(("a", "b"))}
    }
    without_float32(monkeypatch, given["base"])
    expected = plain_families.calibrate(
        **given, settings=PAPER, paths=family.stacks.values(), offset=family.offset
    )
    assert difference(calibrate(**given, settings=PAPER).model, expected) < 1e-9


def short_text(seed):
    ids, mask = tokens(seed, length=4, shortest=2)
    return [{"input_ids": ids, "attention_mask": mask}]


@pytest.mark.parametrize("name", ["t5", "clip", "gemma3"])
def test_size_and_order_of_batches_are_irrelevant(name, monkeypatch):
    family = FAMILIES[name]
    without_float32(monkeypatch, make(family.build))
    given = experiment(family)
    expected = calibrate(**given, settings=PAPER).model
    turned = {task: batches[::-1] for task, batches in given["batches"].items()}
    others = [experiment(family, batch=1), experiment(family, batch=6), given | {"batches": turned}]
    assert all(
        difference(calibrate(**other, settings=PAPER).model, expected) < 1e-9 for other in others
    )


def t5_experiment(monkeypatch):
    given = experiment(FAMILIES["t5"])
    without_float32(monkeypatch, given["base"])
    return given


def decoders(batches, model):
    """The same batches with the decoder's own tokens and mask instead of labels."""
    return [
        {k: v for k, v in b.items() if k != "labels"}
        | {
            "decoder_input_ids": model._shift_right(b["labels"]),
            "decoder_attention_mask": (b["labels"] != -100).long(),
        }
        for b in batches
    ]


def padded(batch, lengths):
    """The batch with every tensor filled up on the right."""
    fill = {"labels": -100}
    return {
        k: torch.nn.functional.pad(v, (0, lengths[k] - v.shape[1]), value=fill.get(k, 0))
        for k, v in batch.items()
    }


def test_two_unpadded_batches_equal_one_padded_batch_of_encoder_and_decoder(monkeypatch):
    given = t5_experiment(monkeypatch)
    lengths, bare, joined = {"input_ids": 7, "attention_mask": 7, "labels": 5}, {}, {}
    for seed, task in enumerate(given["experts"]):
        ids, labels = (tokens(seed + i, 6, 7, 7)[0] for i in (0, 50))
        halves = [
            (ids[:3, :4], labels[:3, :2].contiguous()),
            (ids[3:], labels[3:, :5].contiguous()),
        ]
        bare[task] = [
            {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": y} for i, y in halves
        ]
        wide = [padded(batch, lengths) for batch in bare[task]]
        joined[task] = [{k: torch.cat([b[k] for b in wide]) for k in lengths}]
    first, second = (
        calibrate(**given | {"batches": batches}, settings=PAPER) for batches in (bare, joined)
    )
    assert difference(first.model, second.model) < 1e-9
    assert [b.name for b in second.blocks] == [
        "encoder.00",
        "encoder.01",
        "decoder.00",
        "decoder.01",
    ]
    assert [b.tokens for b in first.blocks] == [b.tokens for b in second.blocks] == [66, 66, 42, 42]
    for one, other in zip(first.blocks, second.blocks, strict=True):
        assert one.relative_drift == pytest.approx(other.relative_drift, rel=1e-4)


def test_labels_and_the_decoders_own_tokens_give_the_same_model(monkeypatch):
    given = t5_experiment(monkeypatch)
    own = {task: decoders(batches, given["base"]) for task, batches in given["batches"].items()}
    expected = calibrate(**given, settings=PAPER).model
    assert difference(calibrate(**given | {"batches": own}, settings=PAPER).model, expected) < 1e-12


def test_decoder_without_a_mask_counts_its_first_token_and_all_that_do_not_pad(monkeypatch):
    given = t5_experiment(monkeypatch)
    bare, masked = {}, {}
    for task, batches in given["batches"].items():
        own = decoders(batches, given["base"])
        bare[task] = [{k: v for k, v in b.items() if k != "decoder_attention_mask"} for b in own]
        masked[task] = [
            b | {"decoder_attention_mask": (b["decoder_input_ids"] != 0).long()} for b in bare[task]
        ]
        for b in masked[task]:
            b["decoder_attention_mask"][:, 0] = 1
    first, second = (calibrate(**given | {"batches": b}, settings=PAPER) for b in (bare, masked))
    assert difference(first.model, second.model) < 1e-12
    assert first.blocks[-1].tokens == second.blocks[-1].tokens


def test_decoder_of_the_student_reads_the_calibrated_encoder_and_a_teacher_its_own(monkeypatch):
    given = t5_experiment(monkeypatch)
    read = {}
    for name, model in {"merged": given["merged"], **given["experts"]}.items():
        read[name] = []
        keys = model.decoder.block[0].layer[1].EncDecAttention.k
        keys.register_forward_pre_hook(lambda _, args, name=name: read[name].append(args[0]))
    batch = given["batches"]["a"][0]
    result = calibrate(**given, settings=PAPER)
    mine = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        merged, ours, theirs = (
            m.encoder(**mine)[0] for m in (given["merged"], result.model, given["experts"]["a"])
        )
    assert torch.equal(read["a"][0], theirs)
    assert (
        sum(torch.equal(states, ours) for states in read["merged"]) == 2
    )  # the snapshot and the solved block
    with torch.no_grad():
        first = given["merged"].encoder(**{name: value[:PROVING] for name, value in mine.items()})[
            0
        ]
    assert torch.equal(read["merged"][0], first) and not torch.equal(
        merged, ours
    )  # the check before the first block
    assert all(
        "forward" not in vars(m) for model in given["experts"].values() for m in model.modules()
    )


def test_decoder_is_solved_for_the_calibrated_encoder_and_not_for_the_merged_one(monkeypatch):
    """Keys of the cross-attention read nothing but the encoder, so they tell which one their sums
    were taken from.
    """
    given, keys = t5_experiment(monkeypatch), "decoder.block.0.layer.1.EncDecAttention.k.weight"
    settings = PAPER.but(norm=False)
    whole = calibrate(**given, settings=settings).model
    alone = settings.but(modules=("EncDecAttention.k",))  # the encoder stays as it comes
    after = copy.deepcopy(given["merged"])
    after.encoder = whole.encoder
    solved = [
        calibrate(**given | {"merged": m}, settings=alone).model.get_parameter(keys)
        for m in (after, given["merged"])
    ]
    calibrated, merged = ((weight - whole.get_parameter(keys)).abs().max() for weight in solved)
    assert calibrated < 1e-9 and merged > 1e-4


def test_records_of_both_stacks_equal_the_drift_of_whole_models(monkeypatch):
    given = t5_experiment(monkeypatch)
    result = calibrate(**given, settings=PAPER)
    measured = {}
    for task, expert in given["experts"].items():
        measured[task] = {
            r["block"]: r for r in model_drift(result.model, expert, given["batches"][task])
        }
    assert list(measured["a"]) == [
        f"{stack}.{place}"
        for stack in ("encoder", "decoder")
        for place in ("embeddings", "00", "01")
    ]
    for record in result.blocks:
        expected = sum(m[record.name]["relative_drift"] for m in measured.values()) / 2
        assert record.relative_drift == pytest.approx(expected, rel=1e-5)


def test_tied_embeddings_keep_the_merged_weights_and_stay_tied():
    given = experiment(FAMILIES["t5"], torch.float32)
    model, merged = calibrate(**given, settings=PAPER).model, given["merged"]
    assert (
        model.shared.weight
        is model.encoder.embed_tokens.weight
        is model.decoder.embed_tokens.weight
        is model.lm_head.weight
    )
    assert torch.equal(model.shared.weight, merged.shared.weight)
    for stack in ("encoder", "decoder"):
        part, before = model.get_submodule(stack), merged.get_submodule(stack)
        assert same_bits(part.final_layer_norm, before.final_layer_norm)
        bias = "block.0.layer.0.SelfAttention.relative_attention_bias"
        assert same_bits(part.get_submodule(bias), before.get_submodule(bias))


def test_written_t5_folder_is_read_back_by_transformers_with_its_ties(tmp_path):
    given = experiment(FAMILIES["t5"], torch.float32)
    folder = calibrate(**given, settings=PAPER, out=tmp_path / "out").folder
    back = tf.T5ForConditionalGeneration.from_pretrained(folder)
    assert same_bits(back, calibrate(**given, settings=PAPER).model)
    assert back.lm_head.weight is back.shared.weight
    again = calibrate(**given | {"merged": folder}, settings=PAPER)
    assert same_bits(again.model, calibrate(**given | {"merged": back}, settings=PAPER).model)


@pytest.mark.parametrize(("ridge", "bound"), [(0.05, 1e-5), (1e-5, 1e-3)])
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_float32_models_differ_from_float64_by_rounding(name, ridge, bound):
    settings = PAPER.but(ridge=ridge)
    exact, single = (
        calibrate(**experiment(FAMILIES[name], d), settings=settings).model
        for d in (torch.float64, torch.float32)
    )
    for p, q in zip(exact.parameters(), single.parameters(), strict=True):
        assert (q.double() - p).norm() < bound * p.norm()


def test_whole_clip_gives_both_towers_what_each_gets_alone():
    given = experiment(FAMILIES["clip"])
    whole = calibrate(**given, settings=PAPER)
    for tower, key in (("vision_model", "pixel_values"), ("text_model", "input_ids")):
        keys = [key, "attention_mask"] if tower == "text_model" else [key]
        batches = {
            task: [{k: b[k] for k in keys} for b in given["batches"][task]]
            for task in given["batches"]
        }
        experts = {task: model.get_submodule(tower) for task, model in given["experts"].items()}
        base, merged = (given[role].get_submodule(tower) for role in ("base", "merged"))
        alone = calibrate(merged, base=base, experts=experts, batches=batches, settings=PAPER)
        assert same_bits(alone.model, whole.model.get_submodule(tower))
        assert [
            b for b in whole.blocks if b.name.startswith(tower.removesuffix("_model"))
        ] == alone.blocks
    assert same_bits(whole.model.visual_projection, given["merged"].visual_projection)
