"""Fine-tuning an expert of a language model from the base: what follows the prompt is learnt, the
prompt itself is not.

One function for models with a decoder (T5) and for causal ones (Llama), told apart by their class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.data.batches import IGNORED, padded
from featcal.data.texts import Reader, Sample, input_of, reader_for
from featcal.errors import BadData, BadSetting
from featcal.files import atomic_folder
from featcal.models.load import load_model, other_class, torch_device
from featcal.models.lora import WEIGHTS, dense_model, peft_package
from reproduction.suites.descent import batch_indices, descend
from reproduction.suites.text_recipe import FineTuneText


@dataclass(frozen=True)
class TokenizedExample:
    """Token ids a model is given, and of each place (T5: of the decoder's text) the token to learn,
    or IGNORED.
    """

    ids: list[int]
    labels: list[int]


def fine_tune_text(
    folder: str | Path,
    samples: Sequence[Sample],
    settings: FineTuneText,
    task: str,
    seed: int,
    adapters: str | Path | None = None,
    device: str = "cpu",
) -> Any:
    """An expert of `task` from the base in `folder`, in float32 on the CPU, ready for evaluation.

    samples:  prompts with what follows them; targets of "" are left out.   device: cpu, cuda or
              auto.
    adapters: with settings.lora, the folder that the adapters are written to as well. The expert
    returned is dense either way. Batches are keyed by (task, seed, epoch), so an expert does not
    depend on which others are made.
    Raises:   Diverged; BadData for a sample without a target; BadFile for a model that does not
              generate.
    """
    base = load_model(folder)
    takes = input_of(base)
    if not (takes.kind == "pair" and takes.labels) and not takes.continued:
        raise other_class(
            folder,
            type(base).__name__,
            "a model that generates text is needed here, such as T5 or Llama",
        )
    reader = reader_for([Path(folder)], takes, settings.tokens)
    lessons = [tokenized_example(sample, reader) for sample in samples if sample.target != ""]
    if not lessons:
        raise BadData(task, "holds no sample with a target", "give prompts with what follows them")
    lora = settings.lora
    learner: Any = (
        base if lora is None else with_adapters(base, lora.rank, lora.alpha, lora.modules, seed)
    )
    trained(learner.to(torch_device(device)), lessons, reader.pad, settings, task, seed)
    learner = learner.to("cpu").eval()
    if lora is None:
        return learner
    if adapters is None:
        return learner.merge_and_unload().requires_grad_(True).eval()
    save_adapters(learner, Path(adapters), Path(folder).name)
    return dense_model(folder, adapters).requires_grad_(True)


def with_adapters(
    model: nn.Module, rank: int, alpha: int, modules: Sequence[str], seed: int
) -> Any:
    """The model with a fresh adapter on every linear whose name ends in one of `modules`, nothing
    else trainable.

    A is drawn uniformly within ±1 / sqrt(inputs), keyed by the seed and its name, and B is 0, so
    that the model computes what it did before. The global generator stays as it was.
    Raises: MissingPath without peft; BadSetting for modules that the model lacks.
    """
    peft = peft_package()
    try:
        with torch.random.fork_rng(devices=[]):
            config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules))
            adapted = peft.get_peft_model(model, config)
    except ValueError:
        raise BadSetting(
            "lora.modules", list(modules), f"must name linear modules of {type(model).__name__}"
        ) from None
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                drawn = np.random.default_rng([seed, crc32(name.encode())]).uniform(
                    -1, 1, tuple(parameter.shape)
                )
                parameter.copy_(torch.from_numpy(drawn / math.sqrt(parameter.shape[1])))
    return adapted


def save_adapters(adapted: Any, folder: Path, base: str) -> None:
    """The folder as PEFT has it: adapter_config.json and adapter_model.safetensors. `base`: what it
    says its base is.
    """
    peft = peft_package()
    config = adapted.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = base, True
    # sorted, since a set has another order in every process
    config.target_modules = sorted(config.target_modules)
    state = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    with atomic_folder(folder) as hidden:
        config.save_pretrained(hidden)
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in sorted(state.items())},
            hidden / WEIGHTS,
        )


def trained(
    model: nn.Module,
    lessons: Sequence[TokenizedExample],
    pad: int,
    settings: FineTuneText,
    task: str,
    seed: int,
) -> None:
    """Train a model in place. Raises: Diverged with task and step when the loss is not finite."""
    if settings.lora is None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(settings.frozen))
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=settings.lr, weight_decay=settings.decay)
    place = learning[0].device
    model.train()
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(crc32(f"{task} {seed}".encode()))  # dropout of published models
        for step in range(settings.steps):
            chosen = batch_indices(task, len(lessons), settings.batch, step, seed).tolist()
            batch = {
                name: value.to(place)
                for name, value in lesson_batch([lessons[i] for i in chosen], pad).items()
            }
            loss: Tensor = model(**batch).loss
            descend(
                loss,
                optimiser,
                learning,
                settings,
                task,
                step,
                "NaN in the base or in the texts of this task",
            )
    model.zero_grad(set_to_none=True)
    model.requires_grad_(True)


def tokenized_example(sample: Sample, reader: Reader) -> TokenizedExample:
    """One sample in tokens. Raises: BadData for a sample without a target, or one that is cut
    before it.
    """
    if sample.target is None or sample.messages is not None:
        raise BadData(
            sample.origin,
            "has no target",
            'give "input" and "target", or "prompt" and "completion"',
        )
    if reader.takes.kind == "pair":
        tokens = reader.tokens(sample)
        return TokenizedExample(tokens.ids, tokens.target or [])
    # one text, so that a token may reach over the border; it then belongs to the completion
    encoded: Any = reader.tokenizer(
        sample.text + sample.target,
        truncation=True,
        max_length=reader.length,
        return_offsets_mapping=True,
    )
    ids: list[int] = reader.ids(sample, sample.text + sample.target)
    ends = [end for _, end in encoded["offset_mapping"]]
    first = next((place for place, end in enumerate(ends) if end > len(sample.text)), None)
    if first is None:
        raise BadData(
            sample.origin,
            f"is cut before its completion, at {reader.length} tokens",
            "raise fine_tune.tokens",
        )
    return TokenizedExample(ids, [IGNORED] * first + ids[first:])


def lesson_batch(lessons: Sequence[TokenizedExample], pad: int) -> dict[str, Tensor]:
    """(samples, longest) ids, masks and labels, padded on the right; labels are IGNORED where
    nothing is to be learnt.
    """
    ids, mask = padded([lesson.ids for lesson in lessons], pad)
    labels, known = padded([lesson.labels for lesson in lessons], pad)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels.masked_fill(known == 0, IGNORED),
    }
