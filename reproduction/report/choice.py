"""How the mini suite was chosen: what its script measured on validation images, as tables for the
tasks page.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from reproduction.report.evidence import read_json, results_folder
from reproduction.report.html import PageOutput, compact, fold, note, table
from reproduction.report.page import SYMBOLS, label
from reproduction.report.paper import SIZES


def measured(suite: str) -> PageOutput:
    """The chosen strength, scales and settings, and the measurements behind them."""
    record = read_json(results_folder(suite) / "choice.json")
    if not record.get("suite"):
        return PageOutput(note(f"○ not run: the {label(suite)} has no record of a choice."))
    chosen, found = record["chosen"], record["suite"]
    scales = sorted(next(iter(chosen["scale"].values())).items(), key=lambda item: int(item[0]))
    listed = ", ".join(f"{scale:g} for {pool} tasks" for pool, scale in scales)
    html = note(
        f"Strength of the shift {chosen['strength']:g}; scale of task arithmetic {listed}; the same for both models."
    )
    html += table(
        [
            "Validation images",
            "Seeds",
            "Base",
            "Simple averaging",
            "Task arithmetic",
            "Experts",
            "Ranges",
        ],
        [row for pool, _ in scales for row in _pool_rows(pool, found["pools"][pool], chosen)],
        "Average top-1 accuracy (%) on validation images; lowest and highest over the seeds of expert training",
    )
    html += fold(
        "The base at every strength", _by_strength(found["base_by_strength"], chosen["strength"])
    )
    html += fold(
        "Task arithmetic at every scale",
        "".join(_by_scale(p, found["pools"][p], chosen) for p, _ in scales),
    )
    return PageOutput(html + fold("How λ, ρ and α were chosen afterwards", _sweeps(record)))


def _pool_rows(
    pool: str, by_role: Mapping[str, Any], chosen: Mapping[str, Any]
) -> Iterable[tuple[str, list[str]]]:
    for role, seeds in by_role.items():
        scale = f"{chosen['scale'][role][pool]:g}"
        runs = list(seeds.values())
        columns = [[r["base"] for r in runs], [r["average"] for r in runs]]
        columns += [[r["task_arithmetic"][scale] for r in runs], [r["experts"] for r in runs]]
        yield (
            "",
            [
                f"{pool} tasks, {SIZES.get(role, role)}",
                str(len(runs)),
                *map(_range, columns),
                ranges_met(*columns),
            ],
        )


def ranges_met(
    base: list[float], average: list[float], arithmetic: list[float], experts: list[float]
) -> str:
    """Which of the rule's ranges hold with every seed, in words."""
    missed = []
    if not all(40 <= value <= 55 for value in base):
        missed.append("base")
    if min(experts) < 85:
        missed.append("experts")
    for name, merged in (("averaging", average), ("task arithmetic", arithmetic)):
        seeds = zip(base, merged, experts, strict=True)
        if not all(8 <= value - start <= 20 and end - value >= 20 for start, value, end in seeds):
            missed.append(name)
    return "✓ all met" if not missed else f"✗ outside: {', '.join(missed)}"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} – {high}"


def _by_value(
    rows: Mapping[str, Mapping[str, str]], chosen: Container[float], head: str, caption: str
) -> str:
    """A row per value that was tried, in rising order, a column per role; the chosen one is
    marked.
    """
    ordered = sorted(rows, key=float)
    body = [
        (
            "fc-total" if float(value) in chosen else "",
            [compact(float(value)), *rows[value].values()],
        )
        for value in ordered
    ]
    return table([head, *(SIZES.get(role, role) for role in rows[ordered[0]])], body, caption)


def _by_strength(averages: Mapping[str, Mapping[str, float]], chosen: float) -> str:
    rows = {
        strength: {role: f"{value:.1f}" for role, value in row.items()}
        for strength, row in averages.items()
    }
    return _by_value(
        rows, [chosen], "Strength", "Zero-shot average over 8 tasks (%), validation images"
    )


def _by_scale(pool: str, by_role: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    runs = {role: list(seeds.values()) for role, seeds in by_role.items()}
    rows = {
        scale: {
            role: _range([run["task_arithmetic"][scale] for run in found])
            for role, found in runs.items()
        }
        for scale in next(iter(runs.values()))[0]["task_arithmetic"]
    }
    kept = [pools[pool] for pools in chosen["scale"].values()]
    return _by_value(
        rows,
        kept,
        "Scale",
        f"Task arithmetic, {pool} tasks: average top-1 accuracy (%), validation images",
    )


def _sweeps(record: Mapping[str, Any]) -> str:
    """FeatCal's sweeps, one table per setting, in the order they were made."""
    settings = record.get("settings")
    if not settings:
        return note("○ not run.")
    parts = [
        note(
            "One after the other, with the suite already frozen; the best mean of both models was kept."
        )
    ]
    for name in (name for name in SYMBOLS if name in settings["sweeps"]):
        sweep, chosen = settings["sweeps"][name], record["chosen"]["settings"][name]
        rows = {
            value: {role: f"{mean:.1f}" for role, mean in row.items()}
            for value, row in sweep.items()
        }
        caption = f"{SYMBOLS[name]}: average top-1 accuracy (%), validation images; chosen {compact(chosen)}"
        parts.append(_by_value(rows, [chosen], SYMBOLS[name], caption))
        flat = len({tuple(row.values()) for row in sweep.values()}) == 1
        if not flat and chosen in (min(map(float, sweep)), max(map(float, sweep))):
            parts.append(
                note("The chosen value is the end of its grid: the best one may lie beyond.")
            )
    return "".join(parts)
