"""The report outside of the book: ARTIFACT.md for reviewers, and headline numbers and claims as data."""

import math
import re
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

from reproduction.report.claims import INSIDE, Claim, claims, studied_setting
from reproduction.report.evidence import LIES_WITH, Evidence, project_root, select
from reproduction.report.pages import resources
from reproduction.report.paper import packaged
from reproduction.report.statistics import estimate
from reproduction.report.tables import SETTING_LABELS, SHORT, UPSTREAMS, average, settings_shown
from reproduction.report.verdicts import Source, Verdict, rows_of, sources

REQUEST = "pipeline/request/dvc.yaml"  # what `dvc repro` leaves as it is in git
REPRO = ["gather@scores-clip_b32-8", "headline"]  # what `make repro` computes
REAL = [  # what `make real` computes
    f"{REQUEST}:request@{kind}" for kind in ("scores-minilm-8", "drift-minilm-8", "scores-vit_s-8")
]
# A test holds it against scripts/compare_results.py.
TOLERANCE = "±1 point on an average, ±3 on a single task, each √(500/n) times as much for tests of n < 500 answers"
CONTROLS = ("anchor", "rescaled")
EVERYWHERE = "scoreboard"  # shows claims of places that have no page of their own


def text(suite: str) -> str:
    """Return the whole page: artifact.md of this folder with verdicts, minutes and licences."""
    own = [name for name in upstream() if ":" not in name]
    asked = [name for name in upstream() if name.startswith(REQUEST)]
    rows = [
        f"| {name.partition('@')[2]} | `dvc repro {name}` | {minutes(suite, [name])} |\n"
        for name in asked
    ]
    page = files("reproduction.report").joinpath("artifact.md").read_text(encoding="utf-8")
    return page.format(
        suite=suite,
        label=packaged("differences.yaml")[suite]["label"],
        tolerance=TOLERANCE,
        machine=" and ".join(resources.machines(suite)) or "none yet",
        total=minutes(suite, own),
        repro=minutes(suite, REPRO),
        real=minutes(suite, REAL),
        whole=minutes(suite, asked),
        claims=_table(suite),
        studies="".join(rows),
        licences=_licences(),
    )


def minutes(suite: str, stages: list[str]) -> str:
    """Return the minutes on record of these stages of DVC and of all that they need, a whole number."""
    found, needed = resources.quickest(suite), set().union(*(upstream()[stage] for stage in stages))
    return f"{sum(spent for stage, spent in found.items() if stage in needed) / 60:.0f}"


@cache
def upstream() -> dict[str, set[str]]:
    """Return, by name of a stage of DVC, itself and all that it needs, as run records name them: by verb and key.

    Stages of the project's own dvc.yaml are named alone, others as DVC names them: by file and name.
    """
    import networkx
    from dvc.repo import Repo

    with Repo(str(project_root())) as repo:
        graph = repo.index.graph
        names = {
            stage: "@".join((stage.cmd or "").split()[2:4]) for stage in graph
        }  # featcal stage VERB KEY
        return {
            ("" if stage.path_in_repo == "dvc.yaml" else f"{stage.path_in_repo}:") + stage.name: {
                names[one] for one in {stage, *networkx.descendants(graph, stage)}
            }
            for stage in graph
        }


def page_of(place: str) -> str:
    """Return the page of the book that shows a place of the paper."""
    return place if (project_root() / "notebooks" / f"{place}.ipynb").is_file() else EVERYWHERE


def stages_of(claim: Claim, suite: str) -> list[str]:
    """Return the stages that recompute every verdict on a claim: results by source, and its page."""
    page, found = f"page@{page_of(claim.place)}", dict[str, None]()
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
    if claim.kind in ("together", "apart") or file == "corrupted":
        found.append("scores")
    control = side.get("method") in CONTROLS or str(side.get("setting")).startswith("without_")
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


def _words(source: Source, chosen: list[Claim]) -> list[str]:
    """Return each verdict at the printed settings, with the one at the tuned settings behind it."""
    found = [source.judged(chosen, setting) for setting in source.settings]
    words = []
    for claim, first, *others in zip(chosen, *found, strict=True):
        also = [f" (tuned: {one.word})" for one in others if one and claim.has_settings]
        words.append("".join([first.word, *also]) if first else "–")
    return words


def _licences() -> str:
    """Licences by what they are of; those of models from their cards."""
    root = project_root()
    cards = sorted((root / "reproduction" / "mini" / "models").glob("*/README.md"))
    own = {
        card.parent.name: re.search(r"^license: (\S+)", card.read_text(encoding="utf-8"), re.M)
        for card in cards
    }
    kinds = sorted({found[1] for found in own.values() if found})
    rows = ["| code, results, pages | MIT | `LICENSE` |"]
    rows.append(
        f"| models of `mini`, made here: {', '.join(own)} | {', '.join(kinds).upper()} | their `README.md` |"
    )
    if (root / "NOTICE").is_file():
        rows.append(
            "| texts and models of others, in the repository or from a package | see there | `NOTICE` |"
        )
    rows.append(
        "| models and data of `suite: paper`; downloaded, not in the repository | their publishers' | the hub |"
    )
    return "\n".join(
        ["## Licences", "", "| what | licence | stated in |", "|---|---|---|", *rows, ""]
    )


ROLE, POOL, MERGER = (
    "clip_b32",
    "8",
    "task_arithmetic",
)  # Table 1; the merger that its curves are about
TASKS, BLOCKS = ("task", "merged", "featcal", "expert"), ("block", "merged", "featcal")


def metrics(ours: Evidence) -> dict[str, Any]:
    """Return averages by merger, merged and calibrated at each setting, and the experts'."""
    rows = {"merged": ("merged", "")}
    rows |= {f"featcal_{SHORT[name]}": ("featcal", name) for name in settings_shown(ours.suite)}
    found = {
        upstream: {
            name: one for name, key in rows.items() if (one := average(ours, (upstream, *key)))
        }
        for upstream in UPSTREAMS
    }
    means = {u: {name: round(one.mean, 4) for name, one in own.items()} for u, own in found.items()}
    expert = average(ours, ("", "expert", ""))
    return {name: own for name, own in means.items() if own} | (
        {"expert": round(expert.mean, 4)} if expert else {}
    )


def by_task(ours: Evidence) -> list[dict[str, Any]]:
    """Return the scores of each task that merged, calibrated and expert models have."""
    scores = ours.table("scores")
    means = {
        method: select(scores, _of(method, ours)).groupby("task")["value"].mean()
        for method in TASKS[1:]
    }
    shared = pd.DataFrame(means).dropna().round(4).to_dict("index")
    return [{"task": task} | shared[task] for task in ours.tasks if task in shared]


def by_block(ours: Evidence) -> list[dict[str, Any]]:
    """Return relative drift after each block, mean over tasks, of merged and calibrated models."""
    drift = ours.table("drift")
    means = {
        m: select(drift, _of(m, ours)).groupby("block")["relative_drift"].mean() for m in BLOCKS[1:]
    }
    blocks = [
        block
        for block in means["merged"].index
        if block not in INSIDE and block in means["featcal"].index
    ]
    return [
        {"block": int(block) + 1} | {m: round(float(v[block]), 6) for m, v in means.items()}
        for block in sorted(blocks)
    ]


def _of(method: str, ours: Evidence) -> dict[str, str]:
    """Return the keys of one method at its main setting."""
    setting = studied_setting(ours.suite) if method == "featcal" else ""
    return {"upstream": "" if method == "expert" else MERGER, "method": method, "setting": setting}


def claims_as_data(suite: str) -> dict[str, Any]:
    """Return every claim with its verdicts by source and setting; the printed ones are counted."""
    verdicts: dict[str, dict[str, dict[str, Any]]] = {claim.id: {} for claim in claims()}
    for source in sources(suite):
        for setting in source.settings:
            for claim, one in zip(claims(), source.judged(claims(), setting), strict=True):
                if one:
                    own = verdicts[claim.id].setdefault(source.key, {})
                    own[setting] = _entry(one, source.suite, setting)
    facts = ("place", "sentence", "source", "headline", "group")
    about = {c.id: {name: getattr(c, name) for name in facts} for c in claims()}
    for one in about.values():
        one["sentence"] = " ".join(one["sentence"].split())
    entries = {name: about[name] | {"verdicts": own} for name, own in verdicts.items()}
    return {"suite": suite, "settings": SETTING_LABELS, "claims": entries}


def _entry(verdict: Verdict, suite: str, setting: str) -> dict[str, Any]:
    """Return one verdict as data; of a claim about several, margin and noise of the deciding part."""
    noise = {"total": _known(verdict.noise)} | _by_source(verdict, suite, setting)
    return {
        "verdict": verdict.word, "margin": _known(verdict.margin), "noise": noise,
        "fragile": verdict.fragile, "drawn_once": verdict.one_run, "detail": verdict.detail,
    }  # fmt: skip


def _by_source(verdict: Verdict, suite: str, setting: str) -> dict[str, float | None]:
    """Return two standard errors by source, draws and test samples; squares add up to the total."""
    claim = verdict.claim
    if not _is_one_sum(claim) or not math.isfinite(verdict.noise):
        return {}
    ours = Evidence(suite, claim.role, claim.pool)
    several = [
        (w, estimate(rows_of(claim, side, setting, ours), claim.measure)) for w, side in claim.terms
    ]
    drawn = 4 * math.fsum(weight**2 * one.seed_variance for weight, one in several if one)
    return {
        "draws": _known(math.sqrt(drawn)),
        "test_samples": _known(math.sqrt(max(verdict.noise**2 - drawn, 0.0))),
    }


def _is_one_sum(claim: Claim) -> bool:
    """Return whether the margin is one weighted sum of means with an error of its own."""
    return (
        not claim.over
        and not claim.each
        and claim.kind in ("above", "gain", "closer", "falls", "level")
    )


def _known(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
