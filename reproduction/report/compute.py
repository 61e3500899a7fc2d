"""What the report took: seconds of every stage from the run records, an estimate of energy, numbers of runs, search bounds.

Seconds are of the clock; stages follow one another and use all cores themselves.
"""

from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import Any

from reproduction.report.evidence import Evidence, read_json
from reproduction.report.markup import PageOutput, compact, note, table
from reproduction.report.pages import SYMBOLS, label
from reproduction.report.root import results_folder

CORE, MEMORY = 280 / 64, 8 * 3 / 8  # watts: of a core of an EPYC 7763 (280 W, 64 cores); of 8 GiB at codecarbon's 3 W for 8 GiB
VERBS = {
    "pretrain": "bases", "prepare_data": "images", "prepare_texts": "texts", "prepare": "experts",
    "multitask": "multi-task models", "merge": "merged models", "calibrate": "FeatCal", "adapt": "adapters",
    "ablate": "controls", "evaluate": "scores", "measure": "drift and final features",
}  # fmt: skip


def records(suite: str) -> list[dict[str, Any]]:
    """All run records of a suite."""
    return [read_json(path) for path in sorted(results_folder(suite).glob("*.run.json"))]


def seconds(suite: str) -> dict[str, float]:
    """Seconds of every stage that the records tell of, each once."""
    return {stage: value for record in records(suite) for stage, value in record.get("seconds", {}).items()}


def machines(suite: str) -> list[str]:
    """Every machine that the records name."""
    hosts = [record["host"] for record in records(suite) if record.get("host")]
    return sorted({f"{host['cpu']}, {host.get('cores', 1)} cores" for host in hosts})


def cores(suite: str) -> int:
    """How many cores the largest of these machines has."""
    return max((record["host"].get("cores", 1) for record in records(suite) if record.get("host")), default=0)


def watt_hours(spent: float, working: int) -> float:
    """Energy of so many seconds with all cores busy: cores at the share of the processor's design power, and 8 GiB of memory."""
    return spent * (working * CORE + MEMORY) / 3600


def summary(suite: str) -> PageOutput:
    """All of it in two sentences."""
    found = seconds(suite)
    if not found:
        return PageOutput(note(f"○ not run: no run records in the results of the {label(suite)}."))
    total = sum(found.values())
    text = (
        f"<p><strong>{len(found)} stages, {total / 60:.0f} minutes</strong> on {escape(' and '.join(machines(suite)))}, "
        f"without a GPU: about {watt_hours(total, cores(suite)):.0f} Wh by the estimate below. Installing, pre-training the "
        "bases, making pages and all that was tried and not kept are not counted.</p>"
    )
    return PageOutput(f'<div class="fc-card">{text}</div>')


def by_kind(suite: str) -> PageOutput:
    """Seconds and energy by what was made."""
    found, counted = Counter[str](), Counter[str]()
    for stage, value in seconds(suite).items():
        verb = stage.partition("@")[0]
        found[verb] += value  # type: ignore[assignment]
        counted[verb] += 1
    order = {verb: place for place, verb in enumerate(VERBS)}
    rows = [
        (
            "",
            [
                VERBS.get(verb, f"study: {verb.replace('_', ' ')}"),
                f"<code>{verb}</code>",
                str(counted[verb]),
                *_cost(spent, suite),
            ],
        )
        for verb, spent in sorted(found.items(), key=lambda item: order.get(item[0], len(order)))
    ]
    rows.append(("fc-total", ["all", "", str(counted.total()), *_cost(sum(found.values()), suite)]))
    head = ["What is made", "Stage", "How many", "Seconds", "Wh, estimated"]
    return PageOutput(table(head, rows, f"Time and energy by kind of stage — {label(suite)}"))


def by_stage(suite: str) -> PageOutput:
    """Seconds and energy of every stage."""
    rows = [("", [f"<code>{escape(stage)}</code>", *_cost(spent, suite)]) for stage, spent in sorted(seconds(suite).items())]
    return PageOutput(table(["Stage", "Seconds", "Wh, estimated"], rows, f"Every stage — {label(suite)}", "fc-long"))


def _cost(spent: float, suite: str) -> list[str]:
    return [f"{spent:.1f}", f"{watt_hours(spent, cores(suite)):.2f}"]


def runs(suite: str) -> PageOutput:
    """Per role and pool: how many models were scored, and with how many draws."""
    rows = []
    for path in sorted(results_folder(suite).glob("*.references.csv")):
        role, _, pool = path.name.partition(".")[0].rpartition("-")
        scores = Evidence(suite, role, pool).table("scores")
        models = scores[["upstream", "method", "setting", "seed"]].drop_duplicates()
        drawn = models[models["seed"] != ""]
        several = drawn.groupby(["upstream", "method", "setting"]).size()
        cells = [len(models), len(drawn), int((several > 1).sum()), int(several.max()) if len(several) else 0]
        rows.append(("", [escape(f"{role}, {pool}"), *map(str, cells)]))
    head = ["Role, pool", "Models scored", "of these drawn by a seed", "rows with several draws", "most draws of a row"]
    return PageOutput(table(head, rows, f"Number of runs — {label(suite)}"))


def bounds(suite: str) -> PageOutput:
    """Values among which strengths were chosen on validation images, and how many candidates each search without labels tried."""
    choice, rows = read_json(results_folder(suite) / "choice.json"), []
    for parameter, tried in choice.get("settings", {}).get("sweeps", {}).items():
        rows.append(("", [f"{SYMBOLS[parameter]} of FeatCal, validation images", _listed(tried)]))
    for pool, roles in choice.get("suite", {}).get("pools", {}).items():
        tried = {value for seeds in roles.values() for one in seeds.values() for value in one["task_arithmetic"]}
        rows.append(("", [f"scale of task arithmetic, {pool} tasks, validation images", _listed(tried)]))
    for path in sorted(results_folder(suite).glob("*.tune.csv")):
        key = path.name.partition(".")[0]
        trials = Evidence(suite, *key.rsplit("-", 1)).table("tune")
        limits = [f"{SYMBOLS[p]} {compact(trials[p].min())} to {compact(trials[p].max())}" for p in SYMBOLS if p in trials]
        rows.append(("", [f"search without labels, {key}", f"{trials['trial'].nunique()} candidates: {', '.join(limits)}"]))
    if not rows:
        return PageOutput(note(f"○ not run: no record of a choice in the results of the {label(suite)}."))
    return PageOutput(table(["What was chosen", "Among"], rows, f"Search bounds — {label(suite)}", "fc-words"))


def _listed(tried: Iterable[str]) -> str:
    return ", ".join(compact(value) for value in sorted(map(float, tried)))
