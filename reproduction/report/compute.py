"""What the report took: seconds of every stage from the run records, an estimate of energy, numbers
of runs, search bounds.

Seconds are of the clock; stages follow one another and use all cores themselves. Energy is by
codecarbon's model of power, which its tracker would apply as well on a machine without a counter of
energy.
"""

import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from reproduction.report.evidence import Evidence, read_json, results_folder
from reproduction.report.html import PageOutput, compact, note, table
from reproduction.report.page import SYMBOLS, label

MODULES = 2  # of memory: what codecarbon counts on x86 up to 16 GB, and the least it counts
VERBS = {
    "pretrain": "bases", "prepare_data": "images", "prepare_texts": "texts", "prepare": "experts",
    "multitask": "multi-task models", "merge": "merged models", "calibrate": "FeatCal", "adapt": "adapters",
    "ablate": "controls", "evaluate": "scores", "measure": "drift and final features",
}  # fmt: skip


def records(suite: str) -> list[dict[str, Any]]:
    """All run records of a suite."""
    return [read_json(path) for path in sorted(results_folder(suite).glob("*/*/run.json"))]


def quickest(suite: str) -> dict[str, tuple[float, dict[str, Any]]]:
    """Of every stage that the records tell of, seconds and machine of its quickest run; others were
    beside other work.
    """
    found: dict[str, tuple[float, dict[str, Any]]] = {}
    for record in records(suite):
        for stage, value in record.get("seconds", {}).items():
            if stage not in found or value < found[stage][0]:
                found[stage] = (value, record.get("host", {}))
    return found


def seconds(suite: str) -> dict[str, float]:
    """Seconds of every stage that the records tell of."""
    return {stage: value for stage, (value, _) in quickest(suite).items()}


def machines(suite: str) -> list[str]:
    """Every machine that the records name."""
    hosts = [record["host"] for record in records(suite) if record.get("host")]
    return sorted({f"{host['cpu']}, {host.get('cores', 1)} cores" for host in hosts})


@cache
def processor(cpu: str, cores: int) -> tuple[float, bool]:
    """Watts of a processor with all its cores at work by codecarbon's model, and whether its table
    has the name.

    A known processor counts with its design power, another one with codecarbon's watts for each
    core.
    """
    from codecarbon.core.cpu import DEFAULT_POWER_PER_CORE
    from codecarbon.input import DataSource

    listed = DataSource().get_cpu_power_data()
    found = listed[listed["Name"].str.lower() == cpu.lower()]
    return (
        (float(found["TDP"].iloc[0]), True)
        if len(found)
        else (float(cores * DEFAULT_POWER_PER_CORE), False)
    )


def memory() -> float:
    """Watts of memory by codecarbon's model."""
    from codecarbon.external.ram import RAM_SLOT_POWER_X86

    return float(MODULES * RAM_SLOT_POWER_X86)


def watt_hours(suite: str) -> dict[str, float]:
    """Energy of every stage that the records tell of: power of the machine it ran on, times its
    seconds.
    """
    hours = {}
    for stage, (spent, host) in quickest(suite).items():
        hours[stage] = (
            spent * (processor(host.get("cpu", ""), host.get("cores", 1))[0] + memory()) / 3600
        )
    return hours


def summary(suite: str) -> PageOutput:
    """All of it in two sentences."""
    found = seconds(suite)
    if not found:
        return PageOutput(note(f"○ not run: no run records in the results of the {label(suite)}."))
    total = sum(found.values())
    text = (
        f"<p><strong>{len(found)} stages, {total / 60:.0f} minutes</strong> on {escape(' and '.join(machines(suite)))}, "
        f"without a GPU: about {sum(watt_hours(suite).values()):.0f} Wh by the estimate below. Installing, pre-training the "
        "bases, making pages and all that was tried and not kept are not counted.</p>"
    )
    return PageOutput(f'<div class="fc-card">{text}</div>')


def power(suite: str) -> PageOutput:
    """The power behind the estimate, machine by machine, and whose model it is."""
    hosts = {
        (record["host"]["cpu"], record["host"].get("cores", 1))
        for record in records(suite)
        if record.get("host")
    }
    lines = []
    for cpu, cores in sorted(hosts):
        watts, known = processor(cpu, cores)
        whence = (
            "its design power in codecarbon’s table of processors" if known else
            f"codecarbon’s table of processors has no line of that name, and counts {watts / cores:g} W a core of such a one"
        )  # fmt: skip
        lines.append(
            f"{escape(cpu)}, {cores} cores: <strong>{watts:g} W</strong> ({whence}) and {memory():g} W for {MODULES} modules of "
            f"memory, the least that it counts, since no record tells the memory; together {watts + memory():g} W."
        )
    text = (
        f"Power model of codecarbon {version('codecarbon')}, all cores at work for as long as a stage took. "
        + " ".join(lines)
    )
    return PageOutput(note(text if lines else "○ not run: no machine in the records."))


def by_kind(suite: str) -> PageOutput:
    """Seconds and energy by what was made."""
    found, counted, energy = Counter[str](), Counter[str](), Counter[str]()
    hours = watt_hours(suite)
    for stage, value in seconds(suite).items():
        verb = stage.partition("@")[0]
        found[verb] += value  # type: ignore[assignment]
        energy[verb] += hours[stage]  # type: ignore[assignment]
        counted[verb] += 1
    order = {verb: place for place, verb in enumerate(VERBS)}
    rows = [
        (
            "",
            [
                VERBS.get(verb, f"study: {verb.replace('_', ' ')}"),
                f"<code>{verb}</code>",
                str(counted[verb]),
                *_cost(spent, energy[verb]),
            ],
        )
        for verb, spent in sorted(found.items(), key=lambda item: order.get(item[0], len(order)))
    ]
    rows.append(
        (
            "fc-total",
            ["all", "", str(counted.total()), *_cost(sum(found.values()), sum(hours.values()))],
        )
    )
    head = ["What is made", "Stage", "How many", "Seconds", "Wh, estimated"]
    return PageOutput(table(head, rows, f"Time and energy by kind of stage — {label(suite)}"))


def by_stage(suite: str) -> PageOutput:
    """Seconds and energy of every stage."""
    hours = watt_hours(suite)
    rows = [
        ("", [f"<code>{escape(stage)}</code>", *_cost(spent, hours[stage])])
        for stage, spent in sorted(seconds(suite).items())
    ]
    return PageOutput(
        table(
            ["Stage", "Seconds", "Wh, estimated"], rows, f"Every stage — {label(suite)}", "fc-long"
        )
    )


def _cost(spent: float, hours: float) -> list[str]:
    return [f"{spent:.1f}", f"{hours:.2f}"]


def runs(suite: str) -> PageOutput:
    """Per role and pool: how many models were scored, and with how many draws."""
    rows = []
    for path in sorted(results_folder(suite).glob("scores/*")):
        role, _, pool = path.name.rpartition("-")
        scores = Evidence(suite, role, pool).table("scores")
        models = scores[["upstream", "method", "setting", "seed"]].drop_duplicates()
        drawn = models[models["seed"] != ""]
        several = drawn.groupby(["upstream", "method", "setting"]).size()
        cells = [
            len(models),
            len(drawn),
            int((several > 1).sum()),
            int(several.max()) if len(several) else 0,
        ]
        rows.append(
            (
                "",
                [
                    escape(f"{role}, {pool}"),
                    *(map(str, cells) if len(models) else ["not run", "", "", ""]),
                ],
            )
        )
    head = [
        "Role, pool",
        "Models scored",
        "of these drawn by a seed",
        "rows with several draws",
        "most draws of a row",
    ]
    return PageOutput(table(head, rows, f"Number of runs — {label(suite)}"))


def bounds(suite: str) -> PageOutput:
    """Values among which strengths were chosen on validation data, and how many candidates each
    search without labels tried.
    """
    choice, rows = read_json(results_folder(suite) / "choice.json"), []
    for parameter, tried in choice.get("settings", {}).get("sweeps", {}).items():
        rows.append(("", [f"{SYMBOLS[parameter]} of FeatCal, validation images", _listed(tried)]))
    for pool, roles in choice.get("suite", {}).get("pools", {}).items():
        tried = {
            value
            for seeds in roles.values()
            for one in seeds.values()
            for value in one["task_arithmetic"]
        }
        rows.append(
            ("", [f"scale of task arithmetic, {pool} tasks, validation images", _listed(tried)])
        )
    for what, values in _tried_on_texts().items() if rows else ():
        limits = "; ".join(
            f"{SYMBOLS.get(name, name)} {_listed(tried)}" for name, tried in values.items()
        )
        rows.append(
            (
                "",
                [
                    f"{what}, validation texts",
                    f"all combinations of {limits}" if len(values) > 1 else limits,
                ],
            )
        )
    for path in sorted(results_folder(suite).glob("tune/*")):
        key = path.name
        trials = Evidence(suite, *key.rsplit("-", 1)).table("tune")
        trials = trials[
            trials["origin"] != "reference"
        ]  # what labels chose stands beside the search and is no candidate
        if trials.empty:
            continue
        limits = [
            f"{SYMBOLS[p]} {compact(trials[p].min())} to {compact(trials[p].max())}"
            for p in SYMBOLS
            if p in trials
        ]
        rows.append(
            (
                "",
                [
                    f"search without labels, {key}",
                    f"{trials['trial'].nunique()} candidates: {', '.join(limits)}",
                ],
            )
        )
    if not rows:
        return PageOutput(
            note(f"○ not run: no record of a choice in the results of the {label(suite)}.")
        )
    return PageOutput(
        table(["What was chosen", "Among"], rows, f"Search bounds — {label(suite)}", "fc-words")
    )


def _tried_on_texts() -> dict[str, dict[str, set[str]]]:
    """By method, role and pool, the values of each parameter that scripts/choose_*settings.py
    combined.
    """
    found: dict[str, dict[str, set[str]]] = {}
    for folder in ("mini/language", "real_text"):
        for key, told in json.loads(
            (files("reproduction") / folder / "settings_choice.json").read_text("utf-8")
        ).items():
            method, chosen = (
                ("task arithmetic", told["scale"])
                if "scale" in told
                else ("FeatCal", told.get("featcal", told))
            )
            for name in chosen[
                "averages"
            ]:  # "ridge 0.1, interpolation 0.3"; "merged" stands among them
                for parameter, value in (part.split() for part in name.split(", ") if " " in part):
                    found.setdefault(f"{method} on {key}", {}).setdefault(parameter, set()).add(
                        value
                    )
    return found


def _listed(tried: Iterable[str]) -> str:
    return ", ".join(compact(value) for value in sorted(map(float, tried)))
