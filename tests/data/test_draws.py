"""Draws of samples: keyed by task and seed, nested, and apart from the global generators."""

from zlib import crc32

import numpy as np
import pytest
import torch

from featcal.data.batches import draw_indices
from featcal.errors import BadSetting


def test_a_draw_depends_on_task_and_seed_only_and_begins_with_a_smaller_one():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = draw_indices("mnist", 1000, 50, 0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    key = [0, crc32(b"mnist"), crc32(b"calibration")]
    assert np.array_equal(first, np.random.default_rng(key).permutation(1000)[:50])
    for task, seed in (("svhn", 0), ("mnist", 1)):
        assert not np.array_equal(first, draw_indices(task, 1000, 50, seed))
    whole = draw_indices("mnist", 1000, 1000, 0)
    assert np.array_equal(first, whole[:50]) and sorted(whole) == list(range(1000))


def test_more_samples_than_images_is_an_error_that_names_the_number():
    with pytest.raises(BadSetting, match=r"samples: 2000.*at most 1020.*oxford_flowers102"):
        draw_indices("oxford_flowers102", 1020, 2000, 0)
