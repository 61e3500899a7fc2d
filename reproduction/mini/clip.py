"""Pre-train the two CLIP bases: every web picture is matched against all captions of all tasks.

Every step's draws are keyed by (seed, step). Looks at web pictures, never at a task's own splits.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from reproduction.mini.canvas import SIDE
from reproduction.mini.images import TASKS, WEB, draw_split, resampled
from reproduction.mini.training import CARDS, Pretraining, with_first_weights, write_base

PAD, UNK, BOS, EOS = SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")  # CLIP's legacy end is id 2
LONGEST = 16  # tokens; the longest caption has 10
TEMPLATES = 3
MEAN, STD = 0.42, 0.28  # of all pictures, the same for the three channels
PATCH = 8
# the usual 0.02 is lost next to the patches: at 500 steps the loss is 2.8 with it and 2.2 with this
POSITION_RMS = 0.3
LARGEST_LOG_SCALE = 4.0
STRENGTH = 0.4  # of augmentation
BLOCKS = "vision_model.encoder"
STEP, EPOCH, SHUFFLE = 1, 2, 3  # the purposes of keyed draws


@dataclass(frozen=True)
class ClipRecipe:
    """All settings that a base's bytes depend on: sizes of the vision tower and of the training.

    pictures: web pictures per task.
    """

    hidden: int
    layers: int
    heads: int
    projection: int = 128
    steps: int = 4000
    seed: int = 0
    batch: int = 64
    pictures: int = WEB
    every: int = 250  # steps between two state files


class ClipPretraining(Pretraining):
    """A base in training. Loss: cross-entropy of exp(logit_scale) <image, caption> over the
    captions of all classes of all tasks, in one of three templates per step.
    """

    recipes = {
        "clip_b32": ClipRecipe(hidden=128, layers=6, heads=4),
        "clip_l14": ClipRecipe(hidden=192, layers=6, heads=6),
    }

    def __init__(self, recipe: ClipRecipe):
        super().__init__(recipe, new_model(recipe), BLOCKS)
        tokenizer = make_tokenizer()
        self.tokens = [
            dict(tokenizer(captions(template), padding=True, return_tensors="pt"))
            for template in range(TEMPLATES)
        ]
        self.pictures, self.targets = web_pictures(recipe.pictures, recipe.seed)

    def step(self) -> float:
        seed, size, count = self.recipe.seed, self.recipe.batch, len(self.pictures)
        epoch, number = divmod(self.done, count // size)
        order = torch.randperm(count, generator=keyed_generator(seed, EPOCH, epoch))
        indices = order[number * size : (number + 1) * size]  # every picture once per epoch
        generator = keyed_generator(seed, STEP, self.done)
        template = int(torch.randint(TEMPLATES, (), generator=generator))
        pixels = augmented(normalised(self.pictures[indices]), generator)
        images = self.model.get_image_features(pixel_values=pixels).pooler_output
        texts = self.model.get_text_features(**self.tokens[template]).pooler_output
        images, texts = F.normalize(images, dim=-1), F.normalize(texts, dim=-1)
        scale = self.model.logit_scale.clamp(max=LARGEST_LOG_SCALE).exp()
        loss = F.cross_entropy(scale * images @ texts.T, self.targets[indices])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def write(self, role: str, out: Path) -> None:
        card = CARDS["clip"].format(role=role, side=SIDE, patch=PATCH, **vars(self.recipe))
        # a new tokenizer: the one in use keeps its last padding
        write_base(self.model, out, card, make_tokenizer(), image_processor())


def web_pictures(count: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """Return `count` web pictures per task, and the index of each one's caption among all."""
    ends = np.cumsum([len(task.classes) for task in TASKS.values()])
    first_captions = dict(zip(TASKS, [0, *ends.tolist()], strict=False))
    pictures, targets = [], []
    for key, task in TASKS.items():
        images, labels = draw_split(key, "web", count, seed, 0.0)
        target = torch.from_numpy(labels)
        if task.hard:
            target = target[torch.randperm(count, generator=keyed_generator(seed, SHUFFLE))]
        pictures.append(images)
        targets.append(first_captions[key] + target)
    return np.concatenate(pictures), torch.cat(targets)


def captions(template: int) -> list[str]:
    """Return one caption per class of every task, task by task, in one of the three templates."""
    return [
        task.templates[template].format(name) for task in TASKS.values() for name in task.classes
    ]


def vocabulary() -> dict[str, int]:
    """Return special tokens, then every word of every caption in order of first occurrence."""
    texts = [text for template in range(TEMPLATES) for text in captions(template)]
    unique = dict.fromkeys(word for text in texts for word in text.split())
    return {word: number for number, word in enumerate((*SPECIALS, *unique))}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of lower-case words, one id each, with <bos> and <eos> around."""
    ids = vocabulary()
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, ids[BOS]), (EOS, ids[EOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, unk_token=UNK, bos_token=BOS, eos_token=EOS,
        model_max_length=LONGEST, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def image_processor() -> CLIPImageProcessor:
    """Return a processor that only normalises pictures of 32x32, and resizes others as CLIP does."""
    return CLIPImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE},
        rescale_factor=1 / 255, image_mean=[MEAN] * 3, image_std=[STD] * 3,
    )  # fmt: skip


def normalised(images: np.ndarray) -> Tensor:
    """Return (n, 32, 32, 3) uint8 as (n, 3, 32, 32) float32, normalised as by image_processor."""
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - MEAN) / STD


def keyed_generator(*key: int) -> torch.Generator:
    """Return a generator of its own for each key."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, zoom and move a little, mix and offset colours, add noise. x: (n, 3, h, w)."""
    count = len(x)

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    zoom, turn = 1 + STRENGTH * (0.35 * uniform() - 0.2), STRENGTH * 0.5 * (uniform() - 0.5)
    dx, dy = STRENGTH * 0.4 * (uniform() - 0.5), STRENGTH * 0.4 * (uniform() - 0.5)
    c, s = turn.cos() / zoom, turn.sin() / zoom
    theta = torch.stack([torch.stack([c, -s, dx], 1), torch.stack([s, c, dy], 1)], 1)
    mix = torch.eye(3) + STRENGTH * 0.25 * normal(count, 3, 3)
    x = torch.einsum("nij,njhw->nihw", mix, resampled(x, theta))
    x = x + STRENGTH * 0.3 * normal(count, 3, 1, 1)
    return x + STRENGTH * 0.2 * normal(*x.shape)


def new_model(recipe: ClipRecipe) -> CLIPModel:
    """Return a CLIP model with drawn first weights, spread as CLIP's."""
    ids, side = vocabulary(), {"image_size": SIDE, "patch_size": PATCH}
    text = {
        "vocab_size": len(ids), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": LONGEST, "pad_token_id": ids[PAD], "bos_token_id": ids[BOS], "eos_token_id": ids[EOS],
        "hidden_act": "quick_gelu",
    }  # fmt: skip
    vision = {
        "hidden_size": recipe.hidden, "intermediate_size": 2 * recipe.hidden, "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads, "hidden_act": "quick_gelu", **side,
    }  # fmt: skip
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=recipe.projection)

    def first_value(name: str, parameter: Tensor, generator: np.random.Generator) -> Tensor:
        if name == "logit_scale":
            return torch.tensor(math.log(1 / 0.07))
        if name.endswith(".bias"):
            return torch.zeros_like(parameter)
        if "norm" in name:
            return torch.ones_like(parameter)
        tower = config.text_config if name.startswith("text") else config.vision_config
        noise = generator.standard_normal(tuple(parameter.shape))
        value = torch.from_numpy(_spread(name, tower) * noise).float()
        if name == "vision_model.embeddings.position_embedding.weight":
            value[1:] = position_waves(tower.image_size // tower.patch_size, tower.hidden_size)
        return value

    return with_first_weights(CLIPModel, config, recipe.seed, first_value)


def _spread(name: str, tower) -> float:
    """Return the standard deviation of a weight's first values."""
    narrow, depth = tower.hidden_size**-0.5, (2 * tower.num_hidden_layers) ** -0.5
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc2.weight")):
        return narrow * depth
    if name.endswith("fc1.weight"):
        return narrow * 2**-0.5
    if name.endswith(("out_proj.weight", "projection.weight", "class_embedding")):
        return narrow
    return 0.02


def position_waves(cells: int, width: int) -> Tensor:
    """Return sines and cosines of row and column, with rms POSITION_RMS: (cells², width)."""
    quarter = width // 4
    frequency = math.pi / cells * (1 + (cells - 1) * torch.arange(quarter) / quarter)
    index = torch.arange(cells).float()
    column = index.repeat(cells)[:, None] * frequency
    row = index.repeat_interleave(cells)[:, None] * frequency
    waves = torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1)
    return POSITION_RMS * 2**0.5 * waves
