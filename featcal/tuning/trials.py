"""Finished trials in a small JSON file, so that an interrupted search goes on after the last of
them.

A file that another search has left (other models, samples or settings, another version of this
package) is not used, and is written over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from featcal.calibration.fingerprint import Digest, add_model
from featcal.calibration.models import Model
from featcal.settings import Calibration
from featcal.storage.jsonfile import read_json, write_json
from featcal.tuning.holdout import Batch
from featcal.tuning.settings import Candidate
from featcal.version import __version__


@dataclass
class Trials:
    """What is finished so far, kept in a file where there is one.

    mark: what the search depends on, as one text.   path: λ that the path gave, None until it is
    known.
    """

    file: Path | None
    mark: str
    path: float | None
    done: dict[int, Candidate]

    @classmethod
    def opened(cls, file: Path | None, mark: str, resume: bool) -> "Trials":
        """What an earlier run of the same search has finished; nothing without `resume`."""
        trials = cls(file, mark, None, {})
        found = read_json(file) if file is not None and resume and file.is_file() else {}
        if isinstance(found, dict) and found.get("search") == mark:
            trials.path = found["path"]
            trials.done = {entry["number"]: _candidate(entry) for entry in found["trials"]}
        return trials

    def keep(self, *candidates: Candidate, path: float | None = None) -> None:
        """Add trials, or the λ of the path, and write the file."""
        self.done |= {one.number: one for one in candidates}
        self.path = self.path if path is None else path
        if self.file is not None:
            listed = [one.content for one in self.listed]
            write_json(self.file, {"search": self.mark, "path": self.path, "trials": listed})

    @property
    def listed(self) -> list[Candidate]:
        """In the order of their numbers."""
        return [self.done[number] for number in sorted(self.done)]


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    settings = Calibration.from_mapping(entry["settings"], "trials")
    return Candidate(entry["number"], entry["origin"], settings, entry["divergence"])


def mark_of(models: Mapping[str, Model], batches: Mapping[str, list[Batch]], *more: object) -> str:
    """Of models by role, samples by task, and whatever else a search depends on."""
    digest = Digest()
    for role, model in sorted(models.items()):
        digest.add(role)
        add_model(digest, Path(model) if isinstance(model, str) else model)
    for task, those in sorted(batches.items()):
        digest.add(task, len(those))
        for batch in those:
            digest.add(*batch, *(value for value in batch.values() if isinstance(value, Tensor)))
    digest.add(__version__, *more)
    return str(digest)
