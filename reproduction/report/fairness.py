"""What it is worth to an adapter that it was trained on images of the test set it is scored on.

Adapters see unlabelled test images, as in their own sources; FeatCal sees training images. So every
comparison stands here once
more: on the test images that the adapter was shown, on the others, and with adapters trained on
FeatCal's images.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

import pandas as pd

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, estimated, fold, note, table
from reproduction.report.html import margin as stands
from reproduction.report.page import EIGHT, Page, label
from reproduction.report.pages.damage import kinds
from reproduction.report.paper import REAL, SIZES, place_name
from reproduction.report.seen_images import Block, Draws, Margin, Parts
from reproduction.report.statistics import Bits, Estimate, bits, estimate
from reproduction.report.tables import METHODS, NAMES, UPSTREAMS, average

SEVERAL = {
    "table02": [(role, pool) for pool in ("8", "14", "20") for role in SIZES],
    "gain": EIGHT,
    "rankings": EIGHT,
}
STREAM, STUDIED = "test_unlabelled", "task_arithmetic"  # the latter: where studies start
ADAPTERS = ("surgery", "prob_surgery")
SUMMARY = "Adapters on test images they were trained on, and on others"
NOT_RUN = '<span class="fc-none">not run</span>'


def folded(page: Page) -> PageOutput:
    """All that the page compares with adapters, one click away, and what seen images are worth in a
    sentence.
    """
    html, shown = "", [place for place in page.topic.places if place[1] == page.place[1]]
    for role, pool in SEVERAL.get(page.name) or shown:
        ours = Evidence(page.suite, role, pool)
        if role == REAL:
            html += _apart(ours)
            continue
        blocks = [
            block
            for block in blocks_of(ours, page.topic.study)
            if any(block.parts(m) for m in ADAPTERS)
        ]
        words = f"{place_name(role, pool)} — {page.label}"
        said = (
            _table(blocks, words) + note(sentence(blocks) + _borrowed(blocks, page.topic.study))
            if blocks
            else ""
        )
        html += said or note(f"○ not run: {words}.")
    return PageOutput(fold(SUMMARY, html))


def _apart(ours: Evidence) -> str:
    """Of the real encoder, whose adapters see texts that are not scored: those, and the same
    adapters from other texts.
    """
    rows, main = [], main_setting(ours.suite)
    streams = {
        "": "unlabelled texts that are not scored",
        "_train": "training texts",
        "_scored": "the scored test texts",
    }
    for upstream, name in UPSTREAMS.items():
        featcal = average(ours, (upstream, "featcal", main))
        for method in ADAPTERS:
            found = {stream: average(ours, (upstream, method, main + stream)) for stream in streams}
            if any(found.values()):
                lead = [stands(featcal, found[stream]) for stream in streams]
                cells = [
                    f"{estimated(found[stream])}<br>{one}"
                    for stream, one in zip(streams, lead, strict=True)
                ]
                worth = stands(found["_scored"], found[""])
                rows.append(("", [f"{NAMES[method]}<small>{escape(name)}</small>", *cells, worth]))
    words = f"{place_name(ours.role, ours.pool)} — {label(ours.suite)}"
    if not rows:
        return note(f"○ not run: {words}.")
    head = ["Trained on", *streams.values(), "What the scored texts are worth"]
    caption = f"Average top-1 accuracy (%) of adapters, and FeatCal minus them; within noise: two standard errors. {words}"
    return table(head, rows, caption, "fc-long")


def blocks_of(ours: Evidence, study: str = "") -> Iterator[Block]:
    """The mergers of one role and pool, or the budgets or kinds of images of a study."""
    if study == "samples":
        yield from _budgets(ours)
    elif study == "corrupted":
        yield from _damaged(ours)
    else:
        yield from (_merger(ours, upstream) for upstream in UPSTREAMS)


def _merger(ours: Evidence, upstream: str) -> Block:
    rows = select(ours.table("scores.correct"), {"upstream": upstream})
    draw = (
        ours.settings().get("merge", {}).get(f"{ours.role}-{ours.pool}-{upstream}", {}).get("draw")
        or {}
    )
    itself = (
        " <small>itself made on all test images</small>" if draw.get("stream") == STREAM else ""
    )
    shown = {method: drawn(ours, upstream, method) for method in ADAPTERS}
    right = _right(ours, rows, ours.table("seen"))
    return Block(escape(UPSTREAMS[upstream]) + itself, right, shown, _trained(ours, upstream))


def _budgets(ours: Evidence) -> Iterator[Block]:
    rows, seen = (
        select(ours.table("samples.correct"), {"upstream": STUDIED}),
        ours.table("samples.seen"),
    )
    merged, trained = (
        rows[rows["method"] == "merged"],
        {m: _draw(ours, STUDIED, m).get("samples") for m in ADAPTERS},
    )
    for samples in sorted(set(rows["samples"]) - {0}):
        own = pd.concat([merged, rows[rows["samples"] == samples]])
        shown = dict.fromkeys(ADAPTERS, of_budget(seen, samples))
        same = {
            method: found
            for method, found in _trained(ours, STUDIED).items()
            if trained[method] == samples
        }
        yield Block(f"{int(samples)} images per task", _right(ours, own, seen), shown, same)


def _damaged(ours: Evidence) -> Iterator[Block]:
    """Of the study its one budget and seeds; from clean images the same models out of the
    scores.
    """
    rows, seen = (
        select(ours.table("corrupted.correct"), {"upstream": STUDIED}),
        ours.table("corrupted.seen"),
    )
    whole, seeds = select(ours.table("scores.correct"), {"upstream": STUDIED}), set(rows["seed"])
    trained = select(
        ours.table("corrupted"),
        {"upstream": STUDIED, "setting": f"{main_setting(ours.suite)}_train"},
    )
    budgets = sorted(set(seen["samples"]))
    for kind, name in kinds(ours).items() if budgets else ():
        clean = kind == "clean"
        own = whole[whole["seed"].isin(seeds)] if clean else rows[rows["corruption"] == kind]
        right = _right(ours, pd.concat([whole[whole["method"] == "merged"], own]), seen)
        shown = dict.fromkeys(ADAPTERS, of_budget(seen, budgets[0]))
        damaged = select(trained, {"corruption": kind})
        yield Block(
            name,
            right,
            shown,
            {method: estimate(select(damaged, {"method": method})) for method in ADAPTERS},
        )


def drawn(ours: Evidence, upstream: str, method: str) -> Draws:
    """What an adapter of the main setting was shown; nothing where none was trained."""
    draw = _draw(ours, upstream, method)
    return of_budget(ours.table("seen"), draw["samples"]) if draw else {}


def _draw(ours: Evidence, upstream: str, method: str) -> dict[str, Any]:
    """How the images of an adapter of the main setting were drawn; empty where none was trained."""
    adapted = (
        ours.settings().get("adapt", {}).get(f"{ours.role}-{ours.pool}-{upstream}-{method}", {})
    )
    return (adapted.get("settings") or {}).get(main_setting(ours.suite), {}).get("draw") or {}


def of_budget(seen: pd.DataFrame, samples: float | None) -> Draws:
    """The draws of so many test images of each task, by seed; None is all of them."""
    stream = select(seen, {"stream": STREAM})
    own = stream[stream["samples"].isna() if samples is None else stream["samples"] == samples]
    return flags_of(own, "seen", _counts(own))


def flags_of(rows: pd.DataFrame, column: str, counts: Mapping[str, int]) -> Draws:
    """Flags of every task by seed, from a column of hexadecimal text."""
    found: dict[str, dict[str, Bits]] = {}
    for seed, task, text in zip(rows["seed"], rows["task"], rows[column], strict=True):
        found.setdefault(seed, {})[task] = bits(text, counts[task])
    return dict(found)


def _counts(seen: pd.DataFrame) -> dict[str, int]:
    """Test images by task."""
    return {task: int(count) for task, count in zip(seen["task"], seen["count"], strict=True)}


def _right(ours: Evidence, rows: pd.DataFrame, seen: pd.DataFrame) -> dict[str, Draws]:
    """Right answers of the merger, and at the suite's main setting of what calibrates it."""
    counts = _counts(seen)
    known = rows[rows["task"].isin(list(counts))]
    chosen = {
        method: select(known, {"method": method, "setting": main_setting(ours.suite)})
        for method in METHODS
    }
    chosen["merged"] = select(known, {"method": "merged"})
    return {method: flags_of(frame, "correct", counts) for method, frame in chosen.items()}


def _trained(ours: Evidence, upstream: str) -> dict[str, Estimate | None]:
    """Adapters trained on FeatCal's images, at the size of the suite's main setting."""
    return {
        method: average(ours, (upstream, method, f"{main_setting(ours.suite)}_train"))
        for method in ADAPTERS
    }


def _table(blocks: list[Block], words: str) -> str:
    head = [
        "",
        "test images it was shown",
        "other test images",
        "all test images",
        "trained on training images",
    ]
    head += ["FeatCal minus it, others", "what being shown is worth"]
    rows = []
    for block in blocks:
        rows.append(("fc-merger", [block.name, *_shares(block.parts("merged")), "–", "–", "–"]))
        for method, name in METHODS.items():
            found, trained = block.parts(method), block.trained.get(method)
            cell = estimated(trained) if trained else NOT_RUN
            if method == "featcal":  # which is trained on nothing else
                cell = _shares(found)[-1]
            margins = [_margin(block.difference(method)), _margin(block.worth(method))]
            rows.append(("fc-calibrated", [escape(name), *_shares(found), cell, *margins]))
    caption = f"Average top-1 accuracy (%) on parts of the test images; ±: two standard errors, images paired. {words}"
    return table(head, rows, caption, "fc-long")


def _borrowed(blocks: Sequence[Block], study: str) -> str:
    """Where a study of budgets, which trains no adapter on training images, shows those of the main
    results.
    """
    named = [block.name for block in blocks if any(block.trained.values())]
    if study != "samples" or not named:
        return ""
    return f" Adapters trained on training images: at {' and '.join(named)} those of Table 1, this study trains none."


def _shares(found: Parts | None) -> list[str]:
    """Accuracy on seen, other and all test images; a dash where there is no such image."""
    if found is None:
        return [NOT_RUN] * 3
    return [
        "–" if value is None else f"{value:.1f}"
        for value in (found.seen, found.others, found.whole)
    ]


def _margin(found: Margin | None) -> str:
    return "–" if found is None else f"{round(found[0], 1) + 0.0:+.1f} ± {found[1]:.1f}"


def sentence(blocks: Sequence[Block]) -> str:
    """What seen images are worth to each adapter, and where FeatCal stands on the others, from the
    numbers of the table.
    """
    said = []
    for method in ADAPTERS:
        known = [found for block in blocks if (found := block.worth(method)) is not None]
        if known:  # blocks share their images, so that many are no surer than one
            said.append(
                f"{_margin((fmean(m for m, _ in known), fmean(e for _, e in known)))} points to {NAMES[method]}"
            )
    if not said:
        return "The adapters were shown every test image: none is left to tell what that is worth."
    margins = [
        found
        for block in blocks
        for method in ADAPTERS
        if (found := block.difference(method)) is not None
    ]
    above, below = (sum(sign * mean > room for mean, room in margins) for sign in (1, -1))
    return (
        f"Being shown a test image, without its label, is worth {' and '.join(said)}, mean over the blocks: by so much an "
        f"adapter is better against FeatCal, which was shown none, than on the other test images. On those, FeatCal is above the "
        f"adapter in {above} of {len(margins)}, below in {below}, and within two standard errors in "
        f"{len(margins) - above - below}."
    )
