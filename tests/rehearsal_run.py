"""Run `rehearsal_run.py FOLDER [STAGE...]`: the graph of dvc.yaml on the hub in HF_ENDPOINT."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import yaml
from smoke_graph import commands, copied

from pipeline import settings, write_settings

SUITE = "paper"


def first(given: Any) -> Any:
    return given[:1] if isinstance(given, list) else given


# What a rehearsal does less of, by the names of params.yaml wherever they stand in a group of the
# suite; the rest is as it is.
FEWER: dict[str, Callable[[Any], Any]] = {
    # null is a whole split
    "samples": lambda given: [4, 8] if isinstance(given, list) else given and 8,
    "steps": lambda given: [4] if isinstance(given, list) else 4,
    "draws": lambda given: [[8, 42]],
    "batch": lambda given: 8,
    "seeds": lambda given: given[:2],
    "images": lambda given: 4,
    "traced": lambda given: 2,
    "nodes": lambda given: given[:2],
    "audit": lambda given: [1, 4],
    "factors": lambda given: [0.6, 1.0],
    # of a sweep the first value; the one that it is compared with is tried too
    **dict.fromkeys(("ridge", "anchor_blend", "interpolation", "rank"), first),
}
RECORD = "rehearsal.json"


def rehearsal_params() -> dict[str, Any]:
    """Return the settings with `suite: paper` and less of everything in each experiment."""
    params = settings()
    del params["methods"]
    for role in params["featcal"].values():
        role["samples"] = FEWER["samples"](role["samples"])
    return {name: fewer(section) for name, section in params.items()} | {"suite": SUITE}


def fewer(entry: Any, inside: bool = False) -> Any:
    """Return an entry with less of everything. inside: it is in a group of the suite."""
    if isinstance(entry, list):
        return [fewer(part, inside) for part in entry]
    if not isinstance(entry, dict):
        return entry
    found = {}
    for key, value in entry.items():
        if inside and key == "vary":  # its options stay
            found[key] = value | {"samples": [4]} if "samples" in value else value
        elif inside and key in FEWER:
            found[key] = FEWER[key](value)
        else:
            found[key] = fewer(value, inside or key in (SUITE, "from"))
    return found


def lay_out(work: Path) -> list[str]:
    """Make a project folder; return what this machine lacks for the public tests left out."""
    from dvc.repo import Repo

    from reproduction.language.harness import unmet
    from reproduction.prepare.tasks import PUBLIC

    copied(work)
    write_settings(work, rehearsal_params())
    suite = yaml.safe_load((work / f"suites/{SUITE}.yaml").read_text())
    tests = suite["language"]["tests"]
    left_out = {key: lacks for key, test in tests.items() if (lacks := unmet(PUBLIC[test]))}
    suite["language"]["tests"] = {key: test for key, test in tests.items() if key not in left_out}
    (work / f"suites/{SUITE}.yaml").write_text(yaml.safe_dump(suite, sort_keys=False))
    (work / f"suites/{SUITE}.pins.json").unlink(missing_ok=True)
    Repo.init(str(work), no_scm=True).close()
    lacking = [(key, *lack) for key, lacks in left_out.items() for lack in lacks]
    return [f"{key}: {what} ({way_out})" for key, what, way_out in lacking]


def run_graph(work: Path, chosen: tuple[str, ...] = ()) -> list[tuple[str, float]]:
    """Run all stages in order, or those that begin as `chosen`; return seconds of each."""
    from pages import without_kernels

    from reproduction.stages.command import run_stage

    seconds = []
    with chdir(work), without_kernels():
        for command in commands(work):
            name = "@".join(command[2:])
            if command[:2] == ["featcal", "stage"] and name.startswith(chosen or ""):
                start = time.perf_counter()
                print(f"stage {name}", file=sys.stderr, flush=True)
                run_stage(command[2], command[3] if len(command) > 3 else None)
                seconds.append((name, time.perf_counter() - start))
    return seconds


def main() -> int:
    from featcal.errors import FeatCalError

    work, chosen = Path(sys.argv[1]), tuple(sys.argv[2:])
    try:
        seconds = run_graph(work, chosen)
    except FeatCalError as error:
        print(f"featcal: {error}", file=sys.stderr)
        return 2
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    pages = len(list((work / "book/pages").glob("*.ipynb")))
    (work / RECORD).write_text(json.dumps({"stages": seconds, "cpu": cpu, "pages": pages}))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
