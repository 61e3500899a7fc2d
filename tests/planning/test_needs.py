"""What a run needs, against sums written out by hand for one small CLIP tower."""

from dataclasses import replace

import pytest
from tiny import clip

from featcal.blocks.plans import plan_for
from featcal.cli.plan import meta_batch
from featcal.planning import memory, needs, work
from featcal.planning.block_shape import SiteShape
from featcal.planning.meta_profiler import to_meta
from featcal.planning.shapes import model_shape
from featcal.planning.workload import Workload
from featcal.settings import Calibration

D, WIDE, TOKENS, HEADS = (
    32,
    96,
    5,
    4,
)  # of tests.tiny.clip; two blocks, patches of 8 x 8 pixels, float32
BLOCK = (
    4 * (D * D + D) + D * WIDE + WIDE + WIDE * D + D + 4 * D
)  # parameters: q k v out, two of the MLP, two norms
ENTRY = (
    D + 3 * 8 * 8 * D + TOKENS * D + 2 * D
)  # class token, patches, positions, norm before the first block


def shape(size=3):
    model = to_meta(clip()).float().eval()
    return model_shape(model, plan_for(model), meta_batch(model, size, None, False))


def load(**more):
    return Workload(**({"tasks": 3, "samples": 7, "batch": 3} | more))


def test_sites_and_bytes_of_a_block_are_those_counted_by_hand():
    (stack,) = shape().stacks
    first, last = stack.blocks
    rows = 3 * TOKENS
    narrow = SiteShape(WIDE, D, rows, kept=True)
    assert first.sites == (
        SiteShape(D, 3 * D, rows),
        SiteShape(D, D, rows),
        SiteShape(D, WIDE, rows),
        narrow,
    )
    assert first.sites[0].linears == ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj")
    # only the class token is read after the last block, so keys and values weigh tokens differently
    # from queries there
    assert sorted(site.o for site in last.sites) == sorted([2 * D, D, D, WIDE, D])
    assert first.weights == 4 * BLOCK and stack.weights == 4 * ENTRY
    assert first.features == stack.features == 4 * rows * D
    # norms read the block's input (not counted) and the middle; q, k, v the first norm; out the
    # heads; the MLP its norm and
    # width; what the MLP puts out is kept
    assert first.captured == 4 * rows * (5 * D + WIDE)
    assert [site.weighed for site in first.sites] == [False] * 4 and [
        site.weighed for site in last.sites
    ].count(False) == 1


def test_one_pass_of_a_block_is_its_linears_and_its_attention():
    (stack,) = shape().stacks
    rows = 3 * TOKENS
    attention = 2 * 2 * 3 * HEADS * TOKENS * TOKENS * (D // HEADS)
    linears = 2 * rows * (4 * D * D + 2 * D * WIDE)
    assert stack.blocks[0].forward == linears + attention
    assert (
        stack.blocks[0].student_pass(stack.blocks[0].parts)
        == linears - 2 * rows * D * WIDE + attention
    )
    assert stack.entry == 2 * 3 * 4 * (3 * 8 * 8) * D  # four patches of three images


def test_moments_and_systems_are_float64_and_the_narrow_site_is_folded():
    wide, narrow = SiteShape(D, 3 * D, 15), SiteShape(WIDE, D, 15)
    assert memory.moments_bytes(wide) == 8 * (2 * D * D + 2 * D)
    assert memory.moments_bytes(narrow) == 8 * (WIDE * WIDE + WIDE * D + 2 * WIDE)
    kept = [memory.kept_bytes(wide, seen) for seen in range(4)]
    assert kept == [0, *[8 * (D * D + 3 * D * D + D + 3 * D)] * 3]


def test_work_of_one_site_is_that_of_its_products():
    site = SiteShape(64, 16, 100)
    assert (
        work.gram_work(100, 256) == 2 * 100 * 256 * 256 * 5 // 8
    )  # four stripes above the diagonal
    assert work.gram_work(100, 256, on_gpu=True) == 2 * 100 * 256 * 256
    assert work.moments_work(site) == work.gram_work(100, 64) + 2 * (2 * 100 * 64 * 16)
    assert (
        work.moments_work(replace(site, kept=True), 0.5)
        == work.gram_work(50, 64) + 2 * 50 * 64 * 16
    )
    product = 2 * 64 * 64 * 16
    assert work.systems_work(site, 3, Calibration()) == 3 * product + product + 64**3 // 3 + product
    prior = Calibration(prior=0.1)  # τᵀτ and its right side
    assert (
        work.systems_work(site, 3, prior)
        == 3 * (product + 2 * product) + product + 64**3 // 3 + product
    )


def test_the_phases_of_a_run_are_the_parts_counted_by_hand():
    found = memory.phases(shape(), load())
    # of three tasks the second, while the third one's block is read ahead
    assert found["observe"]["weights"] == 3 * 4 * BLOCK
    assert [memory.open_blocks(shape().blocks[0], seen, load()) for seen in (1, 2)] == [
        3 * 4 * BLOCK,
        2 * 4 * BLOCK,
    ]
    assert found["start"]["weights"] == 4 * (
        2 * ENTRY + 2 * D
    )  # of the student also the norm after the last block
    assert found["solve"]["weights"] == 2 * 4 * BLOCK
    last = shape().blocks[-1]
    assert memory.solving(last, last.sites, 1, load())["solutions"] == 8 * D * last.sites[0].o
    left = memory.kept_bytes(last.sites[-1], 3)
    assert memory.solving(last, last.sites, len(last.sites) - 1, load())["systems"] == left
    assert (
        memory.solving(last, last.sites, 0, load())["working"]
        == (4 + 4 + 8 + 8) * D * last.sites[0].o
    )
    assert found["advance"]["weights"] == 4 * BLOCK


def test_the_files_of_a_run_are_its_solved_blocks_and_the_model_with_one_tensor_twice():
    whole = 4 * (2 * BLOCK + ENTRY + 2 * D)
    patches = 4 * 3 * 8 * 8 * D
    assert needs.folders(shape()) == {
        "solved blocks": 4 * 2 * BLOCK,
        "calibrated model": whole,
        "while joining": patches,
    }


def test_features_wait_for_all_tasks_samples_and_both_tracks():
    shapes = {size: shape(size) for size in (3, 2, 1)}
    found = needs.needs(shapes, load())
    assert found.waiting == {"gpu": 0, "host": 2 * 3 * 7 * TOKENS * D * 4, "disk": 0}
    tensors = found.waiting["host"] + max(sum(parts.values()) for parts in found.phases.values())
    assert found.host == needs.LIBRARIES + tensors
    assert needs.needs(shapes, load(drawn=1000)).host == found.host + 1000


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"host_budget": 1000}, {"gpu": 0, "host": 1000, "disk": -1000}),
        ({"device_budget": 1000}, {"gpu": 0, "host": 0, "disk": 0}),
        ({"device_budget": 1000, "on_gpu": True}, {"gpu": 1000, "host": -1000, "disk": 0}),
        (
            {"device_budget": 10, "host_budget": 20, "on_gpu": True},
            {"gpu": 10, "host": 20, "disk": -30},
        ),
    ],
)
def test_what_exceeds_a_budget_waits_on_the_next_place(more, expected):
    whole = 2 * 3 * 7 * TOKENS * D * 4
    found = needs.shared_out(whole, load(**more))
    rest = next((place for place, size in expected.items() if size < 0), None)
    wanted = {place: whole + size if place == rest else size for place, size in expected.items()}
    assert found == (wanted if rest else {"gpu": 0, "host": whole, "disk": 0})


def test_depth_and_tasks_leave_the_memory_at_work_as_it_is():
    def of(layers, tasks):
        model = to_meta(clip(num_hidden_layers=layers)).float().eval()
        found = model_shape(model, plan_for(model), meta_batch(model, 3, None, False))
        return memory.phases(found, load(tasks=tasks, samples=20))

    assert of(2, 3) == of(6, 3) == of(2, 8)
    # of two tasks the first has no system beside the block that is read ahead
    assert of(2, 2)["observe"]["weights"] < of(2, 3)["observe"]["weights"]
