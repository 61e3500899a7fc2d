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
import torch
import yaml
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects
from typer import Exit, Option

from featcal.calibration.estimate import Job
from featcal.cli.options import Json
from featcal.cli.output import note, say, say_json, size_text, table
from featcal.cli.plan import estimated
from featcal.data.places import Kind
from featcal.errors import MissingPath, one_line
from featcal.files import read_json
from featcal.models.stored import skeleton
from reproduction.engine.context import Context
from reproduction.experiments import load_experiments
from reproduction.language import harness
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
    """Needs of a suite and what is missing; sizes in bytes.

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
    machine, report = machine_rows(), Checkup()
    try:
        root = project_root()
    except MissingPath:
        if suite is not None:
            raise
    else:
        note("asking the hub and counting; nothing is downloaded")
        experiments = load_experiments(root / "params.yaml", suite)
        context = Context(root, experiments, load_suite(root, experiments.suite))
        report = checkup(context)
    if as_json:
        say_json(asdict(report) | {"machine": dict(machine)})
    else:
        table("", ["what", "found"], machine, right=False)
        show(report)
    if report.missing:
        raise Exit(2)


def machine_rows() -> list[list[str]]:
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        ["python", platform.python_version()],
        ["device", ", ".join(cards) or "CPU only"],
        ["CUDA of torch", str(torch.version.cuda)],
        ["free disk here", size_text(shutil.disk_usage(Path.cwd()).free)],
    ]


def checkup(context: Context) -> Checkup:
    """Compare the suite's needs with this machine."""
    suite, report = context.suite, Checkup(context.suite.name, gpu=gpu_bytes())
    pins = read_json(context.pins) if context.pins.is_file() else {}
    with ThreadPoolExecutor(8) as pool:
        repos = repositories(context)
        commits = [pins.get(f"{repo.kind}s", {}).get(repo.name) for repo in repos]
        report.repositories = list(pool.map(look, repos, commits))
    if suite.data.source == "hub":
        add_costs(context, report)
    else:
        report.disk["outputs and DVC's cache"] = SMALL
    report.disk["the hub's cache"] = sum(repo.bytes or 0 for repo in report.repositories)
    compare_disk(context.root, report)
    out_of_reach: dict[str, list[str]] = {}
    for repo in report.repositories:
        if repo.reason:
            out_of_reach.setdefault(f"{repo.state} ({repo.reason})", []).append(repo.name)
    report.missing += [f"{reason}: {', '.join(names)}" for reason, names in out_of_reach.items()]
    if not report.gpu and (suite.device == "cuda" or suite.data.source == "hub"):
        report.missing.append("a GPU that torch can use; the paper's models take days without")
    report.missing += tests_lack(suite)
    return report


def gpu_bytes() -> int:
    """Return the memory of the first GPU; 0 without one."""
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def repositories(context: Context) -> list[Repository]:
    """Return the suite's repositories of the hub, in the order of its roles and pools."""
    suite, sizes = context.suite, FACTS["model_bytes"]
    language, repos = suite.language, list[Repository]()
    for role, model in suite.every_role.items():
        base = model.clip if isinstance(model, Role) else model.model
        local = base.startswith(hub.PREFIX) or (context.root / base).is_dir()
        names, experts = [] if local else [base], getattr(model, "experts", "")
        pools = [p for r, p in context.experiments.prepared if r == role and p in suite.pools_of(r)]
        tasks = dict.fromkeys(task for pool in pools for task in suite.tasks_of(role, pool))
        names += [experts.format(task=task) for task in tasks] if "{task}" in experts else []
        for name in names:
            prefix = max((s for s in sizes if name.startswith(s)), key=len, default="")
            repos.append(Repository(name, "model", role, sizes.get(prefix)))

    def data(names: Iterable[str], part: str) -> None:
        repos.extend(Repository(name, "dataset", part, None) for name in dict.fromkeys(names))

    for task in suite.tasks if suite.data.source == "hub" else ():
        smallest = min(size for size, tasks in suite.pools.items() if task in tasks)
        data([TASKS[task].hub_id], f"images of pool {smallest}")
    if language.texts is not None and language.texts.source == "hub":
        for pool, tasks in language.pools.items():
            data([HUB_ID if t in GLUE else DOMAINS[t].hub_id for t in tasks], f"texts of {pool}")
        tests = [PUBLIC[name].data for name in language.tests.values() if name in PUBLIC]
        data(tests, "tests of language models")
    return repos


def look(repo: Repository, commit: str | None) -> Repository:
    """Return a repository at its pinned commit, or the newest one, with its state."""
    # a snapshot with weights, or with any file of a data set; an unpinned model may have been taken
    # from the pull request that converts it
    folder = f"{repo.kind}s--{repo.name.replace('/', '--')}/snapshots/{commit or '*'}"
    pattern = f"{folder}/**/{'*.safetensors' if repo.kind == 'model' else '*'}"
    files = (path for path in Path(constants.HF_HUB_CACHE).glob(pattern) if path.is_file())
    if any(path.name != "README.md" for path in files):
        return replace(repo, state="cached", bytes=0)
    if constants.HF_HUB_OFFLINE:
        reason = "it is not in the cache, and HF_HUB_OFFLINE=1"
        return replace(repo, state="offline", reason=reason)
    try:
        return replace(repo, state="reachable", bytes=_bytes_to_download(repo, commit))
    except errors.GatedRepoError:
        way_out = f"ask for access at {constants.ENDPOINT}/{repo.name}, then `hf auth login`"
        return replace(repo, state="gated", reason=way_out)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        return replace(repo, state="missing", reason=type(error).__name__)
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        return replace(repo, state="unreachable", reason=one_line(error))


def _bytes_to_download(repo: Repository, commit: str | None) -> int | None:
    options: dict[str, Any] = {"revision": commit, "repo_type": repo.kind}
    listed = huggingface_hub.HfApi().list_repo_tree(repo.name, recursive=True, **options)
    sizes = {file.path: file.size for file in listed if isinstance(file, huggingface_hub.RepoFile)}
    # a gated repository lets its list be read, but none of its files
    largest = max(sizes, key=lambda name: sizes[name])
    huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo.name, largest, **options))
    if repo.kind == "dataset":
        return sum(sizes.values())
    if not any(name.endswith(".safetensors") for name in sizes):
        return repo.bytes  # its weights are in a pull request
    return sum(sizes[name] for name in filter_repo_objects(sizes, allow_patterns=hub.PATTERNS))


def add_costs(context: Context, report: Checkup) -> None:
    """Add memory and disk of the roles whose models come from the hub."""
    experiments, suite = context.experiments, context.suite
    models: Counter[str] = Counter()
    expert_tasks: dict[str, set[str]] = {}  # tasks; a pool holds those of the smaller ones
    for role, pool in experiments.prepared:
        if role not in suite.every_role or pool not in suite.pools_of(role):
            continue
        tasks = suite.tasks_of(role, pool)
        calibrations = sum(len(run.seeds) for run in experiments.calibrated_in(role, pool).values())
        expert_tasks.setdefault(role, set()).update(tasks)
        models[role] += 1 + len(experiments.merged_in(role, pool)) + calibrations
        needed = planned(context, role, len(tasks))
        report.memory[role] = max(needed, report.memory.get(role, 0))
    for role, needed in report.memory.items():
        size = 2 * (models[role] + len(expert_tasks[role])) * FACTS["sizes"][role]["bytes"]
        report.disk[f"outputs of {role}, twice with DVC's cache"] = size
        if report.gpu and needed > report.gpu:
            problem = f"{size_text(needed)} of GPU memory for {role}"
            report.missing.append(f"{problem}; the GPU has {size_text(report.gpu)}")
    # once for both sizes of CLIP, whose processors prepare images alike
    test, train = FACTS["test_images"], FACTS["train_images"]
    pictures = sum(test[task] + train.get(task, 0) for task in suite.tasks)
    report.disk["decoded pictures"] = pictures * FACTS["decoded_bytes"]


def planned(context: Context, role: str, tasks: int) -> int:
    """Estimate the GPU memory of a role's calibration, features cached in host memory, in bytes."""
    runs = [run for run in context.experiments.calibrate.values() if run.role == role]
    samples = max((run.samples for run in runs), default=256)
    batch = max((run.batch for run in runs), default=32)
    size, job = FACTS["sizes"][role], Job(tasks, samples, min(batch, samples), on_gpu=True)
    config = {"model_type": size["kind"], "architectures": [size["architecture"]], **size["config"]}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = skeleton(Path(folder))
    needs = estimated(model, job, size["tokens"], size["tokens"] is not None, None)
    return sum(needs["device"].values())


def compare_disk(root: Path, report: Checkup) -> None:
    """Compare the disks of the project and of the hub's cache, which may be one, with the needs."""
    folders = (Path(constants.HF_HUB_CACHE), *Path(constants.HF_HUB_CACHE).parents)
    cache = next(path for path in folders if path.exists())
    if os.stat(root).st_dev == os.stat(cache).st_dev:
        cache = root
    needs = Counter({cache: report.disk["the hub's cache"]})
    needs[root] += sum(report.disk.values()) - report.disk["the hub's cache"]
    for part in ("outputs", ".dvc/cache", ".featcal/decoded"):  # written by earlier runs
        files = (file for file in (root / part).rglob("*") if file.is_file())
        needs[root] -= sum(file.stat().st_size for file in files)
    for folder, needed in needs.items():
        free = shutil.disk_usage(folder).free
        if needed > free:
            problem = f"{size_text(needed)} of disk in {folder}, where {size_text(free)} are free"
            report.missing.append(problem)


def tests_lack(suite: Suite) -> list[str]:
    """Return the unmet needs of public tests of language models besides their data, with ways out."""
    texts, tests = suite.language.texts, suite.language.tests
    if texts is None or texts.source == "mini" or not tests:
        return []
    missing = [] if harness.installed() else [f"lm-evaluation-harness (lm_eval): {harness.INSTALL}"]
    lacks = {key: harness.unmet(PUBLIC[name]) for key, name in tests.items() if name in PUBLIC}
    return missing + [f"{key}: {need}; {way}" for key, rows in lacks.items() for need, way in rows]


def show(report: Checkup) -> None:
    """Print tables, then the list of what is missing."""
    rows = [
        [r.name, r.part, r.state, "unknown" if r.bytes is None else size_text(r.bytes)]
        for r in report.repositories
        if r.state != "cached"
    ]
    title = "repositories of the hub that are not in the cache, and what is to download"
    table(title, ["name", "for", "state", "download"], rows)
    needs = [[f"disk: {name}", size_text(size)] for name, size in report.disk.items()]
    needs += [[f"GPU memory: {role}", size_text(size)] for role, size in report.memory.items()]
    table("needed; memory of the largest calibration", ["what", "needed"], needs)
    suite = f" for the suite {report.suite}" if report.suite else ""
    if report.missing:
        say("\n  - ".join([f"missing{suite}:", *report.missing]))
    elif suite:
        say(f"nothing is missing{suite}")
