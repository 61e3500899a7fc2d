"""`featcal doctor`: report what this machine has, what a suite needs, and what is missing.

Changes nothing and downloads nothing: the hub is asked for names and sizes only.
"""

import json
import os
import platform
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import huggingface_hub
import yaml
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects
from typer import Exit, Option

from featcal.cli.options import Json
from featcal.cli.output import note, say, say_json, size_text, table
from featcal.data.places import Kind
from featcal.errors import MissingPath, one_line
from featcal.files import read_json
from reproduction.engine.context import Context
from reproduction.experiments import load_experiments
from reproduction.prepare import hub
from reproduction.prepare.suite import Role, Suite, load_suite
from reproduction.prepare.tasks import DOMAINS, GLUE, HUB_ID, PUBLIC, TASKS
from reproduction.results import project_root

SMALL = 10_000_000_000  # bytes for outputs, DVC's cache and the book of a suite made here
EPILOG = """Examples:

featcal doctor

featcal doctor --suite paper

HF_HUB_OFFLINE=1 featcal doctor --suite paper --json   (is everything in the cache?)

Exit code 2 if something is missing, listed at the end."""

# Sizes of models and data sets; the file's comments say what they are.
FACTS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Repository:
    """A repository of the hub, and whether it can be had.

    part: the role or pool that asks for it.   bytes: still to download; None: only the hub knows.
    state: cached, reachable, gated, missing, unreachable or offline.   reason: of the last four.
    """

    name: str
    kind: Kind
    part: str
    bytes: int | None
    state: str = ""
    reason: str = ""


@dataclass
class Checkup:
    """What a suite needs and what is missing; sizes in bytes.

    disk: by purpose.   memory: of the GPU in the largest calibration, by role.
    """

    suite: str = ""
    repositories: list[Repository] = field(default_factory=list)
    disk: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    gpu: int = 0
    missing: list[str] = field(default_factory=list)


def doctor(
    suite: Annotated[
        str | None, Option(help="mini, paper or files. Default: the suite of params.yaml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report what this machine has, what a suite needs, and what is missing."""
    machine, found = machine_rows(), Checkup()
    try:
        root = project_root()
    except MissingPath:
        if suite is not None:
            raise
    else:
        note("asking the hub and counting; nothing is downloaded")
        experiments = load_experiments(root / "params.yaml", suite)
        chosen = Context(root, experiments, load_suite(root, experiments.suite))
        found = checkup(chosen)
    if as_json:
        say_json(asdict(found) | {"machine": dict(machine)})
    else:
        table("", ["what", "found"], machine, right=False)
        show(found)
    if found.missing:
        raise Exit(2)


def machine_rows() -> list[list[str]]:
    """Return what this machine has, whatever is to be run."""
    import torch

    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        ["python", platform.python_version()],
        ["device", ", ".join(cards) or "CPU only"],
        ["CUDA of torch", str(torch.version.cuda)],
        ["free disk here", size_text(shutil.disk_usage(Path.cwd()).free)],
    ]


def checkup(chosen: Context) -> Checkup:
    """Compare what the suite needs with this machine."""
    suite, found = chosen.suite, Checkup(chosen.suite.name, gpu=gpu_bytes())
    pins = read_json(chosen.pins) if chosen.pins.is_file() else {}
    with ThreadPoolExecutor(8) as pool:
        wanted = repositories(chosen)
        commits = [pins.get(f"{one.kind}s", {}).get(one.name) for one in wanted]
        found.repositories = list(pool.map(look, wanted, commits))
    if suite.data.source == "hub":
        add_costs(chosen, found)
    else:
        found.disk["outputs and DVC's cache"] = SMALL
    found.disk["the hub's cache"] = sum(one.bytes or 0 for one in found.repositories)
    compare_disk(chosen.root, found)
    out_of_reach: dict[str, list[str]] = {}
    for one in found.repositories:
        if one.reason:
            out_of_reach.setdefault(f"{one.state} ({one.reason})", []).append(one.name)
    found.missing += [f"{reason}: {', '.join(names)}" for reason, names in out_of_reach.items()]
    if not found.gpu and (suite.device == "cuda" or suite.data.source == "hub"):
        found.missing.append("a GPU that torch can use; the paper's models take days without")
    found.missing += tests_lack(suite)
    return found


def gpu_bytes() -> int:
    """Return the memory of the first GPU; 0 without one."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def repositories(chosen: Context) -> list[Repository]:
    """Return what the suite asks the hub for, in the order of its roles and pools."""
    suite, sizes = chosen.suite, FACTS["model_bytes"]
    language, found = suite.language, list[Repository]()
    for role, model in suite.every_role.items():
        base = model.clip if isinstance(model, Role) else model.model
        local = base.startswith(hub.PREFIX) or (chosen.root / base).is_dir()
        names, experts = [] if local else [base], getattr(model, "experts", "")
        pools = [p for r, p in chosen.experiments.prepared if r == role and p in suite.pools_of(r)]
        tasks = dict.fromkeys(task for pool in pools for task in suite.tasks_of(role, pool))
        names += [experts.format(task=task) for task in tasks] if "{task}" in experts else []
        for name in names:
            known = max((start for start in sizes if name.startswith(start)), key=len, default="")
            found.append(Repository(name, "model", role, sizes.get(known)))

    def data(names: Iterable[str], part: str) -> None:
        found.extend(Repository(name, "dataset", part, None) for name in dict.fromkeys(names))

    for task in suite.tasks if suite.data.source == "hub" else ():
        smallest = min(size for size, tasks in suite.pools.items() if task in tasks)
        data([TASKS[task].hub_id], f"images of pool {smallest}")
    if language.texts is not None and language.texts.source == "hub":
        for pool, tasks in language.pools.items():
            data([HUB_ID if t in GLUE else DOMAINS[t].hub_id for t in tasks], f"texts of {pool}")
        tests = [PUBLIC[name].data for name in language.tests.values() if name in PUBLIC]
        data(tests, "tests of language models")
    return found


def look(one: Repository, commit: str | None) -> Repository:
    """Return a repository at its pinned commit, or the newest one, with its state."""
    # a snapshot with weights, or with any file of a data set; an unpinned model may have been taken
    # from the pull request that converts it
    folder = f"{one.kind}s--{one.name.replace('/', '--')}/snapshots/{commit or '*'}"
    pattern = f"{folder}/**/{'*.safetensors' if one.kind == 'model' else '*'}"
    files = (path for path in Path(constants.HF_HUB_CACHE).glob(pattern) if path.is_file())
    if any(path.name != "README.md" for path in files):
        return replace(one, state="cached", bytes=0)
    if constants.HF_HUB_OFFLINE:
        reason = "it is not in the cache, and HF_HUB_OFFLINE=1"
        return replace(one, state="offline", reason=reason)
    try:
        return replace(one, state="reachable", bytes=_bytes_to_download(one, commit))
    except errors.GatedRepoError:
        way_out = f"ask for access at {constants.ENDPOINT}/{one.name}, then `hf auth login`"
        return replace(one, state="gated", reason=way_out)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        return replace(one, state="missing", reason=type(error).__name__)
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        return replace(one, state="unreachable", reason=one_line(error))


def _bytes_to_download(one: Repository, commit: str | None) -> int | None:
    where: dict[str, Any] = {"revision": commit, "repo_type": one.kind}
    listed = huggingface_hub.HfApi().list_repo_tree(one.name, recursive=True, **where)
    sizes = {file.path: file.size for file in listed if isinstance(file, huggingface_hub.RepoFile)}
    # a gated repository lets its list be read, but none of its files
    largest = max(sizes, key=lambda name: sizes[name])
    huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(one.name, largest, **where))
    if one.kind == "dataset":
        return sum(sizes.values())
    if not any(name.endswith(".safetensors") for name in sizes):
        return one.bytes  # its weights are in a pull request
    return sum(sizes[name] for name in filter_repo_objects(sizes, allow_patterns=hub.PATTERNS))


def add_costs(chosen: Context, found: Checkup) -> None:
    """Add memory and disk of the roles whose models come from the hub."""
    ex, suite = chosen.experiments, chosen.suite
    models: Counter[str] = Counter()
    experts: dict[str, set[str]] = {}  # tasks; a pool holds those of the smaller ones
    for role, pool in ex.prepared:
        if role not in suite.every_role or pool not in suite.pools_of(role):
            continue
        tasks = suite.tasks_of(role, pool)
        calibrations = sum(len(run.seeds) for run in ex.calibrated_in(role, pool).values())
        experts.setdefault(role, set()).update(tasks)
        models[role] += 1 + len(ex.merged_in(role, pool)) + calibrations
        needed = planned(chosen, role, len(tasks))
        found.memory[role] = max(needed, found.memory.get(role, 0))
    for role, needed in found.memory.items():
        size = 2 * (models[role] + len(experts[role])) * FACTS["sizes"][role]["bytes"]
        found.disk[f"outputs of {role}, twice with DVC's cache"] = size
        if found.gpu and needed > found.gpu:
            problem = f"{size_text(needed)} of GPU memory for {role}"
            found.missing.append(f"{problem}; the GPU has {size_text(found.gpu)}")
    # once for both sizes of CLIP, whose processors prepare images alike
    test, train = FACTS["test_images"], FACTS["train_images"]
    pictures = sum(test[task] + train.get(task, 0) for task in suite.tasks)
    found.disk["decoded pictures"] = pictures * FACTS["decoded_bytes"]


def planned(chosen: Context, role: str, tasks: int) -> int:
    """Estimate the GPU memory of a role's calibration, features cached in host memory, in bytes."""
    from featcal.calibration.estimate import Job
    from featcal.cli.plan import estimated
    from featcal.models.stored import skeleton

    runs = [run for run in chosen.experiments.calibrate.values() if run.role == role]
    samples = max((run.samples for run in runs), default=256)
    batch = max((run.batch for run in runs), default=32)
    size, job = FACTS["sizes"][role], Job(tasks, samples, min(batch, samples), on_gpu=True)
    config = {"model_type": size["kind"], "architectures": [size["architecture"]], **size["config"]}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = skeleton(Path(folder))
    needs = estimated(model, job, size["tokens"], size["tokens"] is not None, None)
    return sum(needs["device"].values())


def compare_disk(root: Path, found: Checkup) -> None:
    """Compare the disks of the project and of the hub's cache, which may be one, with the needs."""
    folders = (Path(constants.HF_HUB_CACHE), *Path(constants.HF_HUB_CACHE).parents)
    cache = next(path for path in folders if path.exists())
    if os.stat(root).st_dev == os.stat(cache).st_dev:
        cache = root
    needs = Counter({cache: found.disk["the hub's cache"]})
    needs[root] += sum(found.disk.values()) - found.disk["the hub's cache"]
    for part in ("outputs", ".dvc/cache", ".featcal/decoded"):  # written by earlier runs
        files = (file for file in (root / part).rglob("*") if file.is_file())
        needs[root] -= sum(file.stat().st_size for file in files)
    for folder, needed in needs.items():
        free = shutil.disk_usage(folder).free
        if needed > free:
            problem = f"{size_text(needed)} of disk in {folder}, where {size_text(free)} are free"
            found.missing.append(problem)


def tests_lack(suite: Suite) -> list[str]:
    """Return what public tests of language models need next to their data, with ways out."""
    from reproduction.language import harness

    texts, tests = suite.language.texts, suite.language.tests
    if texts is None or texts.source == "mini" or not tests:
        return []
    missing = f"lm-evaluation-harness (lm_eval): {harness.INSTALL}"
    found = [] if harness.installed() else [missing]
    lacks = {key: harness.lacking(PUBLIC[name]) for key, name in tests.items() if name in PUBLIC}
    return found + [f"{key}: {what}; {way}" for key, own in lacks.items() for what, way in own]


def show(found: Checkup) -> None:
    """Print tables, then the list of what is missing."""
    rows = [
        [one.name, one.part, one.state, "unknown" if one.bytes is None else size_text(one.bytes)]
        for one in found.repositories
        if one.state != "cached"
    ]
    title = "repositories of the hub that are not in the cache, and what is to download"
    table(title, ["name", "for", "state", "download"], rows)
    needs = [[f"disk: {name}", size_text(size)] for name, size in found.disk.items()]
    needs += [[f"GPU memory: {role}", size_text(size)] for role, size in found.memory.items()]
    table("needed; memory of the largest calibration", ["what", "needed"], needs)
    suite = f" for the suite {found.suite}" if found.suite else ""
    if found.missing:
        say("\n  - ".join([f"missing{suite}:", *found.missing]))
    elif suite:
        say(f"nothing is missing{suite}")
