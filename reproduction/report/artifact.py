"""The report outside of the book: ARTIFACT.md for reviewers, and headline numbers and claims as data."""

import math
import re
from functools import cache
from typing import Any

import pandas as pd

from reproduction.report.claims import INSIDE, Claim, claims, main_setting
from reproduction.report.evidence import Evidence, project_root, select
from reproduction.report.pages import resources
from reproduction.report.paper import packaged
from reproduction.report.statistics import estimate
from reproduction.report.tables import UPSTREAMS, average
from reproduction.report.verdicts import Verdict, judged, rows_of, sources

REQUEST = "pipeline/request/dvc.yaml"  # what `dvc repro` leaves as it is in git
REPRO = ["gather@scores-clip_b32-8", "headline"]  # what `make repro` computes
REAL = [
    f"{REQUEST}:request@{kind}-minilm-8" for kind in ("scores", "drift")
]  # what `make real` computes
# A test holds it against scripts/compare_results.py.
TOLERANCE = "±1 point on an average, ±3 on a single task, each √(500/n) times as much for tests of n < 500 answers"
EVERYWHERE = "scoreboard"  # shows claims of places that have no page of their own

HEAD = """# Artifact

<!-- written by `dvc repro artifact` from the claims and the run records; edits are lost -->

What a reviewer needs: what is claimed, which command shows it, how long that takes. The paper is *FeatCal: Feature Calibration
for Post-Merging Models* ([arXiv:2605.13030](https://arxiv.org/abs/2605.13030)); this is an independent re-implementation. Its
numbers are of the {label}, whose models and tasks are made on your own machine, and of a published sentence encoder on public
texts, the *real encoder*: they test the paper's claims, never its values.
[README.md](README.md) says what else is here.

Reference machine: {machine}, no GPU. A GPU is used where there is one; only `suite: paper` needs it.

"""

TIRES = """## Kick the tires: five minutes

```bash
make setup                                  # an environment in .venv; an installation of a few minutes, not counted
. .venv/bin/activate
featcal doctor                              # versions, devices, what is missing
python -m pytest tests/core                 # the mathematics against plain solutions
featcal stage summary claims                # judges every claim anew from the results in git: results/{suite}/claims.json
git diff --stat results                     # nothing: the same verdicts, margins and errors
make book                                   # the report, from the results in git; computes no model
```

"""

CLAIMS = """## Claims

The headline claims: those of the abstract, the introduction and Section 5 that compare FeatCal with something. All others are on
the book's page *Claims*, and every one is data in `results/{suite}/claims.json`. The verdicts are those of the committed results, at
the tuned settings; the book's first page has the printed settings too. `–`: the claim has no counterpart in texts. Minutes are the
time of every stage that the command needs, from nothing, on the reference machine; a later command computes nothing twice.

| command | what it computes | minutes |
|---|---|---|
| `make repro` | Table 1 and Figure 1 on synthetic images, and the book | {repro} |
| `make real` | the real encoder's Tables 1 and 7 and Figure 1 | {real} |
| `dvc repro` | all that the paper shows, on synthetic images and texts; the real encoder's results stay as they are in git | {total} |
| `make studies` | the real encoder, and studies that go beyond the paper | {whole} |
| `make verify` | all of `dvc repro` in a temporary clone, compared with the committed scores | {total} |

The same kind of machine gives the same bytes. Tolerance on another processor: {tolerance}. A verdict whose margin is near its noise
may change there.

"""

STUDIES = """## On request

By results, with the minutes that they take from nothing: those of all that they need are counted, which many share.

| results | command | minutes |
|---|---|---|
"""

REPORT = """## Report

The central claim: features of a merged model drift from those of its experts, and moving weights block by block, each linear layer by
one ridge regression with a closed-form solution, brings them back, without training or extra modules, to higher accuracy than trained
adapters. The method was written anew from the paper's equations; of the authors' published code facts were taken where the paper is
silent, no code. The authors were not asked.

- Easy: the algorithm. Section 4 and Algorithm 1 suffice, and a closed form can be checked against any other solution.
- Difficult: what the paper leaves open (sizes and training of the adapters, the scale of task arithmetic on larger pools, what a
  language model reads), settings that do not carry over from one model to another, printed tables that contradict each other, and
  checkpoints, data sets and GPUs that were out of reach.

The book's pages *Cost* and *Differences and errata* have time per stage, open choices, and everything that departs from the paper.

"""

ENVIRONMENTS = """## Environments

| way | what is checked | from |
|---|---|---|
| `make locked` | each file by its hash; Linux, x86-64, Python 3.11, PyTorch for CPUs | `requirements/linux-cpu.txt` |
| `make locked LOCK=cuda` | the same with PyTorch for CUDA | `requirements/linux-cuda.txt` |
| `podman build -t featcal .` | the first on a base image named by its digest; `.devcontainer/` opens it | `Containerfile` |
| `make setup` | versions, not hashes; any system that has the packages | `constraints.txt` |
| `conda env create -f environment.yml` | as `make setup` | `environment.yml` |

PyTorch's build for CPUs is not on PyPI: set `PIP_EXTRA_INDEX_URL` to the index that pytorch.org names. `make locked` makes an
empty environment where there is none, installs the files of the lock and no others, each by its hash, and ends with `pip check`,
which fails where a package lacks another or has a version it does not allow. The lock for CUDA was resolved, not installed. The
image was not built, since no container engine was at hand: its steps are apt-get and `make locked`, which the tests run in a copy
of the checkout. Disk: 3 GB, with CUDA 10 GB.

"""


def text(suite: str) -> str:
    """Return the whole page."""
    own = [name for name in upstream() if ":" not in name]
    asked = [name for name in upstream() if name.startswith(REQUEST)]
    known = {
        "suite": suite,
        "label": packaged("differences.yaml")[suite]["label"],
        "tolerance": TOLERANCE,
        "machine": " and ".join(resources.machines(suite)) or "none yet",
        "total": minutes(suite, own),
        "repro": minutes(suite, REPRO),
        "real": minutes(suite, REAL),
        "whole": minutes(suite, asked),
    }
    rows = [
        f"| {name.partition('@')[2]} | `dvc repro {name}` | {minutes(suite, [name])} |\n"
        for name in asked
    ]
    parts = [part.format(**known) for part in (HEAD, TIRES, CLAIMS)]
    return "".join([*parts, _table(suite), STUDIES, *rows, "\n", REPORT, ENVIRONMENTS, _licences()])


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


def stages_of(claim: Claim) -> list[str]:
    """Return the stages that recompute every verdict on a claim: the real encoder's results, then the page."""
    texts = claim.on_texts
    parts = (list(texts.parts.values()) or [texts]) if texts else []
    sides = [(part, side) for part in parts for _, side in part.terms]
    folders = {
        Evidence("mini", part.role, str(side.get("pool", part.pool))).beside(
            side.get("file", part.file)
        )
        for part, side in sides
    }
    asked = [f"{REQUEST}:request@{folder.parent.name}-{folder.name}" for folder in sorted(folders)]
    return [*(name for name in asked if name in upstream()), f"page@{page_of(claim.place)}"]


def _table(suite: str) -> str:
    """Return the headline claims in the paper's order with their verdicts, a command and its minutes."""
    headline = [claim for claim in claims() if claim.headline]
    judged = {source.title.lower(): source.judged(headline) for source in sources(suite)}
    lines = [
        f"| {' | '.join(['claim of the paper', *judged, 'command', 'minutes'])} |",
        "|---" * (len(judged) + 3) + "|",
    ]
    for claim, *found in zip(headline, *judged.values(), strict=True):
        words, stages = [verdict.word if verdict else "–" for verdict in found], stages_of(claim)
        cells = [" ".join(claim.sentence.split()), *words, f"`dvc repro {' '.join(stages)}`"]
        lines.append(f"| {' | '.join([*cells, minutes(suite, stages)])} |")
    return "\n".join(lines) + "\n\n"


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
            "| texts and models of others, in the repository or from a package | as told there | `NOTICE` |"
        )
    rows.append(
        "| models and data of `suite: paper`; downloaded, not in the repository | their publishers' | the hub |"
    )
    return "\n".join(
        ["## Licences", "", "| what | licence | told in |", "|---|---|---|", *rows, ""]
    )


ROLE, POOL, MERGER = (
    "clip_b32",
    "8",
    "task_arithmetic",
)  # Table 1; the merger that its curves are about
TASKS, BLOCKS = ("task", "merged", "featcal", "expert"), ("block", "merged", "featcal")


def metrics(ours: Evidence) -> dict[str, Any]:
    """Return averages by merger, merged and calibrated at the main settings, and the experts'."""
    found = {}
    for upstream in UPSTREAMS:
        keys = ((upstream, "merged", ""), (upstream, "featcal", main_setting(ours.suite)))
        found[upstream] = {
            key[1]: round(one.mean, 4) for key in keys if (one := average(ours, key))
        }
    expert = average(ours, ("", "expert", ""))
    return {name: values for name, values in found.items() if values} | (
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
    setting = main_setting(ours.suite) if method == "featcal" else ""
    return {"upstream": "" if method == "expert" else MERGER, "method": method, "setting": setting}


def claims_as_data(suite: str) -> dict[str, Any]:
    """Return every claim with its verdict, margin and noise, by id, at the main settings."""
    setting = main_setting(suite)
    return {
        "suite": suite,
        "setting": setting,
        "claims": {v.claim.id: _entry(v, suite) for v in judged(claims(), suite, setting)},
    }


def _entry(verdict: Verdict, suite: str) -> dict[str, Any]:
    """Return one claim as data; of a claim about several, margin and noise of the deciding part."""
    claim = verdict.claim
    about = {
        "place": claim.place,
        "sentence": " ".join(claim.sentence.split()),
        "source": claim.source,
    }
    noise = {"total": _known(verdict.noise)} | _by_source(verdict, suite)
    said = {
        "verdict": verdict.word,
        "margin": _known(verdict.margin),
        "noise": noise,
        "drawn_once": verdict.one_run,
    }
    return (
        about
        | {"headline": claim.headline, "group": claim.group}
        | said
        | {"detail": verdict.detail}
    )


def _by_source(verdict: Verdict, suite: str) -> dict[str, float | None]:
    """Return two standard errors by source, draws and test samples; squares add up to the total."""
    claim = verdict.claim
    if not _is_one_sum(claim) or not math.isfinite(verdict.noise):
        return {}
    ours = Evidence(suite, claim.role, claim.pool)
    several = [
        (w, estimate(rows_of(claim, side, main_setting(suite), ours), claim.measure))
        for w, side in claim.terms
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
