"""Where the data of a task lie, as a user writes it: a file, a folder, or a data set of the Hugging
Face hub. Opens nothing.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from featcal.errors import BadSetting, MissingPath

_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<config>[\w.-]+))?")
_SPLIT = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Place:
    """A file or folder that is there, or a data set of the hub with its revision and
    configuration.
    """

    source: str | Path
    revision: str | None = None  # of the hub; None for files and folders
    config: str | None = None

    @property
    def on_hub(self) -> bool:
        return self.revision is not None


def place_of(option: str, given: str) -> Place:
    """The place that `given` names; the hub only where nothing of that name lies here.

    Raises: MissingPath for what is neither here nor an owner/name[@revision][:configuration] of the
    hub.
    """
    if given and Path(given).exists():
        return Place(Path(given))
    hub = _HUB.fullmatch(given)
    if hub is None or ".." in given:
        way_out = "check the path; a data set of the hub is owner/name, owner/name@revision or owner/name:configuration"
        raise MissingPath(given, f"given with {option}", way_out)
    return Place(hub["name"], hub["revision"] or "main", hub["config"])


def require_split(split: str) -> None:
    """A split is a name: a path could lead out of the data folder. Raises: BadSetting."""
    if not _SPLIT.fullmatch(split):
        raise BadSetting(
            "split",
            split,
            "must be a name such as train, made of letters, digits, dots, dashes and underscores",
        )
