"""Write ARTIFACT.md for reviewers, and return headline results and claims as data."""

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

from reproduction.report import tables
from reproduction.report.claims import INSIDE, Claim, claims, studied_setting
from reproduction.report.evidence import Evidence
from reproduction.report.pages import cost
from reproduction.report.paper import packaged
from reproduction.report.verdicts import Verdict, judged, sources
from reproduction.results import FOLDERS, project_root

REQUEST = "pipeline/request/dvc.yaml"  # stages that `dvc repro` does not run
MAKE_REPRO = ["gather@scores-clip_b32-8", "headline"]  # stages of `make repro`
MAKE_REAL = [  # stages of `make real`
    f"{REQUEST}:request@{kind}" for kind in ("scores-minilm-8", "drift-minilm-8", "scores-vit_s-8")
]
EXPERTS = "pipeline/prepare/dvc.yaml:prepare_role@vit_s-8"  # experts of Table 1 on real images
# A test holds it against scripts/compare_results.py.
TOLERANCE = "±1 point on an average, ±3 on a single task, each √(500/n) times as much for tests of n < 500 answers"


def text(suite: str) -> str:
    """Return ARTIFACT.md: the template artifact.md filled with verdicts and minutes."""
    stages = [name for name in upstream() if ":" not in name]
    requests = [name for name in upstream() if name.startswith(REQUEST)]
    row = "| {} | `dvc repro {}` | {} |\n".format
    rows = [row(name.partition("@")[2], name, minutes(suite, [name])) for name in requests]
    page = files("reproduction.report").joinpath("artifact.md").read_text(encoding="utf-8")
    return page.format(
        suite=suite,
        label=packaged("differences.yaml")[suite]["label"],
        tolerance=TOLERANCE,
        machine="; ".join(cost.machines(suite)) or "none yet",
        total=minutes(suite, stages),
        repro=minutes(suite, MAKE_REPRO),
        real=minutes(suite, MAKE_REAL),
        experts=minutes(suite, [EXPERTS]),
        whole=minutes(suite, requests),
        claims=_table(suite),
        studies="".join(rows),
    )


def minutes(suite: str, stages: list[str]) -> str:
    """Return the recorded minutes of these DVC stages and all that they need, a whole number."""
    seconds, needed = cost.stage_seconds(suite), set().union(*(upstream()[s] for s in stages))
    return f"{sum(s for stage, s in seconds.items() if stage in needed) / 60:.0f}"


@cache
def upstream() -> dict[str, set[str]]:
    """Return each stage's dependencies by their names in run records; keys may name a file."""
    import networkx
    from dvc.repo import Repo

    with Repo(str(project_root())) as repo:
        graph = repo.index.graph
        # featcal stage VERB KEY
        keys = {stage: "@".join((stage.cmd or "").split()[2:4]) for stage in graph}
        needs = {}
        for stage in graph:
            file = "" if stage.path_in_repo == "dvc.yaml" else f"{stage.path_in_repo}:"
            ancestors = {stage, *networkx.descendants(graph, stage)}
            needs[file + stage.name] = {keys[stage_needed] for stage_needed in ancestors}
        return needs


def stages_of(claim: Claim, suite: str) -> list[str]:
    """Return the stages that recompute every verdict on a claim: results by source, and its page."""
    has_page = (project_root() / "notebooks" / f"{claim.location}.ipynb").is_file()
    page, stages = f"page@{claim.location if has_page else 'scoreboard'}", dict[str, None]()
    counterparts = filter(None, (source.counterpart(claim) for source in sources(suite)))
    for part in (part for whole in counterparts for part in (whole.parts.values() or [whole])):
        for _, side in part.terms:
            key = f"{side.get('role', part.role)}-{side.get('pool', part.pool)}"
            for kind in _kinds(part, side):
                names = (f"gather@{kind}-{key}", f"{REQUEST}:request@{kind}-{key}")
                stages |= dict.fromkeys(name for name in names if name in upstream())
    return [*(name for name in stages if not upstream()[name] <= upstream()[page]), page]


def _kinds(claim: Claim, side: dict[str, Any]) -> list[str]:
    """Return the results folders that one side of a claim is read from."""
    file = side.get("file", claim.file)
    folders = [FOLDERS.get(file, file.partition(".")[0])]
    folders += ["expert_seeds"] if file == "scores" else []
    if claim.kind in ("together", "apart") or file == "corrupted":
        folders.append("scores")
    control = side.get("method") in ("anchor", "rescaled")
    control = control or str(side.get("setting")).startswith("without_")
    return [*folders, "ablate"] if file == "scores" and control else folders


def _table(suite: str) -> str:
    """Return the headline claims in the paper's order with verdicts, a command and its minutes."""
    headline, columns = [claim for claim in claims() if claim.headline], {}
    for source in sources(suite):
        texts = columns[source.title] = []
        for claim, (first, *others) in zip(headline, source.judged(headline), strict=True):
            if first is None:
                texts.append("–")
                continue
            notes = [f"tuned: {v.word}" for v in others if v and claim.has_settings]
            notes += filter(None, [first.share_of(claim)])
            texts.append(first.word + (f" ({'; '.join(notes)})" if notes else ""))
    lines = [f"| {' | '.join(['claim of the paper', *columns, 'command', 'minutes'])} |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for claim, *texts in zip(headline, *columns.values(), strict=True):
        stages = stages_of(claim, suite)
        cells = [" ".join(claim.sentence.split()), *texts, f"`dvc repro {' '.join(stages)}`"]
        lines.append(f"| {' | '.join([*cells, minutes(suite, stages)])} |")
    return "\n".join(lines) + "\n\n"


ROLE, POOL, MERGER = "clip_b32", "8", "task_arithmetic"  # Table 1; the merger of its curves
TASKS, BLOCKS = ("task", "merged", "featcal", "expert"), ("block", "merged", "featcal")


def metrics(data: Evidence) -> dict[str, Any]:
    """Return averages by merger, merged and calibrated at each setting, and the experts'."""
    settings, averages = tables.settings_shown(data.suite), {}
    for upstream in tables.UPSTREAMS:
        keys = {"merged": (upstream, "merged", "")}
        keys |= {f"featcal_{tables.SHORT[name]}": (upstream, "featcal", name) for name in settings}
        means = {name: tables.average(data, key) for name, key in keys.items()}
        if known := {name: round(value.mean, 4) for name, value in means.items() if value}:
            averages[upstream] = known
    if expert := tables.average(data, ("", "expert", "")):
        averages["expert"] = round(expert.mean, 4)
    return averages


def by_task(data: Evidence) -> list[dict[str, Any]]:
    """Return the scores of each task that merged, calibrated and expert models have."""
    means = _means(data, "scores", "task", "value", TASKS[1:]).dropna().round(4)
    return [{"task": task, **means.loc[task]} for task in data.tasks if task in means.index]


def by_block(data: Evidence) -> list[dict[str, Any]]:
    """Return relative drift after each block, mean over tasks, of merged and calibrated models."""
    means = _means(data, "drift", "block", "relative_drift", BLOCKS[1:]).dropna().round(6)
    blocks = sorted(block for block in means.index if block not in INSIDE)
    return [{"block": int(block) + 1, **means.loc[block]} for block in blocks]


def _means(
    data: Evidence, file: str, column: str, measure: str, methods: Sequence[str]
) -> pd.DataFrame:
    """Return the mean of a measure by task or block, a column for each method at its main setting."""
    main = studied_setting(data.suite)
    keys = {m: tables.model_key("" if m == "expert" else MERGER, m, main) for m in methods}
    rows = {method: tables.rows_of(data, key, file) for method, key in keys.items()}
    return pd.DataFrame({m: frame.groupby(column)[measure].mean() for m, frame in rows.items()})


def claims_as_data(suite: str) -> dict[str, Any]:
    """Return every claim with its verdicts by source and setting."""
    columns, entries = judged(suite), {}
    for c, *row in zip(claims(), *columns.values(), strict=True):
        verdicts = {}
        for source, at_settings in zip(columns, row, strict=True):
            if any(at_settings):
                by_setting = zip(source.settings, at_settings, strict=True)
                verdicts[source.key] = {setting: _entry(v) for setting, v in by_setting}
        entries[c.id] = {
            "place": c.location, "sentence": " ".join(c.sentence.split()), "source": c.source, "headline": c.headline,
            "group": c.group, "verdicts": verdicts,
        }  # fmt: skip
    return {"suite": suite, "settings": tables.SETTING_LABELS, "claims": entries}


def _entry(verdict: Verdict) -> dict[str, Any]:
    """Return one verdict as data; a claim about several has the margin of its deciding part."""
    noise = {"total": _finite(verdict.noise)}
    if verdict.parts_of_noise:  # squares of all parts add up to the total's
        draws, trainings = verdict.parts_of_noise
        rest = max(verdict.noise**2 - draws**2 - trainings**2, 0.0)
        parts = {"draws": draws, "trainings": trainings, "test_samples": math.sqrt(rest)}
        noise |= {name: _finite(part) for name, part in parts.items()}
    return {
        "verdict": verdict.word, "margin": _finite(verdict.margin), "noise": noise,
        "fragile": verdict.fragile, "drawn_once": verdict.one_run, "detail": verdict.detail,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
