"""Run the stages of dvc.yaml, as DVC resolves them, on the smoke suite in one process."""

import re
import shutil
from contextlib import chdir
from functools import cache
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import networkx
import yaml
from encoders import dinov2, encoder, task
from gguf_model import chat_model
from pages import without_kernels
from safetensors.torch import load_file, save_file

import pipeline
from reproduction.engine import context, costs
from reproduction.engine.workers import fan_out
from reproduction.experiments import ADAPTER_SETTINGS, ADAPTERS, studies
from reproduction.stages.command import run_stage
from reproduction.studies import default, samples

LAID_OUT = ("dvc.yaml", "pipeline", "featcal", "reproduction", "notebooks", "book", "suites")
DEPTH = {"clip_b32": 2, "flan_t5_base": 1, "llama_3b": 1}  # blocks left of a base's lists
FEW = {"samples": 16, "batch": 8, "seeds": [42, 43]}
BRIEFLY = {"steps": 3, "samples": None, "batch": 8}
SHORT: dict[str, dict] = {"wudi": {"variant": "fusion_bench", "steps": 2}, "adamerging": BRIEFLY}
# One of each kind is run, the others are null.
RUN = {
    "calibrate": ("average", "task_arithmetic"),
    "adapt": {"task_arithmetic": ("surgery", "mean_shift"), "average": ("prob_surgery",)},
}
POOLS = "clip_b32-8 clip_l14-8 clip_b32-14 minilm-8 vit_s-8".split()
POOLS += ["flan_t5_base-glue", "llama_3b-mergebench", "smollm2-chat"]
PROB_SURGERY = {"hidden": 32, "kl_weight": 1.0e-4, "steps": 3}
COMPARISON = {"batch": 8, "surgery": {"rank": 4, "steps": 3}, "prob_surgery": PROB_SURGERY}
AT = {"ridge": 1.0e-6, "anchor_blend": 2.0, "interpolation": 0.9}
# Values that replace those of the mini group, by study.
STUDIED: dict[str, dict] = {
    "ablate": {
        "upstreams": ["task_arithmetic"], "samples": 16, "batch": 8,
        "rescale": {"factors": [0.5, 1.0], "split": "validation", "samples": 24},
    },
    "samples": {"samples": [16, 64], "seeds": [42]},  # the smoke suite has 60 test images
    "cost": {"samples": 16, "audit": [1, 3]},
    "corrupted": {"corruptions": ["motion_blur", "fog"], "samples": 16},
    "sweep": {
        "upstreams": ["task_arithmetic"], "samples": 16, "batch": 8,
        "around": [{"setting": "suite", "featcal": AT, "ridge": [1.0e-6, 1.0], "interpolation": [0.9]}],
    },
    "extrapolation": {
        "samples": 8, "held_out": 8, "batch": 8, "orders": ["forward"], "interpolations": [0.3],
        "blends": [1.0, 2.0], "ridges": [0.01, 0.1], "scored": 40,
    },
    "task_counts": {"upstreams": ["task_arithmetic"], "counts": [2, 3], "shuffles": 1, "samples": 16},
    "theory": {"samples": 16, "batch": 8, "images": 6, "traced": 2, "nodes": [2, 4]},
    "choices": {"samples": 16, "batch": 8, "seeds": [42, 43], "vary": {"split": ["validation"], "samples": [8]}},
    "default": {
        "mergers": {"average": {}}, "draws": [[16, 42], [8, 42]], "batch": 8, "rank": [2], "hidden": [4],
        "steps": [2, 3],
    },
    "field": {
        "samples": 16, "batch": 8, "rows": 24, "mergers": {"iso_c": {"scale": [0.5, 1.0]}, "fisher": {}},
        "trained": ["iso_c"], "epochs": 2, "surgery_v2": {"rank": 2, "steps": 3}, "interv_merge": {"steps": 3},
        "tangent": [0.3, 0.5], "scored": 40,
    },
    "offset": {"strengths": [0.0, 1.0], "samples": 16, "scored": 40},
    "pattern": {"strengths": [0.0, 1.0], "factors": [1.0, 1.5], "samples": 16},
    "expert_seeds": {"upstreams": ["task_arithmetic"], "settings": ["suite", "paper"], "seeds": [1]},
    "second_encoder": {
        "model": "data/encoder", "upstreams": ["task_arithmetic"], "samples": 16, "scored": 40, "comparison": COMPARISON,
        "fine_tune": {"steps": 2, "batch": 8, "warm_up": 1},
    },
}  # fmt: skip
SHOWN = {"minilm-8": "banking77", "vit_s-8": "digits"}  # the task of the stage `measure`
# Of studies that do the same for several roles and pools, those that are run; all others are null.
RUN_FOR = dict.fromkeys(("samples", "cost", "field", "task_counts", "theory", "sweep", "extrapolation"), ("clip_b32-8",)) | {
    "ablate": ("clip_b32-8",), "choices": ("flan_t5_base-glue",), "default": ("clip_b32-8", "flan_t5_base-glue", "smollm2-chat"),
    "expert_seeds": ("minilm-8", "smollm2-chat"),
}  # fmt: skip
CHAIN = "prepare_data prepare merge calibrate adapt multitask evaluate gather".split()
PAGES = ("table01", "table06")  # test_notebooks.py executes every page
# Of these values those that a role has of its own; the study by default calibrates six times a draw.
OWN = {
    "minilm-8": {"corrupted": {"corruptions": ["typing_errors"], "severity": [1, 3]}},
    **dict.fromkeys(("flan_t5_base-glue", "smollm2-chat"), {"default": {"draws": [[16, 42]]}}),
}
UNTRAINED = {"samples": 16, "seeds": [42]}
ADAPTED = {**UNTRAINED, "steps": 3}


def smoke_params() -> dict:
    """Return all settings with a smoke group in every entry, made from the mini group."""
    params = pipeline.settings()
    params["suite"] = "smoke"
    for key, mergers in params["merge"].items():
        for name, groups in mergers.items():
            groups["smoke"] = _merger(key, name, groups["mini"]) if key in POOLS else None
    for section in ("calibrate", "adapt"):
        for key, entry in params[section].items():
            few = FEWER[section](key, entry["mini"]) if key in POOLS and entry["mini"] else None
            entry["smoke"] = few
            if key.endswith("-8"):
                rows = entry["from"].items()
                entry["from"] = {name: ROWS[section](name, row) for name, row in rows}
    for entry in params["studied"].values():
        mini = entry["mini"]
        entry["smoke"] = mini | {"comparison": mini["comparison"] | COMPARISON}
    for study in studies():
        for key, entry in params[study].items():
            own = STUDIED[study] | OWN.get(key, {}).get(study, {})
            run = key in RUN_FOR.get(study, (key,))
            entry["smoke"] = {**(entry["mini"] or entry["paper"]), **own} if run else None
    for entry in params["multitask"].values():
        entry["smoke"] = {"steps": 4} if entry["mini"] else None
    for key, entry in params["measure"].items():
        entry["smoke"] = {**entry["mini"], "task": SHOWN.get(key, "dtd")}
    return params


def _merger(key: str, name: str, group: dict | None) -> dict | None:
    if key.endswith("-14"):  # of four tasks, a scale of a quarter would be the average
        scale = {"scale": 0.3} if name == "task_arithmetic" else {}
        return {**group, **SHORT.get(name, {}), **scale}
    if group is None or name in SHORT:
        return group and {**group, **SHORT[name]}
    return {"samples": 16, "batch": 8} if "stream" in group else group


def _calibrations(key: str, group: dict) -> dict:
    """Return the smoke group of FeatCal; texts have one setting."""
    if key.endswith(("-8", "-14")):
        few = FEW if key == "clip_b32-8" else {**FEW, "seeds": [42]}
        return {word: {**own, **few} for word, own in group.items()}
    return {"paper": {**group["paper"], "samples": 16, "seeds": [42], "batch": 8}}


def _adapters(key: str, group: dict) -> dict:
    """Return the smoke group of adapters; texts have one setting."""
    words = ADAPTER_SETTINGS if key.endswith(("-8", "-14")) else ("paper",)
    chosen = {method: {w: own[w] for w in words if w in own} for method, own in group.items()}
    return {method: _few(method, own) for method, own in chosen.items()}


def _few(method: str, settings: dict) -> dict:
    few = UNTRAINED if method == "mean_shift" else ADAPTED
    return {word: own and {**own, **few} for word, own in settings.items()}


def _adapted(name: str, row: dict | None) -> dict | None:
    """Return the adapters of a merged model, with the settings that only its row has."""
    run, left_out = RUN["adapt"].get(name), dict.fromkeys(ADAPTER_SETTINGS)
    if run is None or row is None:
        return None
    found: dict = dict.fromkeys(ADAPTERS, left_out)
    for method in run:
        alone = {word: own for word, own in row.get(method, {}).items() if "stream" in own}
        found[method] = _few(method, alone)
    return found


FEWER = {"calibrate": _calibrations, "adapt": _adapters}
ROWS = {"calibrate": lambda name, row: {} if name in RUN["calibrate"] else None, "adapt": _adapted}


def copied(work: Path) -> None:
    """Copy the files of the project that a project folder without results needs."""
    ignored = shutil.ignore_patterns("__pycache__", "_build", "pages", "dvc.lock")
    for name in LAID_OUT:
        source = pipeline.ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / name, ignore=ignored)
        else:
            shutil.copyfile(source, work / name)


def cut_down(folder: Path, depth: int) -> None:
    """Cut a base model of the package down to its first blocks."""
    config, kept = folder / "config.json", re.compile(r"\.(?:layers|block)\.(\d+)\.")
    counts = re.compile(r'("num_(?:hidden_|decoder_)?layers": )(\d+)')
    config.write_text(counts.sub(lambda m: f"{m[1]}{min(int(m[2]), depth)}", config.read_text()))
    tensors = load_file(folder / "model.safetensors").items()
    few = {n: t for n, t in tensors if not (at := kept.search(n)) or int(at[1]) < depth}
    save_file(few, folder / "model.safetensors", metadata={"format": "pt"})


def lay_out(work: Path) -> None:
    """Make a project folder with small models, the smoke suite and a DVC repository without git."""
    copied(work)
    for name, depth in DEPTH.items():
        cut_down(work / "reproduction" / "mini" / "models" / name, depth)
    shutil.copyfile(pipeline.ROOT / "tests/smoke/smoke.yaml", work / "suites" / "smoke.yaml")
    pipeline.write_settings(work, smoke_params())
    encoder(work / "data" / "encoder")
    dinov2(work / "data" / "vision")
    chat_model(work / "data" / "chat")
    for number, name in enumerate(("clinc150", "banking77", "tosdr_cases")):
        task(work / "data" / "sentences" / name, count=120, seed=7 + number)
    from dvc.repo import Repo

    Repo.init(str(work), no_scm=True).close()


def keep_a_chain(work: Path) -> None:
    """Reduce the pipeline to the stages of one role, as DVC looks at every stage."""
    key = "clip_b32-8"
    kept = {"role": ["clip_b32"], "pool": [8]}
    for file in pipeline.files(work):
        content = yaml.safe_load(file.read_text())
        named = [own for own in content.get("vars", ()) if isinstance(own, dict)]
        repeated = {f"${{{n}}}": {key: v.get(key)} for own in named for n, v in own.items()}
        repeated["${gathered}"] = {f"scores-{key}": f"scores/{key}"}
        stages = content["stages"].items()
        content["stages"] = {name: block for name, block in stages if name in CHAIN}
        for block in content["stages"].values():
            if "matrix" in block:
                block["matrix"] = {part: kept[part] for part in block["matrix"]}
            elif "foreach" in block:
                block["foreach"] = repeated.get(block["foreach"], {key: {}})
        if content["stages"]:
            file.write_text(yaml.safe_dump(content, sort_keys=False))
        else:
            file.unlink()


def commands(work: Path) -> list[list[str]]:
    """Return every command of the graph as DVC resolves it, after those that it needs."""
    from dvc.repo import Repo

    with Repo(str(work)) as repo:
        ordered = list(networkx.dfs_postorder_nodes(repo.index.graph))
        # pages do not wait for results on request
        ordered.sort(key=lambda stage: stage.path_in_repo == "dvc.yaml")
        return [stage.cmd.split() for stage in ordered]


def fan_out_here(label, function, jobs, *_, **__):
    return fan_out(label, function, jobs, workers=0)


def costs_here(*given):
    """Measure in this process; the study `cost` starts one for each job."""
    with patch.object(costs, "fan_out", fan_out_here):
        return costs.costs(*given)


def run_smoke_graph(work: Path) -> dict[str, str]:
    """Run the graph in the new folder `work`; return the sha256 of every weight and score file."""
    lay_out(work)
    # 250 stages would read the same settings
    once = patch.object(context, "load_experiments", cache(context.load_experiments))
    here = patch.object(default, "fan_out", fan_out_here)
    measured = patch.object(samples, "costs", costs_here)
    with chdir(work), without_kernels(), once, here, measured:
        for program, stage, verb, *key in commands(work):
            if (program, stage) == ("featcal", "stage") and (verb != "page" or key[0] in PAGES):
                run_stage(verb, key[0] if key else None)
    files = [*work.glob("outputs/**/*.safetensors"), *work.glob("results/**/*.csv")]
    return {str(f.relative_to(work)): sha256(f.read_bytes()).hexdigest() for f in sorted(files)}
