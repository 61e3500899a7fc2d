"""The whole field at one table: every merger from the same experts, as it is and with FeatCal,
adapters or SVC behind it.

Task arithmetic in the tangent space has experts of its own: a control at the end of the table,
which no sentence counts in.

What a method needs, and what other authors printed, stands in field_facts.py.
"""

from html import escape

from reproduction.report.evidence import Evidence, select
from reproduction.report.field_facts import (
    BEHIND,
    MARKS,
    METHODS,
    PRINTED,
    REFERENCES,
    TANGENT,
    TRAINED,
)
from reproduction.report.html import PageOutput, compact, estimated, note, table
from reproduction.report.page import Page, label
from reproduction.report.statistics import Estimate, estimate

ROLES = {"minilm": "texts, MiniLM", "clip_b32": "images, CLIP ViT-B/32"}  # the real encoder first


def page(role: str, suite: str) -> Page:
    """The page about one role, which knows how its numbers are marked."""
    return Page("field", suite, role)


def evidence(role: str, suite: str) -> Evidence:
    """The results of one role."""
    return page(role, suite).evidence


def average(ours: Evidence, merger: str, method: str) -> Estimate | None:
    """Mean over the tasks of a merger as it is ("merged") or with something behind it; None where
    it was not run.
    """
    return estimate(select(ours.table("field"), {"upstream": merger, "method": method}))


def mergers(ours: Evidence) -> list[str]:
    """Those with scores, the best with FeatCal behind it first."""
    found = {
        str(name): average(ours, str(name), "featcal")
        for name in ours.table("field")["upstream"].unique()
    }
    return sorted(
        (m for m in found if m != TANGENT), key=lambda m: -(found[m].mean if found[m] else 0.0)
    )  # type: ignore[union-attr]


def seconds(ours: Evidence, merger: str, part: str) -> float | None:
    """What a part took: "merged", "choosing", or what is behind, of adapters with their features;
    None where it was not run.
    """
    found = ours.record("field").get("cost", {}).get(merger, {})
    shared = found.get("features", 0.0) if part in ("surgery", "prob_surgery") else 0.0
    return float(found[part]) + shared if part in found else None


def values(role: str, suite: str) -> PageOutput:
    """The table of one role: a row for every merger, its needs, its seconds, its average and those
    with something behind it.
    """
    ours, rows = evidence(role, suite), []
    names = mergers(ours)
    if not names:
        return PageOutput(
            note(
                f"○ not run: no study of the field with {ROLES[role]} in the results of the {label(suite)}."
            )
        )
    for merger in [*names, *([TANGENT] if average(ours, TANGENT, "merged") else [])]:
        known, took, choosing = (
            METHODS[merger],
            seconds(ours, merger, "merged"),
            seconds(ours, merger, "choosing"),
        )
        cost = (
            "–"
            if took is None
            else f"{took:.1f}<small>{'' if choosing is None else f'choosing {choosing:.0f}'}</small>"
        )
        cells = [average(ours, merger, method) for method in ("merged", *BEHIND)]
        rows.append(
            (
                "",
                [
                    f"{escape(known.name)} {marks_of(merger, ours)}",
                    known.sees,
                    cost,
                    *map(estimated, cells),
                ],
            )
        )
    head = ["Merger", "It looks at", "Seconds", "As it is", *BEHIND.values()]
    caption = f"Average accuracy (%), 8 tasks, {ROLES[role]} — {page(role, suite).label}"
    return PageOutput(
        table(head, rows, caption, "fc-words") + note(f"{drawn_from(ours)} {control(ours)}")
    )


def drawn_from(ours: Evidence) -> str:
    """How many samples this run took, and on how many it scored."""
    study, counts = ours.settings("field")["study"], ours.table("field")["count"]
    scored = (
        f"{counts.min():,}"
        if counts.min() == counts.max()
        else f"{counts.min():,} to {counts.max():,}"
    )
    return f"What looks at training samples took {study['samples']} of each task; scored are {scored} test samples of each."


def control(ours: Evidence) -> str:
    """What the linearised experts of the tangent space reach on their own tasks; empty where it was
    not run.
    """
    value = average(ours, TANGENT, "expert")
    said = (
        f"{METHODS[TANGENT].name}: its linearised experts reach {value.mean:.1f} on their own tasks"
        if value
        else ""
    )
    usual = estimate(select(ours.table("scores"), {"method": "expert"})) if value else None
    return f"{said}, the usual ones {usual.mean:.1f}." if usual else f"{said}." if said else ""


def trained(role: str, suite: str) -> PageOutput:
    """What trains for minutes, held against FeatCal behind the same mergers: a row for each, its
    average and its seconds.
    """
    ours, rows = evidence(role, suite), []
    for merger in trained_behind(ours):
        for method, words in {"merged": "as it is", **BEHIND, **TRAINED}.items():
            value, took = average(ours, merger, method), seconds(ours, merger, method)
            if value is None:
                continue
            own = METHODS[method].marks if method in METHODS else ""
            marks = f" <sup>{own}</sup>" if own else ""
            cost = "–" if took is None or method == "merged" else f"{took:.0f}"
            rows.append(
                (
                    "",
                    [
                        escape(METHODS[merger].name),
                        f"{words}{marks}",
                        steps_of(method, ours),
                        cost,
                        estimated(value),
                    ],
                )
            )
    if not rows:
        return PageOutput(
            note(f"○ not run: nothing that trains for minutes behind a merger, with {ROLES[role]}.")
        )
    head = ["Merger", "", "Steps", "Seconds", "Average"]
    return PageOutput(
        table(
            head,
            rows,
            f"What trains behind a merger, 8 tasks, {ROLES[role]} — {page(role, suite).label}",
            "fc-words",
        )
    )


def trained_behind(ours: Evidence) -> list[str]:
    """The mergers behind which something of TRAINED was put, in the order of the table."""
    return [
        merger
        for merger in mergers(ours)
        if any(average(ours, merger, method) for method in TRAINED)
    ]


def steps_of(method: str, ours: Evidence) -> str:
    """How long a method trained in this run; the sources take 1,000 steps, ProDistill 100 epochs of
    64 samples of each task.
    """
    study = ours.settings("field")["study"]
    if method == "prodistill":
        return f"{study['epochs']} epochs"
    own = study["rivals"].get(method, study.get(method)) if method != "featcal" else None
    return f"{own['steps']:,}" if isinstance(own, dict) else "none"


def marks_of(merger: str, ours: Evidence) -> str:
    """The marks of a merger; V where its scale was chosen in this run."""
    tried = ours.settings("field").get("tried", {})
    kept = "".join(mark for mark in METHODS[merger].marks if mark != "V" or merger in tried)
    return f"<sup>{kept}</sup>" if kept else ""


def legend() -> PageOutput:
    """What the marks say."""
    rows = [("", [mark, escape(text)]) for mark, text in MARKS.items()]
    facts = [METHODS[name] for name in (*BEHIND, *TRAINED)]
    behind = [
        ("", [escape(known.name), f"{known.sees}<sup>{known.marks}</sup>"]) for known in facts
    ]
    return PageOutput(
        table(["Mark", "It"], rows, "What a method asks for", "fc-words")
        + table(["Behind a merger", "It looks at"], behind, "What is put behind", "fc-words")
    )


def references(suite: str) -> PageOutput:
    """The paper's references 1 to 18: the rows that each has here, and with which models it was
    run.
    """
    rows, tables = [], {role: evidence(role, suite).table("field") for role in ROLES}
    there = {
        role: {*found["upstream"], *found["method"]} for role, found in tables.items()
    }  # mergers, and what is behind one
    for number, names in enumerate(REFERENCES, start=1):
        run = [words for role, words in ROLES.items() if there[role] & set(names)]
        named = "; ".join(METHODS[name].name for name in names)
        rows.append(("", [str(number), escape(named), escape("; ".join(run)) or "○ not run"]))
    return PageOutput(
        table(["Reference", "Rows", "Run with"], rows, "The paper’s references 1 to 18", "fc-words")
    )


def chosen(role: str, suite: str) -> PageOutput:
    """What validation samples chose, of how many, and whether the choice lies at an end of what was
    tried.
    """
    told, rows = evidence(role, suite).settings("field"), []
    for merger, tried in told.get("tried", {}).items():
        picked = told["chosen"][merger]
        scales = [one["scale"] for one in tried]
        edge = (
            "at an end of what was tried" if picked["scale"] in (min(scales), max(scales)) else ""
        )
        rows.append(
            (
                "",
                [
                    METHODS[merger].name,
                    compact(picked["scale"]),
                    ", ".join(map(compact, scales)),
                    edge,
                ],
            )
        )
    if not rows:
        return PageOutput(
            note(
                f"○ not run: no scale was chosen with {ROLES[role]}; where it was run, each is its source’s own."
            )
        )
    return PageOutput(
        table(
            ["Merger", "Scale", "Of", ""],
            rows,
            f"Chosen on validation samples, {ROLES[role]}",
            "fc-words",
        )
    )


def summary(suite: str) -> PageOutput:
    """The best merger, what FeatCal and others add to how many, and where something else behind a
    merger is better.
    """
    parts = []
    for role, name in ROLES.items():
        ours = evidence(role, suite)
        rows = [("", [METHODS[way].name, *gain]) for way, gain in gains(means_of(ours)).items()]
        head = ["Behind a merger", "Raises", "Changes (points)", "Averages behind it (%)"]
        parts += [
            note(sentence(ours, name)),
            *([table(head, rows, f"What it adds, {name}", "fc-words")] if rows else []),
        ]
    return PageOutput("".join(parts))


def means_of(ours: Evidence) -> dict[str, dict[str, float]]:
    """By merger the averages that were run: as it is, and with something behind it."""
    means = {
        m: {way: average(ours, m, way) for way in ("merged", *BEHIND, *TRAINED)}
        for m in mergers(ours)
    }
    return {m: {way: value.mean for way, value in own.items() if value} for m, own in means.items()}


def gains(means: dict[str, dict[str, float]]) -> dict[str, tuple[str, str, str]]:
    """How many mergers something raises, by how much at least and at most, and what they reach with
    it.
    """
    told = {}
    for way in BEHIND:
        pairs = [(own["merged"], own[way]) for own in means.values() if way in own]
        if pairs:
            gained, reached = (
                [after - before for before, after in pairs],
                [after for _, after in pairs],
            )
            raised = f"{sum(gain > 0 for gain in gained)} of {len(pairs)}"
            told[way] = (
                raised,
                f"{min(gained):+.1f} to {max(gained):+.1f}",
                f"{min(reached):.1f} to {max(reached):.1f}",
            )
    return told


def sentence(ours: Evidence, name: str) -> str:
    """One role in words, from its rows alone."""
    found = means_of(ours)
    if not found:
        return f"○ not run: {name}."
    first = max(found, key=lambda m: found[m]["merged"])
    top = max(
        ((m, way) for m in found for way in found[m]), key=lambda pair: found[pair[0]][pair[1]]
    )
    told = [
        f"<strong>{name}.</strong> The best merger as it is: {METHODS[first].name}, {found[first]['merged']:.1f}."
    ]
    told += [told_trained(m, found[m], ours) for m in trained_behind(ours)]
    way = "as it is" if top[1] == "merged" else (BEHIND | TRAINED)[top[1]]
    told.append(f"The highest of all: {METHODS[top[0]].name} {way}, {found[top[0]][top[1]]:.1f}.")
    return " ".join(told)


def told_trained(merger: str, means: dict[str, float], ours: Evidence) -> str:
    """What each way behind one merger reaches, and how long it takes."""
    parts = []
    for way in ("featcal", "featcal_best", *TRAINED):
        took = seconds(ours, merger, way)
        if way in means:
            parts.append(
                f"{METHODS[way].name} {means[way]:.1f}"
                + ("" if took is None else f" in {took:.0f} s")
            )
    return f"Behind {METHODS[merger].name} ({means['merged']:.1f}): {', '.join(parts)}."


def printed() -> PageOutput:
    """What other authors printed of CLIP ViT-B/32 on the paper's eight tasks, with its place;
    nothing of it is from here.
    """
    rows = [
        ("", [escape(name), f"{value:.1f}", escape(place)])
        for name, (value, place) in PRINTED.items()
    ]
    caption = "Printed elsewhere: CLIP ViT-B/32, 8 tasks, the checkpoints tanganke/clip-vit-base-patch32_… of FusionBench"
    return PageOutput(table(["Method", "Average", "Where"], rows, caption, "fc-words"))
