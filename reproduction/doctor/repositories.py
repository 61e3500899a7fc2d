"""Every repository of the hub that a suite asks for, with what is known of its size before the hub
is asked. Opens nothing.
"""

from dataclasses import dataclass

from featcal.data.places import Kind
from reproduction.experiments.runs import GLUE_POOL
from reproduction.prepare.image_tasks import TASKS
from reproduction.prepare.packages import PREFIX
from reproduction.prepare.suite import Suite
from reproduction.prepare.text_tasks import DOMAINS, GLUE, HUB_ID, PUBLIC

# Bytes that are downloaded of a model: parameters times those of one number. Sources: recipes of
# the paper's checkpoints (the
# models' pages on the hub; a Llama is counted in half precision), for whole CLIPs and T5 the
# parameters of their configurations.
MODEL_BYTES = {
    "openai/clip-vit-base-patch32": 151_277_313 * 4,
    "openai/clip-vit-large-patch14": 427_616_513 * 4,
    "tanganke/clip-vit-base-patch32_": 87_456_000 * 4,
    "tanganke/clip-vit-large-patch14_": 303_179_776 * 4,
    "sentence-transformers/all-MiniLM-L6-v2": 90_868_376,
    "google/flan-t5-base": 247_577_856 * 4,
    "tanganke/flan-t5-base_": 247_577_856 * 4,
    "google/flan-t5-large": 783_150_080 * 4,
    "tanganke/flan-t5-large_": 18_900_000,  # adapters of rank 16
    "meta-llama/Llama-3.2-3B": 6_440_000_000,
    "MergeBench/Llama-3.2-3B": 6_440_000_000,
    "meta-llama/Llama-3.1-8B": 16_000_000_000,
    "MergeBench/Llama-3.1-8B": 16_000_000_000,
}
# Test images of the paper's tasks, all of which are decoded: counts of the recipes
TEST_IMAGES = {
    "sun397": 19850, "stanford-cars": 8041, "resisc45": 6300, "eurosat": 2700, "svhn": 26032, "gtsrb": 12630, "mnist": 10000,
    "dtd": 1880, "oxford_flowers102": 6149, "pcam": 32768, "fer2013": 7178, "oxford-iiit-pet": 3669, "stl10": 8000,
    "cifar100": 10000, "cifar10": 10000, "food101": 25250, "fashion_mnist": 10000, "emnist_letters": 20800, "kmnist": 10000,
    "rendered-sst2": 1821,
}  # fmt: skip
# and training images of the tasks that have few of them; of larger splits only drawn ones are
# decoded (data/decoded.py)
TRAIN_IMAGES = {
    "stanford-cars": 8144, "dtd": 3760, "oxford_flowers102": 1020, "oxford-iiit-pet": 3680, "stl10": 5000, "rendered-sst2": 6920,
}  # fmt: skip
DECODED = 3 * 224 * 224  # bytes of one picture


@dataclass(frozen=True)
class Repository:
    """One repository. part: the role or the pool that asks for it.   bytes: to download; None where
    only the hub knows.
    """

    name: str
    kind: Kind
    part: str
    bytes: int | None


def repositories(suite: Suite) -> list[Repository]:
    """What the suite asks the hub for, each once, in the order of its roles and pools; nothing for
    suites of local files.
    """
    found: list[Repository] = []
    for name, role in suite.roles.items():
        found += _models(name, role.clip, role.experts, suite.tasks)
    for name, encoder in suite.sentences.roles.items():
        if not encoder.model.startswith(PREFIX):
            found += _models(name, encoder.model, "", ())
    for name, text_role in suite.language.roles.items():
        pool = GLUE_POOL if "t5" in name else "mergebench"
        found += _models(
            name, text_role.model, text_role.experts, suite.language.pools.get(pool, ())
        )
    if suite.data.source == "hub":
        for task in suite.tasks:
            smallest = min(size for size, tasks in suite.pools.items() if task in tasks)
            found.append(
                Repository(TASKS[task].hub_id, "dataset", f"images of pool {smallest}", None)
            )
    texts = suite.language.texts
    if texts is not None and texts.source == "hub":
        for pool, tasks in suite.language.pools.items():
            names = {HUB_ID if task in GLUE else DOMAINS[task].hub_id: None for task in tasks}
            found += [Repository(name, "dataset", f"texts of {pool}", None) for name in names]
        tests = {
            PUBLIC[name].data: None for name in suite.language.tests.values() if name in PUBLIC
        }
        found += [Repository(name, "dataset", "tests of language models", None) for name in tests]
    return found


def decoded_bytes(suite: Suite) -> int:
    """Of the decoded images of a suite on the hub, once for both sizes of CLIP, whose processors
    prepare them alike.
    """
    here = suite.tasks if suite.data.source == "hub" else ()
    return sum(TEST_IMAGES[task] + TRAIN_IMAGES.get(task, 0) for task in here) * DECODED


def _models(part: str, base: str, experts: str, tasks: tuple[str, ...]) -> list[Repository]:
    """Base and experts of a role, where they are names and no folders of the project."""
    names = [base] if "/models/" not in base else []
    names += [experts.format(task=task) for task in tasks] if "{task}" in experts else []
    return [Repository(name, "model", part, _known_bytes(name)) for name in names]


def _known_bytes(name: str) -> int | None:
    fits = [known for known in MODEL_BYTES if name.startswith(known)]
    return MODEL_BYTES[max(fits, key=len)] if fits else None
