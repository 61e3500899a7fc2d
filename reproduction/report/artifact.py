"""ARTIFACT.md: what a reviewer needs on one page, from the claims, the run records and the models'
cards.
"""

import re
from collections import defaultdict
from functools import cache

from reproduction.report import compute
from reproduction.report.claims import claims
from reproduction.report.evidence import project_root
from reproduction.report.page import HEADLINE, TOPICS, label
from reproduction.report.verdicts import sources

REQUEST = "pipeline/request/dvc.yaml"  # what `dvc repro` leaves as it is in git
REPRO = ["gather@scores-clip_b32-8", "headline", "playground"]  # what `make repro` computes
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

The headline set of claims, counted on the book's front page. All others are on its page *All claims*, and every one is data in
`results/{suite}/claims.json`. The verdicts are those of the committed results; `–` stands where a claim has no counterpart in
texts, as those about language models or the larger image model. Minutes are the time of every stage that the command needs, from
nothing, on the reference machine; what an earlier command computed is not computed again.

`make repro` computes Table 1 and Figure 1 on drawn images and the playground: {repro} minutes; `dvc repro` all that the paper
shows, on drawn images and texts: {total} minutes. It leaves as they are in git the results of the real encoder, of which
everything takes thirty times as long, and those of studies that go beyond the paper: `make real` computes the encoder's
Tables 1 and 7 and Figure 1, {real} minutes, and `make studies` all of them, {whole} minutes with what they need; below each
has its command. `make verify` does all of `dvc repro` in a temporary clone and compares with the committed scores. On the
same kind of machine they are the same bytes. Tolerance on another processor: {tolerance}. A verdict whose margin is near its
noise may change there.

"""

STUDIES = """## On request

By results, with the minutes that they take from nothing: those of all that they need are counted, which many share.

| results | command | minutes |
|---|---|---|
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
    """The whole page."""
    known = {"suite": suite, "label": label(suite), "tolerance": TOLERANCE}
    known |= {"machine": " and ".join(compute.machines(suite)) or "none yet"}
    asked = [name for name in upstream() if name.startswith(REQUEST)]
    known |= {
        "total": minutes(suite, [name for name in upstream() if ":" not in name]),
        "repro": minutes(suite, REPRO),
    }
    known |= {"real": minutes(suite, REAL), "whole": minutes(suite, asked)}
    rows = [
        f"| {name.partition('@')[2]} | `dvc repro {name}` | {minutes(suite, [name])} |\n"
        for name in asked
    ]
    parts = [part.format(**known) for part in (HEAD, TIRES, CLAIMS)]
    return "".join([*parts, _table(suite), STUDIES, *rows, "\n", ENVIRONMENTS, _licences()])


def minutes(suite: str, stages: list[str]) -> str:
    """Minutes that these stages of DVC and all that they need took, a whole number, of those that
    the run records tell of.
    """
    found, needed = compute.seconds(suite), set().union(*(upstream()[stage] for stage in stages))
    return f"{sum(spent for stage, spent in found.items() if stage in needed) / 60:.0f}"


@cache
def upstream() -> dict[str, set[str]]:
    """By name of a stage of DVC, itself and all that it needs, as run records name them: by verb
    and key.

    Stages of the project's own dvc.yaml by their names alone, others as DVC names them: by file and
    name.
    """
    import networkx
    from dvc.repo import Repo

    with Repo(str(project_root())) as repo:
        graph = repo.index.graph
        told = {
            stage: "@".join((stage.cmd or "").split()[2:4]) for stage in graph
        }  # featcal stage VERB KEY
        files = {
            stage: "" if stage.path_in_repo == "dvc.yaml" else f"{stage.path_in_repo}:"
            for stage in graph
        }
        return {
            files[stage] + stage.name: {
                told[one] for one in {stage, *networkx.descendants(graph, stage)}
            }
            for stage in graph
        }


def page_of(place: str) -> str:
    """The page of the book on which a place of the paper stands."""
    return place if place in TOPICS else EVERYWHERE


def _table(suite: str) -> str:
    """The headline set by page, in the paper's order, with the verdict from every source of
    numbers.
    """
    headline, pages = [claim for claim in claims() if claim.headline], defaultdict(list)
    told = [
        [found.word if found else "–" for found in source.judged(headline)]
        for source in sources(suite)
    ]
    for claim, *words in zip(headline, *told, strict=True):
        pages[page_of(claim.place)].append(" | ".join([" ".join(claim.sentence.split()), *words]))
    titles = [source.title.lower() for source in sources(suite)]
    lines = [
        f"| {' | '.join(['claim of the paper', *titles, 'command', 'minutes'])} |",
        "|---" * (len(titles) + 3) + "|",
    ]
    for page, cells in sorted(
        pages.items(), key=lambda item: (item[0] == EVERYWHERE, item[0][:5] != "table", item[0])
    ):
        command = "make repro real" if page in HEADLINE else f"dvc repro page@{page}"
        spent = minutes(suite, [f"page@{page}", *(REAL if page in HEADLINE else [])])
        lines += [f"| {cell} | `{command}` | {spent} |" for cell in cells]
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
