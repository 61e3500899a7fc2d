"""Heads from prompts and images, and accuracies of many models in one pass."""

from types import SimpleNamespace

import checkpoints
import pytest
import torch
from torch.nn.functional import normalize

from featcal.errors import BadData, BadSetting, NotFinite
from featcal.evaluation import accuracy
from featcal.evaluation.accuracy import class_mean_head, evaluate_pool, percent, prompts_of
from featcal.models.batch import unit_length

CLASSES, TEMPLATES = ("cat", "red dog", "ship"), ("a photo of a {}", "the {}")


class Pictures(SimpleNamespace):
    def batches(self, indices, size):
        self.passes += 1
        for start in range(0, len(self.pixels), size):
            yield {"pixel_values": self.pixels[start : start + size]}


def pictures(count=30, seed=0, classes=CLASSES):
    pixels = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    labels = (torch.arange(count) % len(classes)).numpy()
    return Pictures(pixels=pixels, labels=labels, classes=classes, passes=0)


def head_of(clip, classes=CLASSES, batch=256):
    return accuracy.zero_shot_head(clip, checkpoints.tokenizer(), classes, TEMPLATES, batch=batch)


@pytest.mark.parametrize("batch", [1, 4, 256])
def test_prompt_head_equals_one_prompt_at_a_time(batch):
    assert prompts_of(["{cat}", "a {0} b"], ["the {}"]) == ["the {cat}", "the a {0} b"]
    clip, tokenizer = checkpoints.clip(), checkpoints.tokenizer()
    head = head_of(clip, batch=batch)
    assert not head.requires_grad
    with torch.no_grad():
        for name, row in zip(CLASSES, head, strict=True):
            prompts = [tokenizer(t.format(name), return_tensors="pt") for t in TEMPLATES]
            pooled = [clip.text_model(input_ids=p["input_ids"]).pooler_output for p in prompts]
            texts = [normalize(clip.text_projection(p)[0], dim=0) for p in pooled]
            assert torch.allclose(row, normalize(torch.stack(texts).mean(0), dim=0), atol=1e-6)


def test_class_means_equal_means_taken_class_by_class():
    clip, images = checkpoints.clip(), pictures()
    encoder = clip.vision_model, clip.visual_projection.weight
    features = unit_length(accuracy.projected_features(*encoder, {"pixel_values": images.pixels}))
    for label, row in enumerate(class_mean_head(*encoder, images, batch=7)):
        want = normalize(features[images.labels == label].mean(0), dim=0)
        assert torch.allclose(row, want, atol=1e-6)
    with pytest.raises(BadData, match="^pets: class 'ship' has no image"):
        class_mean_head(*encoder, pictures(2), task="pets")


@torch.no_grad()
def right_by_hand(module, clip, head, images):
    right = []
    for pixels, label in zip(images.pixels, images.labels, strict=True):
        feature = clip.visual_projection(module(pixel_values=pixels[None]).pooler_output)[0]
        logits = clip.logit_scale.exp() * (head @ normalize(feature, dim=0))
        right.append(int(logits.argmax()) == int(label))
    return right


def test_every_image_is_judged_as_by_hand_in_one_pass():
    clip = checkpoints.clip()
    sets = {"pets": pictures(23), "ships": pictures(11, seed=1, classes=CLASSES[:2])}
    heads = {task: head_of(clip, images.classes) for task, images in sets.items()}
    experts = {"pets": checkpoints.vision(1), "ships": checkpoints.vision(2)}
    models = {"base": clip.vision_model, "merged": checkpoints.vision(3), "expert": experts}
    some = {"f": lambda x: clip.get_image_features(**x).pooler_output}
    some |= {"one": {"ships": clip.vision_model}}
    correct = evaluate_pool(models | some, sets, heads, clip.visual_projection.weight, batch=5)
    assert list(correct["one"]) == ["ships"]
    for task, images in sets.items():
        assert images.passes == 1
        for name, module in {**models, "expert": experts[task]}.items():
            right = right_by_hand(module, clip, heads[task], images)
            assert correct[name][task].tolist() == right
            assert percent(correct[name][task]) == 100 * sum(right) / len(images.labels)
        assert torch.equal(correct["f"][task], correct["base"][task])


def test_nan_features_name_model_and_task():
    clip, broken = checkpoints.clip(), checkpoints.vision(1)
    broken.post_layernorm.weight.data[3] = float("nan")
    models = {"base": clip.vision_model, "merged": broken}
    heads, sets = {"pets": head_of(clip)}, {"pets": pictures(3)}
    with pytest.raises(NotFinite, match="model merged, task pets"):
        evaluate_pool(models, sets, heads, clip.visual_projection.weight)
    with pytest.raises(BadSetting, match="pets: number of classes.*at least two"):
        evaluate_pool(models, sets, {"pets": heads["pets"][:1]}, clip.visual_projection.weight)
