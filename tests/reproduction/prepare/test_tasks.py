"""The paper's tasks: prompts to the letter, pools, and which images a calibration draws."""

from hashlib import sha256
from zlib import crc32

import numpy as np
import pytest
import torch

from featcal.data.batches import draw_indices
from featcal.errors import BadSetting, UnknownKey
from reproduction.prepare.image_tasks import TASKS, load_prompts

SUMS = {  # of class names and of templates in label order, joined by line ends
    "sun397": ("dd1277b1cfcf09ba", "c97a3d1ad5819800"),
    "stanford-cars": ("93d089469409bbd0", "255ecc632c41182c"),
    "resisc45": ("3c2177013901f0ef", "8f390b8578e5c3bf"),
    "eurosat": ("ee2e41b9973e7206", "9bc85d9f1798d03b"),
    "svhn": ("29dd21f55e4611d4", "c0341e0a1fdfd8fb"),
    "gtsrb": ("953036bc5aedbe6b", "a6794061485dcfa2"),
    "mnist": ("29dd21f55e4611d4", "c0341e0a1fdfd8fb"),
    "dtd": ("681d23b9cd3c2ede", "1f6888d2130f62a4"),
    "oxford_flowers102": ("f5a3bda044faf55b", "bfcd4bbb214d5015"),
    "pcam": ("27352df7ede1fd87", "7c7758b084ef77fa"),
    "fer2013": ("0fece1ddf1a3ebf7", "ae805dccc6d01c6a"),
    "oxford-iiit-pet": ("8e35ab44db27d55a", "16a0790f0e45e97e"),
    "stl10": ("08b234ce7b11dbd3", "c97a3d1ad5819800"),
    "cifar100": ("3e2584150e2896e2", "9bbf912e1144ca4c"),
    "cifar10": ("bb3914949cecedee", "9bbf912e1144ca4c"),
    "food101": ("9c0eeb5a368baacb", "77a79bac7d9cf25b"),
    "fashion_mnist": ("249370ed4284a97d", "c97a3d1ad5819800"),
    "emnist_letters": ("cfa4f846a6dbeb24", "df7d55ac799e2a3b"),
    "kmnist": ("420ad158d8f0775d", "12c1113974e99b08"),
    "rendered-sst2": ("2e61aa7558046c2c", "9034019e8a14384c"),
}


def test_prompts_of_all_tasks_have_the_published_check_sums():
    def digest(lines):
        return sha256("\n".join(lines).encode()).hexdigest()[:16]

    assert {
        task: (digest(load_prompts(task).classes), digest(load_prompts(task).templates))
        for task in TASKS
    } == SUMS


def test_an_unknown_task_has_the_nearest_name():
    with pytest.raises(UnknownKey, match="did you mean 'mnist'"):
        load_prompts("mnits")


def test_draws_differ_by_task_and_seed_and_do_not_depend_on_each_other():
    assert not np.array_equal(draw_indices("mnist", 1000, 50, 0), draw_indices("svhn", 1000, 50, 0))
    assert not np.array_equal(
        draw_indices("mnist", 1000, 50, 0), draw_indices("mnist", 1000, 50, 1)
    )
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = draw_indices("mnist", 1000, 50, 0)
    assert torch.equal(before[0], torch.get_rng_state()) and np.array_equal(
        before[1], np.random.get_state()[1]
    )
    assert np.array_equal(first, draw_indices("mnist", 1000, 50, 0))
    key = [0, crc32(b"mnist"), crc32(b"calibration")]
    assert np.array_equal(first, np.random.default_rng(key).permutation(1000)[:50])


def test_a_larger_draw_begins_with_the_smaller_and_repeats_nothing():
    small, large = draw_indices("dtd", 300, 8, 7), draw_indices("dtd", 300, 300, 7)
    assert np.array_equal(small, large[:8]) and sorted(large) == list(range(300))


def test_more_samples_than_images_is_an_error_that_names_the_number():
    with pytest.raises(BadSetting, match=r"samples: 2000.*at most 1020.*oxford_flowers102"):
        draw_indices("oxford_flowers102", 1020, 2000, 0)
