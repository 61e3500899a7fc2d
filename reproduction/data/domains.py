"""The three domains of MergeBench as prompts with completions, and where their texts lie on the
hub.

Texts are dressed as MergeBench dresses them for its data-based mergers: the instruction format of
Alpaca. Which texts and which dress the paper calibrated on is not told.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featcal.errors import BadData, UnknownKey

DRESS = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Domain:
    """One domain: its small held-out set on the hub, whose only split is `train`, and the columns
    of its texts there.
    """

    hub_id: str
    prompt: str
    completion: str


DOMAINS = {
    "coding": Domain("MergeBench/coding_val", "instruction", "response"),
    "math": Domain("MergeBench/math_val", "query", "response"),
    "instruction": Domain("MergeBench/instruction_val", "instruction", "output"),
}


def domain_text(key: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Prompt and completion of one row: as they are where the row has them, else dressed from the
    domain's own columns.

    Raises: UnknownKey; BadData for a row without the columns.
    """
    if {"prompt", "completion"} <= set(row):
        return str(row["prompt"]), str(row["completion"])
    if key not in DOMAINS:
        raise UnknownKey("domain", key, list(DOMAINS))
    domain = DOMAINS[key]
    for column in (domain.prompt, domain.completion):
        if column not in row:
            problem = f"a row holds {', '.join(row) or 'nothing'}, but no {column}"
            raise BadData(key, problem, "name the columns prompt and completion")
    return DRESS.format(prompt=row[domain.prompt]), str(row[domain.completion])
