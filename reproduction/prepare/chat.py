"""Write short texts as chats that ask for the class, each class named by one token.

The system's message is the instruction, the user's the text, the assistant's the name. A row whose
class has no name here is left out. PLAIN holds questions without instruction or answer, whose
log-likelihood is scored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from featcal.errors import BadData
from featcal.files import atomic_folder
from featcal.models.load import load_model, load_tokenizer, save_model
from reproduction.prepare.sources import read_rows
from reproduction.prepare.suite import Chat
from reproduction.prepare.texts import TextSource, write_text_sources
from reproduction.results import PLAIN

PLAIN_TEXTS = "mmlu_subjects"


@dataclass(frozen=True)
class Instruction:
    """An instruction, and its one-word answer for each class of the task."""

    prompt: str
    answers: Mapping[str, str]


_ENTRIES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
INSTRUCTIONS = {task: Instruction(e["asked"], e["words"]) for task, e in _ENTRIES.items()}


def write_base_and_chats(model: Path, chat: Chat, origin: Path, store: Path) -> None:
    """Write the base to store/base/, and the texts of all tasks to store/texts/."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    save_model(load_model(model), store / "base", like=model)
    tokenizer, sources = load_tokenizer(model), {}
    counts = {"train": chat.train, "validation": chat.validation, "test": chat.test}
    with atomic_folder(store / "texts") as folder:
        for task in (*chat.tasks, *chat.unseen, PLAIN):
            splits = counts if task in chat.tasks else {"test": chat.test}
            fields: dict[str, Any] = {"location": task, "kind": "folder", "paper_name": task}
            sources[task] = TextSource(**fields, splits={split: split for split in splits})
            for split, count in splits.items():
                arguments = (split, origin, tokenizer, chat.tokens)
                rows = plain_rows(*arguments) if task == PLAIN else chat_rows(task, *arguments)
                file = folder / task / f"{split}.parquet"
                file.parent.mkdir(parents=True, exist_ok=True)
                pq.write_table(pa.Table.from_pylist(rows[:count]), file)
        write_text_sources(folder, sources)


def chat_rows(
    task: str, split: str, origin: Path, tokenizer: Any, tokens: int
) -> list[dict[str, str]]:
    """Return prompts with their completions, in the order of the file.

    Raises: BadData for a word of several tokens; as read_rows.
    """
    instruction = INSTRUCTIONS[task]
    for word in instruction.answers.values():
        if len(tokenizer(word)["input_ids"]) != 1:
            raise BadData(task, f"its answer {word!r} is not one token", "take another word")
    rows = []
    texts, labels, classes = read_rows(origin / task, split)
    for text, label in zip(texts, labels, strict=True):
        word = instruction.answers.get(classes[label])
        if word is None:
            continue
        messages = [
            {"role": "system", "content": instruction.prompt},
            {"role": "user", "content": shortened(text, tokenizer, tokens)},
        ]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        rows.append({"prompt": prompt, "completion": word + tokenizer.eos_token})
    return rows


def plain_rows(split: str, origin: Path, tokenizer: Any, tokens: int) -> list[dict[str, str]]:
    """Return texts whose completion is all of the text."""
    texts, _, _ = read_rows(origin / PLAIN_TEXTS, split)
    return [{"prompt": "", "completion": shortened(text, tokenizer, tokens)} for text in texts]


def shortened(text: str, tokenizer: Any, tokens: int) -> str:
    """Return a text cut after its first tokens."""
    ids = tokenizer(text)["input_ids"]
    return text if len(ids) <= tokens else str(tokenizer.decode(ids[:tokens]))
