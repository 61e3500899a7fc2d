"""Heads from prompts and pictures, and accuracies of many models in one pass."""

from types import SimpleNamespace

import checkpoints
import pytest
import torch
from torch.nn.functional import normalize

from featcal.errors import BadData, NotFinite
from featcal.evaluation.zero_shot import (
    class_mean_head,
    evaluate_pool,
    features_of,
    percent,
    unit_features,
    words_known,
    zero_shot_head,
)

CLASSES, TEMPLATES = ("cat", "red dog", "ship"), ("a photo of a {}", "the {}")


class Pictures(SimpleNamespace):
    """Random pictures with labels; counts how often batches are asked for."""

    def batches(self, indices, size):
        self.passes += 1
        for start in range(0, len(self.pixels), size):
            yield {"pixel_values": self.pixels[start : start + size]}


def pictures(count=30, seed=0, classes=CLASSES):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(classes)
    return Pictures(
        pixels=torch.randn(count, 3, 32, 32, generator=generator),
        labels=labels.numpy(),
        classes=classes,
        passes=0,
    )


def test_prompt_head_equals_one_prompt_at_a_time():
    clip, tokenizer = checkpoints.clip(), checkpoints.tokenizer()
    head = zero_shot_head(clip, tokenizer, CLASSES, TEMPLATES, batch=4)
    with torch.no_grad():
        for name, row in zip(CLASSES, head, strict=True):
            prompts = [tokenizer(t.format(name), return_tensors="pt") for t in TEMPLATES]
            texts = [
                clip.text_projection(clip.text_model(input_ids=p["input_ids"]).pooler_output)[0]
                for p in prompts
            ]
            want = normalize(torch.stack([normalize(text, dim=0) for text in texts]).mean(0), dim=0)
            assert torch.allclose(row, want, atol=1e-6)


def test_prompt_head_does_not_depend_on_the_batch():
    clip, tokenizer = checkpoints.clip(), checkpoints.tokenizer()
    one, all_at_once = (
        zero_shot_head(clip, tokenizer, CLASSES, TEMPLATES, batch=n) for n in (1, 256)
    )
    assert torch.allclose(one, all_at_once, atol=1e-6) and not one.requires_grad


def test_braces_in_a_class_name_are_kept():
    seen = []

    def tokenizer(prompts, **options):
        seen.extend(prompts)
        return checkpoints.tokenizer()(prompts, **options)

    zero_shot_head(checkpoints.clip(), tokenizer, ["{cat}", "a {0} b"], ["photo of {}"])
    assert seen == ["photo of {cat}", "photo of a {0} b"]


def test_words_outside_the_vocabulary_are_noticed():
    tokenizer = checkpoints.tokenizer()
    assert words_known(tokenizer, CLASSES, TEMPLATES)
    assert not words_known(tokenizer, (*CLASSES, "zebra"), TEMPLATES)
    assert not words_known(tokenizer, CLASSES, ("a painting of {}",))


def test_an_end_token_that_doubles_as_unknown_does_not_count():
    tokenizer = checkpoints.tokenizer()
    tokenizer.unk_token = tokenizer.eos_token  # as in CLIP's own tokenizer
    assert words_known(tokenizer, CLASSES, TEMPLATES)


def test_features_are_the_projected_pooled_output_of_clip_itself():
    clip, images = checkpoints.clip(), pictures(4)
    got = unit_features(
        clip.vision_model, clip.visual_projection.weight, {"pixel_values": images.pixels}
    )
    with torch.no_grad():
        want = normalize(clip.get_image_features(pixel_values=images.pixels).pooler_output, dim=-1)
    assert torch.allclose(got, want, atol=1e-6)


def test_class_means_equal_means_taken_class_by_class():
    clip, images = checkpoints.clip(), pictures()
    head = class_mean_head(clip.vision_model, clip.visual_projection.weight, images, batch=7)
    features = features_of(clip.vision_model, clip.visual_projection.weight, images, 30)
    for label, row in enumerate(head):
        assert torch.allclose(
            row, normalize(features[images.labels == label].mean(0), dim=0), atol=1e-6
        )


def test_a_class_without_pictures_has_no_mean_and_is_named():
    clip = checkpoints.clip()
    images = pictures(2)
    with pytest.raises(BadData, match="class 'ship' has no picture"):
        class_mean_head(clip.vision_model, clip.visual_projection.weight, images)


def right_by_hand(module, clip, head, images):
    right = []
    with torch.no_grad():
        for pixels, label in zip(images.pixels, images.labels, strict=True):
            feature = clip.visual_projection(module(pixel_values=pixels[None]).pooler_output)[0]
            logits = clip.logit_scale.exp() * (head @ normalize(feature, dim=0))
            right.append(int(logits.argmax()) == int(label))
    return right


def test_every_picture_is_judged_as_by_hand_in_one_pass():
    clip = checkpoints.clip()
    projection = clip.visual_projection.weight
    sets = {"pets": pictures(23), "ships": pictures(11, seed=1, classes=CLASSES[:2])}
    heads = {
        t: zero_shot_head(clip, checkpoints.tokenizer(), s.classes, TEMPLATES)
        for t, s in sets.items()
    }
    experts = {"pets": checkpoints.vision(1), "ships": checkpoints.vision(2)}
    models = {"base": clip.vision_model, "merged": checkpoints.vision(3), "expert": experts}
    judged = evaluate_pool(models, sets, heads, projection, batch=5)
    for task, images in sets.items():
        assert images.passes == 1
        for name, module in {**models, "expert": experts[task]}.items():
            right = right_by_hand(module, clip, heads[task], images)
            assert judged[name][task].tolist() == right and percent(
                judged[name][task]
            ) == 100 * sum(right) / len(images.labels)


def test_a_model_given_for_one_task_is_judged_for_that_task_only():
    clip, sets = checkpoints.clip(), {"a": pictures(4), "b": pictures(4, seed=1)}
    heads = dict.fromkeys(sets, zero_shot_head(clip, checkpoints.tokenizer(), CLASSES, TEMPLATES))
    judged = evaluate_pool(
        {"expert": {"b": clip.vision_model}}, sets, heads, clip.visual_projection.weight
    )
    assert list(judged["expert"]) == ["b"]


def test_a_function_in_place_of_a_model_gives_projected_features():
    clip, images = checkpoints.clip(), pictures(9)
    head = {"a": zero_shot_head(clip, checkpoints.tokenizer(), CLASSES, TEMPLATES)}

    def adapted(inputs):
        return clip.get_image_features(**inputs).pooler_output

    judged = evaluate_pool(
        {"f": adapted, "m": clip.vision_model}, {"a": images}, head, clip.visual_projection.weight
    )
    assert judged["f"]["a"].tolist() == judged["m"]["a"].tolist()


def test_features_that_are_no_numbers_name_model_and_task():
    clip = checkpoints.clip()
    head = {"pets": zero_shot_head(clip, checkpoints.tokenizer(), CLASSES, TEMPLATES)}
    broken = checkpoints.vision(1)
    broken.post_layernorm.weight.data[3] = float("nan")
    with pytest.raises(NotFinite, match="model merged, task pets"):
        evaluate_pool(
            {"base": clip.vision_model, "merged": broken},
            {"pets": pictures(3)},
            head,
            clip.visual_projection.weight,
        )
