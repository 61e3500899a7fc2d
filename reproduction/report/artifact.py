"""The report outside of the book: ARTIFACT.md for reviewers, and headline numbers and claims as data."""

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

from reproduction.report import tables
from reproduction.report.claims import INSIDE, Claim, claims, studied_setting
from reproduction.report.evidence import LIES_WITH, Evidence, project_root
from reproduction.report.pages import cost
from reproduction.report.paper import packaged
from reproduction.report.verdicts import EvidenceSource, Verdict, sources

REQUEST = "pipeline/request/dvc.yaml"  # what `dvc repro` leaves as it is in git
REPRO = ["gather@scores-clip_b32-8", "headline"]  # what `make repro` computes
REAL = [  # what `make real` computes
    f"{REQUEST}:request@{kind}" for kind in ("scores-minilm-8", "drift-minilm-8", "scores-vit_s-8")
]
EXPERTS = "pipeline/prepare/dvc.yaml:prepare_role@vit_s-8"  # those of Table 1 on real images
# A test holds it against scripts/compare_results.py.
TOLERANCE = "±1 point on an average, ±3 on a single task, each √(500/n) times as much for tests of n < 500 answers"


def text(suite: str) -> str:
    """Return the whole page: artifact.md of this folder with verdicts, minutes and licences."""
    own = [name for name in upstream() if ":" not in name]
    asked = [name for name in upstream() if name.startswith(REQUEST)]
    row = "| {} | `dvc repro {}` | {} |\n".format
    rows = [row(name.partition("@")[2], name, minutes(suite, [name])) for name in asked]
    page = files("reproduction.report").joinpath("artifact.md").read_text(encoding="utf-8")
    return page.format(
        suite=suite,
        label=packaged("differences.yaml")[suite]["label"],
        tolerance=TOLERANCE,
        machine="; ".join(cost.machines(suite)) or "none yet",
        total=minutes(suite, own),
        repro=minutes(suite, REPRO),
        real=minutes(suite, REAL),
        experts=minutes(suite, [EXPERTS]),
        whole=minutes(suite, asked),
        claims=_table(suite),
        studies="".join(rows),
    )


def minutes(suite: str, stages: list[str]) -> str:
    """Return the minutes on record of these stages of DVC and of all that they need, a whole number."""
    found, needed = cost.quickest(suite), set().union(*(upstream()[stage] for stage in stages))
    return f"{sum(spent for stage, spent in found.items() if stage in needed) / 60:.0f}"


@cache
def upstream() -> dict[str, set[str]]:
    """Return by stage, with its file but for dvc.yaml, the run records' names of what it needs."""
    import networkx
    from dvc.repo import Repo

    with Repo(str(project_root())) as repo:
        graph = repo.index.graph
        # featcal stage VERB KEY
        keys = {stage: "@".join((stage.cmd or "").split()[2:4]) for stage in graph}
        found = {}
        for stage in graph:
            file = "" if stage.path_in_repo == "dvc.yaml" else f"{stage.path_in_repo}:"
            needed = {stage, *networkx.descendants(graph, stage)}
            found[file + stage.name] = {keys[one] for one in needed}
        return found


def stages_of(claim: Claim, suite: str) -> list[str]:
    """Return the stages that recompute every verdict on a claim: results by source, and its page."""
    shown = (project_root() / "notebooks" / f"{claim.place}.ipynb").is_file()
    page, found = f"page@{claim.place if shown else 'scoreboard'}", dict[str, None]()
    about = [own for source in sources(suite) if (own := source.counterpart(claim))]
    for part in (part for own in about for part in (own.parts.values() or [own])):
        for _, side in part.terms:
            place = f"{side.get('role', part.role)}-{side.get('pool', part.pool)}"
            for kind in _kinds(part, side):
                names = (f"gather@{kind}-{place}", f"{REQUEST}:request@{kind}-{place}")
                found |= dict.fromkeys(name for name in names if name in upstream())
    return [*(name for name in found if not upstream()[name] <= upstream()[page]), page]


def _kinds(claim: Claim, side: dict[str, Any]) -> list[str]:
    """Return the folders of results that one side of a claim is read from."""
    file = side.get("file", claim.file)
    found = [LIES_WITH.get(file, file.partition(".")[0])]
    found += ["expert_seeds"] if file == "scores" else []
    if claim.kind in ("together", "apart") or file == "corrupted":
        found.append("scores")
    control = side.get("method") in ("anchor", "rescaled")
    control = control or str(side.get("setting")).startswith("without_")
    return [*found, "ablate"] if file == "scores" and control else found


def _table(suite: str) -> str:
    """Return the headline claims in the paper's order with verdicts, a command and its minutes."""
    headline = [claim for claim in claims() if claim.headline]
    columns = {source.title: _words(source, headline) for source in sources(suite)}
    lines = [f"| {' | '.join(['claim of the paper', *columns, 'command', 'minutes'])} |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for claim, *words in zip(headline, *columns.values(), strict=True):
        stages = stages_of(claim, suite)
        cells = [" ".join(claim.sentence.split()), *words, f"`dvc repro {' '.join(stages)}`"]
        lines.append(f"| {' | '.join([*cells, minutes(suite, stages)])} |")
    return "\n".join(lines) + "\n\n"


def _words(source: EvidenceSource, chosen: list[Claim]) -> list[str]:
    """Return each verdict at the printed settings, with the one at the tuned settings behind it."""
    words = []
    for claim, first, *others in zip(chosen, *source.judged(chosen), strict=True):
        also = [f" (tuned: {one.word})" for one in others if one and claim.has_settings]
        words.append("".join([first.word, *also]) if first else "–")
    return words


ROLE, POOL, MERGER = "clip_b32", "8", "task_arithmetic"  # Table 1; the merger of its curves
TASKS, BLOCKS = ("task", "merged", "featcal", "expert"), ("block", "merged", "featcal")


def metrics(ours: Evidence) -> dict[str, Any]:
    """Return averages by merger, merged and calibrated at each setting, and the experts'."""
    settings, found = tables.settings_shown(ours.suite), {}
    for upstream in tables.UPSTREAMS:
        keys = {"merged": (upstream, "merged", "")}
        keys |= {f"featcal_{tables.SHORT[name]}": (upstream, "featcal", name) for name in settings}
        means = {name: tables.average(ours, key) for name, key in keys.items()}
        if known := {name: round(one.mean, 4) for name, one in means.items() if one}:
            found[upstream] = known
    if expert := tables.average(ours, ("", "expert", "")):
        found["expert"] = round(expert.mean, 4)
    return found


def by_task(ours: Evidence) -> list[dict[str, Any]]:
    """Return the scores of each task that merged, calibrated and expert models have."""
    means = _means(ours, "scores", "task", "value", TASKS[1:]).dropna().round(4)
    return [{"task": task, **means.loc[task]} for task in ours.tasks if task in means.index]


def by_block(ours: Evidence) -> list[dict[str, Any]]:
    """Return relative drift after each block, mean over tasks, of merged and calibrated models."""
    means = _means(ours, "drift", "block", "relative_drift", BLOCKS[1:]).dropna().round(6)
    blocks = sorted(block for block in means.index if block not in INSIDE)
    return [{"block": int(block) + 1, **means.loc[block]} for block in blocks]


def _means(
    ours: Evidence, file: str, column: str, measure: str, methods: Sequence[str]
) -> pd.DataFrame:
    """Return the mean of a measure by task or block, a column for each method at its main setting."""
    main = studied_setting(ours.suite)
    keys = {m: tables.model_key("" if m == "expert" else MERGER, m, main) for m in methods}
    rows = {method: tables.rows_of(ours, key, file) for method, key in keys.items()}
    return pd.DataFrame({m: own.groupby(column)[measure].mean() for m, own in rows.items()})


def claims_as_data(suite: str) -> dict[str, Any]:
    """Return every claim with its verdicts by source and setting; the printed ones are counted."""
    verdicts: dict[str, dict[str, dict[str, Any]]] = {claim.id: {} for claim in claims()}
    for source in sources(suite):
        for setting, found in zip(source.settings, source.judged(claims()), strict=True):
            for claim, one in zip(claims(), found, strict=True):
                if one:
                    own = verdicts[claim.id].setdefault(source.key, {})
                    own[setting] = _entry(one)
    entries = {}
    for c in claims():
        entries[c.id] = {
            "place": c.place, "sentence": " ".join(c.sentence.split()), "source": c.source, "headline": c.headline,
            "group": c.group, "verdicts": verdicts[c.id],
        }  # fmt: skip
    return {"suite": suite, "settings": tables.SETTING_LABELS, "claims": entries}


def _entry(verdict: Verdict) -> dict[str, Any]:
    """Return one verdict as data; of a claim about several, margin and noise of the deciding part."""
    noise = {"total": _known(verdict.noise)}
    if verdict.drawn is not None:  # squares of both parts add up to the total's
        noise["draws"] = _known(verdict.drawn)
        noise["test_samples"] = _known(math.sqrt(max(verdict.noise**2 - verdict.drawn**2, 0.0)))
    return {
        "verdict": verdict.word, "margin": _known(verdict.margin), "noise": noise,
        "fragile": verdict.fragile, "drawn_once": verdict.one_run, "detail": verdict.detail,
    }  # fmt: skip


def _known(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
