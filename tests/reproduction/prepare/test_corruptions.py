"""Corruptions: strength, range and direction; each picture's damage depends on itself alone."""

import checkpoints
import numpy as np
import pytest

from featcal.data.images import ImageSet
from reproduction.prepare.damage import CORRUPTIONS, NOISE, corrupted, trail

PLAIN = checkpoints.plain()


def pictures(n=12, side=32, value=None):
    pixels = np.random.default_rng([3, side]).integers(0, 256, (n, 3, side, side), dtype=np.uint8)
    if value is not None:
        pixels[:] = value
    return ImageSet(pixels, PLAIN, np.zeros(n, np.int64), ("one",))


def damaged(images, corruption, seed=42, task="mnist"):
    return corrupted(images, task, corruption, seed).pixels


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_damage_depends_on_seed_task_and_place_and_on_no_other_picture(corruption):
    all_damaged = damaged(pictures(), corruption)[:]
    assert all_damaged.dtype == np.uint8 and all_damaged.shape == (12, 3, 32, 32)
    assert np.array_equal(damaged(pictures(), corruption)[np.array([7, 2])], all_damaged[[7, 2]])
    same = pictures(n=2, value=128)
    same.pixels[:, :, 8:24, 8:24] = 30  # blur needs an edge
    first = damaged(same, corruption)[:]
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, damaged(same, corruption, seed=43)[:])
    assert not np.array_equal(first, damaged(same, corruption, task="svhn")[:])


def test_noise_has_its_standard_deviation_and_keeps_the_mean():
    change = damaged(pictures(n=40, value=128), "gaussian_noise")[:] / 255 - 128 / 255
    assert change.std() == pytest.approx(NOISE, rel=0.02) and abs(change.mean()) < 0.003


def test_blur_keeps_a_constant_picture_and_smooths_another():
    assert (damaged(pictures(value=77), "motion_blur")[:] == 77).all()
    rough = pictures()
    assert damaged(rough, "motion_blur")[:].std() < 0.8 * rough.pixels.std()


@pytest.mark.parametrize("angle", [-45.0, -10.0, 0.0, 30.0, 45.0])
def test_a_trail_runs_in_its_direction_and_sums_to_one(angle):
    for side in (32, 224):
        kernel = trail(angle, side / 224)
        y, x = np.indices(kernel.shape) - np.array(kernel.shape)[:, None, None] // 2
        centre = (kernel * x).sum(), -(kernel * y).sum()  # rows count downwards
        assert kernel.sum() == pytest.approx(1.0) and (kernel >= 0).all()
        assert np.rad2deg(np.arctan2(centre[1], centre[0])) == pytest.approx(angle, abs=1e-6)


def test_fog_brightens_the_dark_and_takes_contrast():
    scene = pictures()
    scene.pixels[:, :, :16] = 20
    scene.pixels[:, :, 16:] = 230
    foggy = damaged(scene, "fog")[:].astype(float)
    assert foggy[:, :, :16].mean() > 60
    assert foggy[:, :, 16:].mean() - foggy[:, :, :16].mean() < 0.4 * 210
    assert foggy.max() <= 230  # the brightest value is kept, not passed
