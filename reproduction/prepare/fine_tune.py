"""Fine-tune experts from a base with one loop: vision towers, sentence encoders, language models.

An encoder learns against heads that stay; an image tower's projection stays as well. Of a language
model's text only what follows the prompt is learnt. Batches and dropout are keyed by task and seed,
so an expert does not depend on which others are made.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.data.images import ImageSet
from featcal.data.texts import Sample, input_of, reader_for
from featcal.errors import BadData, BadSetting, Diverged
from featcal.files import atomic_folder
from featcal.models.batch import token_mean, unit_length
from featcal.models.load import load_model, other_class, torch_device
from featcal.models.lora import WEIGHTS, dense_model, peft_package
from reproduction.prepare.sources import SentenceSet
from reproduction.prepare.suite import FineTune, FineTuneSentences, FineTuneText
from reproduction.prepare.texts import example_batch, tokenized_example

WINDOW = 8  # batches of sentences that are drawn together and cut by length
AnyFineTune = FineTune | FineTuneSentences | FineTuneText
Loss = Callable[[int], tuple[str, Tensor]]  # the task of a step, and the loss on its batch


def descend(model: nn.Module, loss: Loss, recipe: AnyFineTune, dropout: str) -> None:
    """Train in place the parameters that require gradients, by SGD or AdamW with clipped gradients.

    loss: called with the step, from 0.   dropout: the key of its draws; the global generator
    stays as it was.   Raises: Diverged with task and step for a loss that is not finite.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser: torch.optim.Optimizer
    if isinstance(recipe, FineTune):
        momentum = recipe.momentum
        optimiser = torch.optim.SGD(learning, lr=recipe.lr, momentum=momentum, nesterov=True)
    else:
        optimiser = torch.optim.AdamW(learning, lr=recipe.lr, weight_decay=recipe.decay)
    device = learning[0].device
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(crc32(dropout.encode()))
        for step in range(recipe.steps):
            task, value = loss(step)
            if not torch.isfinite(value):
                key = "fine_tune.lr in the suite file"
                look = "NaN in the base or in this task's data"
                raise Diverged(f"fine-tuning {task!r}", step, key, recipe.lr, look)
            optimiser.zero_grad(set_to_none=True)
            value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(learning, recipe.clip)
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate(step)
            optimiser.step()
    model.zero_grad(set_to_none=True)
    model.requires_grad_(True).eval()


def freeze(model: nn.Module, frozen: tuple[str, ...]) -> None:
    """Let all parameters learn but those whose names begin with one of `frozen`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))


def fine_tune(
    encoder: Any,
    heads: Mapping[str, Tensor],
    samples: Mapping[str, ImageSet | SentenceSet],
    recipe: FineTune | FineTuneSentences,
    seed: int,
    shared: bool = False,
) -> Any:
    """Return a fine-tuned copy of an encoder in float32, ready for evaluation.

    Minimises the cross-entropy of s · head · f / |f|: of images f is the pooled output, projected
    where there is a projection, and s = exp(logit_scale); of sentences f is the mean over tokens
    and s = 1 / temperature.   samples: rows by task; step k is the next batch of task k modulo T.
    shared: draw orders that no expert has.   Raises: Diverged.
    """
    learner = copy.deepcopy(encoder).float()
    freeze(learner, recipe.frozen)
    tasks, device = list(samples), next(learner.parameters()).device
    projection = heads.get("visual_projection")

    def scores(batch: dict[str, Tensor], head: Tensor) -> Tensor:
        head = head.to(device).float().T
        if isinstance(recipe, FineTuneSentences) and "attention_mask" in batch:
            hidden = learner(**batch).last_hidden_state
            features = unit_length(token_mean(hidden, batch["attention_mask"]))
            return features @ head / recipe.temperature
        pooled = learner(**batch).pooler_output
        if projection is not None:
            pooled = pooled @ projection.to(device).float().T
        return math.exp(float(heads["logit_scale"])) * F.normalize(pooled, dim=-1) @ head

    def loss(step: int) -> tuple[str, Tensor]:
        turn, task_index = divmod(step, len(tasks))
        task = tasks[task_index]
        rows, key = samples[task], f"multitask {task}" if shared else task
        order_of = similar_lengths if isinstance(rows, SentenceSet) else batch_indices
        indices = order_of(key, len(rows), recipe.batch, turn, seed)
        (batch,) = rows.batches(indices, len(indices))
        batch = {name: value.to(device) for name, value in batch.items()}
        labels = torch.from_numpy(rows.labels[indices]).to(device)
        return task, F.cross_entropy(scores(batch, heads[f"head/{task}"]), labels)

    descend(learner, loss, recipe, f"{'multitask' if shared else tasks[0]} {seed}")
    return learner


def batch_indices(task: str, count: int, batch: int, step: int, seed: int) -> NDArray[np.int64]:
    """Return the samples of one step, (batch,): each at most once per epoch, in full batches."""
    batch = min(batch, count)
    epoch, number = divmod(step, count // batch)
    order = np.random.default_rng([seed, crc32(task.encode()), epoch]).permutation(count)
    return order[number * batch : (number + 1) * batch].astype(np.int64)


def similar_lengths(task: str, count: int, batch: int, step: int, seed: int) -> NDArray[np.int64]:
    """Return the texts of one step, (batch,), of similar length: indices into texts sorted by it.

    Every epoch is a permutation cut into windows of WINDOW batches; within a window, sorted,
    neighbours are a batch, and batches come in a drawn order.
    """
    batch = min(batch, count)
    epoch, number = divmod(step, count // batch)
    key = [seed, crc32(task.encode()), epoch]
    order = np.random.default_rng(key).permutation(count)[: count // batch * batch]
    window, within = divmod(number, WINDOW)
    batches = np.sort(order[window * WINDOW * batch :][: WINDOW * batch]).reshape(-1, batch)
    turns = np.random.default_rng([*key, window]).permutation(len(batches))
    return batches[turns[within]].astype(np.int64)


def fine_tune_text(
    folder: str | Path,
    samples: Sequence[Sample],
    recipe: FineTuneText,
    task: str,
    seed: int,
    adapters: str | Path | None = None,
    device: str = "cpu",
) -> Any:
    """Return an expert of the language model in `folder`, dense, in float32 on the CPU.

    samples: those with an empty answer are skipped.   adapters: a folder for recipe.lora's adapters.
    Raises: Diverged; BadData for a sample without a target; BadFile for a model of another kind.
    """
    base = load_model(folder)
    takes = input_of(base)
    if not (takes.kind == "pair" and takes.labels) and not takes.continued:
        problem = "a model that generates text is needed here, such as T5 or Llama"
        raise other_class(folder, type(base).__name__, problem)
    reader = reader_for([Path(folder)], takes, recipe.tokens)
    examples = [tokenized_example(sample, reader) for sample in samples if sample.target != ""]
    if not examples:
        raise BadData(task, "holds no sample with a target", "give prompts with what follows them")
    lora, learner = recipe.lora, base
    if lora is None:
        freeze(learner, recipe.frozen)
    else:
        learner = with_adapters(base, lora.rank, lora.alpha, lora.modules, seed)
    target = torch_device(device)
    learner = learner.to(target)

    def loss(step: int) -> tuple[str, Tensor]:
        indices = batch_indices(task, len(examples), recipe.batch, step, seed).tolist()
        batch = example_batch([examples[i] for i in indices], reader.pad)
        return task, learner(**{name: value.to(target) for name, value in batch.items()}).loss

    descend(learner, loss, recipe, f"{task} {seed}")
    learner = learner.to("cpu")
    if lora is None:
        return learner
    if adapters is None:
        return learner.merge_and_unload().requires_grad_(True).eval()
    save_adapters(learner, Path(adapters), Path(folder).name)
    return dense_model(folder, adapters).requires_grad_(True)


def with_adapters(
    model: nn.Module, rank: int, alpha: int, modules: Sequence[str], seed: int
) -> Any:
    """Return the model with a fresh adapter on every linear whose name ends in one of `modules`.

    A is uniform within ±1 / sqrt(inputs), keyed by seed and name, and B is 0. Nothing else learns;
    the global generator stays as it was.   Raises: BadEnvironment without peft; BadSetting.
    """
    peft = peft_package()
    try:
        with torch.random.fork_rng(devices=[]):
            config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules))
            adapted = peft.get_peft_model(model, config)
    except ValueError:
        expected = f"must name linear modules of {type(model).__name__}"
        raise BadSetting("lora.modules", list(modules), expected) from None
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                generator = np.random.default_rng([seed, crc32(name.encode())])
                values = generator.uniform(-1, 1, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values / math.sqrt(parameter.shape[1])))
    return adapted


def save_adapters(adapted: Any, folder: Path, base: str) -> None:
    """Write peft's folder, adapter_config.json and adapter_model.safetensors, naming its base."""
    peft = peft_package()
    config = adapted.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = base, True
    # sorted, since a set has another order in every process
    config.target_modules = sorted(config.target_modules)
    state = sorted(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False).items())
    with atomic_folder(folder) as hidden:
        config.save_pretrained(hidden)
        tensors = {name: value.detach().cpu().contiguous() for name, value in state}
        save_file(tensors, hidden / WEIGHTS)
