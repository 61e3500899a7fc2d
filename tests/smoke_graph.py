"""The graph of dvc.yaml on the smoke suite: the same stages, resolved by DVC itself, run one after the other in this process."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import networkx
import yaml
from pages import without_kernels

import pipeline
from featcal.pools import PARTS, TEXT_PARTS
from featcal.runs import ADAPTERS
from featcal.stages.run import run_stage
from featcal.studies import STUDIES

ROOT = Path(__file__).parents[1]
LAID_OUT = ("dvc.yaml", "pipeline", "featcal", "notebooks", "book", "suites")
ROLES = ("clip_b32", "clip_l14")  # the smoke suite has no model for the second
FEW = {"samples": 16, "batch": 8, "seeds": [42, 43]}
SHORT = {"wudi": {"variant": "fusion_bench", "steps": 2}, "adamerging": {"steps": 3, "samples": None, "batch": 8}}
# One of each kind is run, the others are null: their stages run too, and leave an empty folder.
RUN = {
    "calibrate": [f"{r}-8-{u}-{s}" for r in ROLES for u in ("average", "task_arithmetic") for s in ("suite", "paper")],
    "adapt": [f"clip_b32-8-{a}" for a in ("task_arithmetic-surgery", "task_arithmetic-mean_shift", "average-prob_surgery")],
    "ablate": ["clip_b32-8-task_arithmetic"],
    "larger_pools": ["clip_b32-14"],
    "language_pools": ["flan_t5_base-glue", "llama_3b-mergebench"],
}
BRIEF = {"steps": 3}
RIVALS = {"batch": 8, "surgery": {"rank": 4, **BRIEF}, "prob_surgery": {"hidden": 32, "kl_weight": 1.0e-4, **BRIEF}}
AT = {"ridge": 1.0e-6, "anchor_blend": 2.0, "interpolation": 0.9}
# By study, what replaces the mini group's values; a study that is left out is not run. FEW holds one of its numbers and seeds.
STUDIED: dict[str, dict] = {
    "samples": {"samples": [16, 64], "seeds": [42]},  # the smoke suite has 60 test images
    "cost": {"samples": 16, "audit": [1, 3]},
    "corrupted": {"corruptions": ["motion_blur", "fog"], "samples": 16},
    "sweep": {
        "upstreams": ["task_arithmetic"], "samples": 16, "batch": 8,
        "around": [{"setting": "suite", "featcal": AT, "ridge": [1.0e-6, 1.0], "interpolation": [0.9]}],
    },
    "task_counts": {"counts": [2, 3], "shuffles": 1, "samples": 16},
    "theory": {"samples": 16, "batch": 8, "images": 6, "traced": 2, "nodes": [2, 4]},
    "choices": {"samples": 16, "batch": 8, "seeds": [42, 43], "vary": {"split": ["validation"], "samples": [8]}},
    "tune": {"samples": 16, "batch": 8, "trials": 3},
}  # fmt: skip
UNTRAINED = {"samples": 16, "seeds": [42]}
ADAPTED = {**UNTRAINED, "steps": 3}


def smoke_params(root: Path = ROOT) -> dict:
    """params.yaml with a smoke group in every experiment, made from the mini group."""
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["suite"] = "smoke"
    for key, entry in params["merge"].items():
        entry["smoke"] = entry["mini"] if "closed_form" in key else SHORT.get(entry["method"], entry["mini"])
    for entry in params["merge_with_data"].values():
        entry["smoke"] = SHORT.get(entry["method"], {"samples": 16, "batch": 8})
    for key, entry in params["calibrate"].items():
        entry["smoke"] = {**entry["mini"], **FEW} if key in RUN["calibrate"] else None
    for key, entry in params["adapt"].items():
        few = UNTRAINED if entry["method"] == "mean_shift" else ADAPTED
        entry["smoke"] = {name: {**group, **few} for name, group in entry["mini"].items()} if key in RUN["adapt"] else None
    for key, entry in params["ablate"].items():
        rescale = {"factors": [0.5, 1.0], "split": "validation", "samples": 24}
        entry["smoke"] = {**entry["mini"], **FEW, "rescale": rescale} if key in RUN["ablate"] else None
    for study in STUDIES:
        for entry in params[study].values():
            entry["smoke"] = {**entry["mini"], **STUDIED[study]} if study in STUDIED else None
            if entry["smoke"] and "rivals" in entry["smoke"]:
                entry["smoke"]["rivals"] = {**entry["mini"]["rivals"], **RIVALS}
    for key, entry in params["larger_pools"].items():
        for part in PARTS:
            smoke = _smoke_part(part, entry[part]["mini"]) if key in RUN["larger_pools"] else None
            entry[part] = {**entry[part], "smoke": smoke}  # pools share their groups by YAML's anchors
    for key, entry in params["language_pools"].items():
        for part in TEXT_PARTS:
            smoke = _smoke_text(part, entry[part]["mini"]) if key in RUN["language_pools"] else None
            entry[part] = {**entry[part], "smoke": smoke}
    for entry in params["multitask"].values():
        entry["smoke"] = {"steps": 4}
    for entry in params["measure"].values():
        entry["smoke"] = {**entry["mini"], "task": "dtd"}
    return params


def _smoke_part(part: str, group: dict) -> dict:
    """The smoke group of one part of a larger pool."""
    few = {"mergers": {}, "featcal": {**FEW, "seeds": [42]}, "mean_shift": UNTRAINED}.get(part, ADAPTED)
    short = {**SHORT, "task_arithmetic": {"scale": 0.3}}  # of four tasks, a quarter would be the average
    return {name: {**inner, **few, **short.get(name, {})} for name, inner in group.items()}


def _smoke_text(part: str, group: dict) -> dict:
    """The smoke group of one part of a pool of texts: one setting of each."""
    if part == "mergers":
        return group
    few = {"samples": 16, "seeds": [42]} | ({"batch": 8} if part == "featcal" else BRIEF)
    return {"paper": {**group["paper"], **few}}


def copied(work: Path, root: Path = ROOT) -> None:
    """What a project folder without results needs of the files of `root`."""
    ignored = shutil.ignore_patterns("__pycache__", "_build", "pages", "dvc.lock")
    for name in LAID_OUT:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, work / name, ignore=ignored)
        else:
            shutil.copyfile(source, work / name)


def lay_out(work: Path, root: Path = ROOT) -> None:
    """A project folder without results: the tracked files of `root`, the smoke suite, and a DVC repository without git."""
    copied(work, root)
    shutil.copyfile(root / "tests" / "smoke" / "smoke.yaml", work / "suites" / "smoke.yaml")
    (work / "params.yaml").write_text(yaml.safe_dump(smoke_params(root), sort_keys=False))
    from dvc.repo import Repo

    Repo.init(str(work), no_scm=True).close()


def keep_a_chain(work: Path) -> None:
    """Leave out, of params.yaml and of the pipeline, every experiment but a few: each stage that DVC runs starts a process."""
    params = yaml.safe_load((work / "params.yaml").read_text())
    kept = {
        "merge": ["average", "task_arithmetic"], "merge_with_data": ["regmean"],
        "adapt": [f"task_arithmetic-{method}" for method in ADAPTERS],
        "calibrate": [f"{u}-{s}" for u in ("average", "task_arithmetic") for s in ("suite", "paper")],
        "ablate": ["task_arithmetic"],
    }  # fmt: skip
    folders = {"merge": "merged", "merge_with_data": "merged", "calibrate": "calibrated", "adapt": "adapted", "ablate": "ablated"}
    lines = {file: file.read_text().splitlines() for file in pipeline.files(work)}
    for section, names in kept.items():
        for key in list(params[section]):
            role, pool, name = key.split("-", 2)
            if name not in names:
                del params[section][key]
                gone = {f"outputs/${{suite}}/{folders[section]}/${{key}}-{name}"}
                gone |= {f"{section}.${{key}}-{name}.{part}" for part in ("method", "${suite}")}
                lines = {f: [line for line in old if line.strip().removeprefix("- ") not in gone] for f, old in lines.items()}
    starts = {f"{c['role']}-{c['pool']}-{c['upstream']}" for c in params["calibrate"].values()}
    params["upstreams"] = {key: entry for key, entry in params["upstreams"].items() if key in starts}
    for file, kept_lines in lines.items():
        file.write_text("\n".join(kept_lines) + "\n")
    (work / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def commands(work: Path) -> list[list[str]]:
    """Every command of the graph that is not frozen, what it needs before it, as DVC resolves them."""
    from dvc.repo import Repo

    with Repo(str(work)) as repo:
        ordered = list(networkx.dfs_postorder_nodes(repo.index.graph))
        return [stage.cmd.split() for stage in ordered if not stage.frozen]


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """The current folder for the length of the block."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_smoke_graph(work: Path, root: Path = ROOT) -> dict[str, str]:
    """Run the graph in the empty folder `work`; sha256 of every weight and score file, by path."""
    lay_out(work, root)
    with working_in(work), without_kernels():
        for command in commands(work):
            if command[:2] == ["featcal", "stage"]:
                run_stage(command[2], command[3] if len(command) > 3 else None)
    files = [*work.glob("outputs/**/*.safetensors"), *work.glob("results/**/*.csv")]
    return {str(file.relative_to(work)): sha256(file.read_bytes()).hexdigest() for file in sorted(files)}
