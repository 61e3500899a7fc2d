"""Read a suite: the settings that name checkpoints and data for the roles of the experiments.

Each file of suites/ is one: mini (made from a seed), paper (hub), files (the user's own). Opens no
model and no data, and imports no torch.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic_core import PydanticCustomError

from featcal.errors import BadSetting, UnknownKey
from featcal.settings import Fraction, Settings, require
from reproduction.experiments import CHAT_POOL, DOMAIN_POOL, GLUE_POOL, Names, Pool, require_known
from reproduction.prepare.tasks import TASKS
from reproduction.results import read_yaml

SECTIONS = ("chat", "language", "photos", "sentences")  # null or left out where a suite has none
# The expert whose adapter works in each test of language models; adapters know their task.
DOMAINS = {
    "math500": "math", "gsm8k": "math", "humaneval_plus": "coding", "mbpp_plus": "coding",
    "ifeval": "instruction", "arc_challenge": "instruction",
}  # fmt: skip
FINE_TUNE = "fine_tune"
Processor = Literal["pil", "torchvision"]  # the library that resizes images


def experts_source(experts: str) -> str:
    """Return the experts' source. Raises: PydanticCustomError."""
    if experts != FINE_TUNE and "{task}" not in experts:
        expected = f"must be {FINE_TUNE}, or a hub id with {{task}} in it"
        raise PydanticCustomError("source", expected)
    return experts


def present(roles: Any) -> Any:
    """Return the roles without those that are null."""
    is_mapping = isinstance(roles, Mapping)
    return {key: role for key, role in roles.items() if role is not None} if is_mapping else roles


ExpertsFrom = Annotated[str, AfterValidator(experts_source)]
Present = BeforeValidator(present)


class CosineRate(Settings):
    """A learning rate with linear warm-up and, unless overridden, cosine decay to zero."""

    section = "fine_tune"
    steps: PositiveInt = 100
    lr: PositiveFloat
    batch: PositiveInt
    warm_up: PositiveInt = 10

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        cosine = 1 + math.cos(math.pi * step / self.steps)
        return self.lr * min(1.0, (step + 1) / self.warm_up) * 0.5 * cosine


class FineTune(CosineRate):
    """Training of an expert of images: SGD with Nesterov momentum.

    frozen: first parts of the names of parameters that stay.
    """

    lr: PositiveFloat = 0.03
    batch: PositiveInt = 48
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    clip: PositiveFloat = 1.0
    frozen: tuple[str, ...] = ("embeddings", "pre_layrnorm")


class Lora(Settings):
    """Rank r, α, and the last part of the names of the linears that get an adapter."""

    section = "lora"
    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    modules: tuple[str, ...] = ("q", "v")


class FineTuneText(CosineRate):
    """Training of an expert of texts: AdamW on the cross-entropy of the text after the prompt.

    frozen: embeddings and language head lie outside the blocks, where no calibration could follow
    the experts (vocabularies of published experts even differ in size).   lora: train low-rank
    adapters only.   tokens: maximum tokens per text. Default: the model's usual length.
    """

    lr: PositiveFloat = 1e-3
    batch: PositiveInt = 32
    decay: Fraction = 0.0
    clip: PositiveFloat = 1.0
    frozen: tuple[str, ...] = ("shared", "lm_head", "model.embed_tokens")
    lora: Lora | None = None
    tokens: PositiveInt | None = None


class FineTuneSentences(CosineRate):
    """Training of an expert of sentences or real images: AdamW, linear warm-up and decay.

    The loss is the cross-entropy of head · feature / temperature; of images, at CLIP's scale.
    """

    lr: NonNegativeFloat = 2.0e-4
    batch: PositiveInt = 32
    warm_up: PositiveInt = 20
    decay: NonNegativeFloat = 0.01
    clip: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.05
    frozen: tuple[str, ...] = ()

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        falling = (self.steps - step) / max(self.steps - self.warm_up, 1)
        return self.lr * min((step + 1) / self.warm_up, falling, 1.0)


class ImageData(Settings):
    """Source of the images: synthetic (mini), one folder per task in `folder` (files), the hub.

    train, validation, test: images per task; None: all.   processor: what resizes images; those of
    mini are drawn at their models' size.
    """

    source: Literal["mini", "files", "hub"]
    train: PositiveInt | None = None
    validation: PositiveInt | None = None
    test: PositiveInt | None = None
    seed: NonNegativeInt = 0
    strength: Fraction = 0.0
    folder: str | None = None
    processor: Processor = "pil"

    def check(self) -> None:
        require_source(self, "train", "validation", "test")
        needless = self.source != "mini" or self.processor == "pil"
        expected = "must be left out: pictures of mini are drawn at their models' size"
        require(needless, "processor", self.processor, expected)


class TextData(Settings):
    """Source of the texts: synthetic (mini), one folder per task in `folder` (files), the hub.

    train, validation, test: samples per task; None: all.   domain_train: of the experts' domains.
    """

    source: Literal["mini", "files", "hub"]
    train: PositiveInt | None = None
    domain_train: PositiveInt | None = None
    validation: PositiveInt | None = None
    test: PositiveInt | None = None
    seed: NonNegativeInt = 0
    folder: str | None = None

    def check(self) -> None:
        require_source(self, "train", "domain_train", "validation", "test")


class Role(Settings):
    """An image encoder, a folder or hub id, and its experts: `fine_tune` or a pattern with {task}."""

    clip: str
    experts: ExpertsFrom = FINE_TUNE


class SentenceRole(Settings):
    """A sentence encoder: a folder below the project, a hub id, or `pypi:<name>` for a package.

    fine_tune: of its experts, where not as of the others.
    """

    model: str
    fine_tune: FineTuneSentences | None = None


class PhotoRole(SentenceRole):
    """A vision model for real images, a Dinov2Model: named as a sentence encoder is."""


class LanguageRole(Settings):
    """A language model, a folder or hub id, and its experts: `fine_tune` or a pattern with {task}.

    steps: of tasks that need other than fine_tune.steps.   dtype: of the stored weights.
    """

    model: str
    experts: ExpertsFrom = FINE_TUNE
    fine_tune: FineTuneText = FineTuneText()
    steps: Mapping[str, PositiveInt] = {}
    dtype: Literal["float32", "bfloat16"] = "float32"

    def fine_tuning(self, task: str) -> FineTuneText:
        """Return the training of one task's expert."""
        return self.fine_tune.but(steps=self.steps.get(task, self.fine_tune.steps))


class ChatRole(LanguageRole):
    """A language model that answers instructions: named as a sentence encoder is."""


class SentenceEncoders(Settings):
    """The sentence encoders, whose experts are fine-tuned here.

    texts: folder below the project with one folder per task.   pools: tasks by size.
    """

    section = "sentences"
    texts: str = ""
    pools: Mapping[PositiveInt, Names] = {}
    roles: Annotated[Mapping[str, SentenceRole], Present] = {}
    fine_tune: FineTuneSentences = FineTuneSentences()

    def check(self) -> None:
        if self.roles:
            require(bool(self.texts), "sentences.texts", None, "must name the folder of the texts")
            require_nested("sentences.pools", self.pools)


class Photos(Settings):
    """The vision models of real images, whose experts are fine-tuned here; heads are class means.

    folder: below the project, with one folder per task.   size: pixels of a side that models read.
    """

    section = "photos"
    folder: str = ""
    size: PositiveInt = 70
    pools: Mapping[PositiveInt, Names] = {}
    roles: Annotated[Mapping[str, PhotoRole], Present] = {}
    fine_tune: FineTuneSentences = FineTuneSentences()

    def check(self) -> None:
        if self.roles:
            require_nested("photos.pools", self.pools)


class Language(Settings):
    """The language models.   pools: tasks by pool, each with one expert per model.

    tests: by the key of the pool of domains, the test: ours or a public one.
    """

    section = "language"
    texts: TextData | None = None
    pools: Mapping[str, Names] = {}
    roles: Annotated[Mapping[str, LanguageRole], Present] = {}
    tests: Mapping[str, str] = {}

    def check(self) -> None:
        for part, allowed in (("pools", (GLUE_POOL, DOMAIN_POOL)), ("tests", tuple(DOMAINS))):
            for name in getattr(self, part):
                require_known(f"language.{part}", name, allowed)
        has_source = self.texts is not None or not self.roles
        require(has_source, "language.texts", None, "must say where texts come from")


class Chat(Settings):
    """The language models that answer instructions about real texts.

    texts: folder with one folder per task.   tasks: with one expert each.   unseen: without.
    tokens: of a text.   train, validation, test: maximum rows of a task.
    """

    section = "chat"
    texts: str = ""
    tokens: PositiveInt = 32
    train: PositiveInt = 320
    validation: PositiveInt = 40
    test: PositiveInt = 80
    tasks: Names = ("rt_polarity",)
    unseen: tuple[str, ...] = ()
    roles: Annotated[Mapping[str, ChatRole], Present] = {}


class Suite(Settings):
    """The checkpoints and data of all roles; a role that is null is not run.

    heads: prompts, class_means, or auto: prompts where the text tower knows every word of the class
    names.   expert_steps: of tasks that need other than fine_tune.steps.   device: auto is the GPU
    where there is one.
    """

    name: str
    data: ImageData
    pools: Mapping[PositiveInt, Names]
    roles: Annotated[Mapping[str, Role], Present]
    fine_tune: FineTune
    heads: Literal["prompts", "class_means", "auto"]
    expert_seed: NonNegativeInt
    expert_steps: Mapping[str, PositiveInt]
    workers: NonNegativeInt
    device: Literal["cpu", "cuda", "auto"]
    language: Language = Language()
    sentences: SentenceEncoders = SentenceEncoders()
    photos: Photos = Photos()
    chat: Chat = Chat()

    def check(self) -> None:
        any_name = self.data.source == "files"  # folders, whatever their names
        require_nested("pools", self.pools, () if any_name else tuple(TASKS))
        for task in self.expert_steps:
            require_known("expert_steps", task, self.tasks)

    def fine_tuning(self, task: str) -> FineTune:
        """Return the training of one image task's expert."""
        return self.fine_tune.but(steps=self.expert_steps.get(task, self.fine_tune.steps))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return every task of images in any pool, in the order of the largest."""
        return max(self.pools.values(), key=len)

    @property
    def every_role(self) -> dict[str, Role | LanguageRole | SentenceRole]:
        """Return the models of images, of sentences, of real images and of texts."""
        encoders = {**self.roles, **self.sentences.roles, **self.photos.roles}
        return {**encoders, **self.language.roles, **self.chat.roles}

    def pools_of(self, role: str) -> dict[Pool, tuple[str, ...]]:
        """Return the tasks of a role's pools: by name for texts, else by size."""
        if role in self.language.roles:
            return {**self.language.pools}
        if role in self.chat.roles:
            return {CHAT_POOL: self.chat.tasks}
        groups = (group for group in (self.sentences, self.photos) if role in group.roles)
        return {**next(groups, self).pools}

    def tasks_of(self, role: str, pool: Pool) -> tuple[str, ...]:
        """Return the tasks of one pool of a role. Raises: BadSetting for a pool it lacks."""
        pools = self.pools_of(role)
        if pool not in pools:
            names = ", ".join(map(str, pools))
            problem = f"is not in suites/{self.name}.yaml for {role}; there are {names}"
            raise BadSetting("pool", pool, problem)
        return pools[pool]


def load_suite(root: Path, name: str) -> Suite:
    """Return the suite of `suites/<name>.yaml`. Raises: UnknownKey, BadSetting."""
    location = f"suites/{name}.yaml"
    if not (root / location).is_file():
        raise UnknownKey("suite", name, sorted(p.stem for p in (root / "suites").glob("*.yaml")))
    raw = read_yaml(root / location)
    settings = {key: value for key, value in raw.items() if key not in SECTIONS or value}
    return Suite.from_mapping({**settings, "name": name}, location)


def require_source(data: Any, *counts: str) -> None:
    """Raise BadSetting unless synthetic samples have counts, and files a folder."""
    for name in counts if data.source == "mini" else ():
        require(getattr(data, name) is not None, name, None, "must be a number of samples")
    has_folder = data.source != "files" or bool(data.folder)
    require(has_folder, "folder", data.folder, "must name the folder with your tasks")


def require_nested(
    location: str, pools: Mapping[int, Sequence[str]], known: Sequence[str] = ()
) -> None:
    """Raise UnknownKey or BadSetting unless there are pools, all of them in the largest one.

    known: all tasks; empty where any name may be one.
    """
    require(bool(pools), location, pools, "must hold a pool of tasks, for example 8: [mnist, svhn]")
    largest = max(pools.values(), key=len)
    for size, tasks in pools.items():
        for task in tasks:
            if known and task not in known:
                raise UnknownKey(f"{location}.{size}", task, list(known))
        inside = set(tasks) <= set(largest)
        require(inside, f"{location}.{size}", tasks, "must hold only tasks of the largest pool")
