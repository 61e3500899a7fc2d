"""Every verdict again, by other code: from claims.yaml and the files of results with csv, json and
numpy only.

Written from the words at the top of claims.yaml and from the book's page Claims, not from
reproduction.report, of which nothing is imported.
"""

import csv
import itertools
import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import yaml

MERGERS = ("average", "task_arithmetic", "adamerging", "wudi")
NO_BLOCKS = ("embeddings", "features")
LIES_WITH = dict(
    references="scores", similarity="drift", alignment="drift", vectors="drift", projection="drift"
)
CALIBRATED = ("featcal", "surgery", "prob_surgery")


def all_claims(path: Path) -> list[dict]:
    """Entries of claims.yaml with what their section says of all of them."""
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    shared = dict(
        kind="above", file="scores", measure="value", direction="higher", times=1, by=0, within=0
    )
    shared |= {"each": "", "beside": [], "where": {}, "over": None, "than": None}
    return [
        shared | {"role": s["role"], "pool": str(s["pool"]), "place": place} | claim
        for place, s in sections.items()
        for claim in s["claims"]
    ]


def side(value) -> dict:
    return (
        dict(value)
        if isinstance(value, dict)
        else dict(zip(("upstream", "method"), value, strict=True))
    )


def same(cell, wanted) -> bool:
    try:
        return float(cell) == float(wanted)
    except (TypeError, ValueError):
        return str(cell) == str(wanted)


class Results:
    """The result files of one folder, and verdicts on claims at one setting of FeatCal."""

    def __init__(self, folder: Path, setting: str):
        self.folder, self.setting = folder, setting
        self.rows = cache(self._rows)

    def _csv(self, key: str, file: str = "scores") -> list[dict]:
        path = self.folder / LIES_WITH.get(file, file) / key / f"{file}.csv"
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as text:
            found = list(csv.DictReader(text))
        kept = path.with_name(f"{file}.correct.csv")
        if kept.is_file():
            with kept.open(newline="", encoding="utf-8") as text:
                lines = list(csv.DictReader(text))
            keys = [key for key in lines[0] if key != "correct"]
            known = {tuple(line[key] for key in keys): line["correct"] for line in lines}
            found = [
                row | {"correct": known.get(tuple(row[key] for key in keys), "")} for row in found
            ]
        return found

    def _rows(self, role: str, pool: str, file: str) -> list[dict]:
        key = f"{role}-{pool}"
        if file.endswith(".run"):
            file = file.removesuffix(".run")
            path = self.folder / file / key / "run.json"
            cost = json.loads(path.read_text()).get("cost", []) if path.is_file() else []
            if isinstance(cost, dict):
                one = self._csv(key, file)[0]
                cost = [
                    {name: one[name] for name in ("upstream", "method", "setting")}
                    | {"seconds": sum(cost.values())}
                ]
            return [
                {name: "" if value is None else value for name, value in row.items()}
                for row in cost
            ]
        found = self._csv(key, file)
        if file == "scores":
            found = found + self._csv(key, "ablate")
        if file == "corrupted" and found:
            models = {
                tuple(row[name] for name in ("upstream", "method", "setting", "seed"))
                for row in found
            }
            models |= {(model[0], "merged", "", "") for model in models}
            clean = [
                row
                for row in self._csv(key)
                if (row["upstream"], row["method"], row["setting"], row["seed"]) in models
            ]
            found = [row | {"corruption": "clean"} for row in clean] + found
        return found

    def tasks(self, claim: dict) -> list[str]:
        return list(
            dict.fromkeys(row["task"] for row in self.rows(claim["role"], claim["pool"], "scores"))
        )

    def chosen(self, claim: dict, one: dict) -> list[dict]:
        """The rows of one side."""
        own = dict(one)
        role, pool, file = (
            own.pop("role", claim["role"]),
            str(own.pop("pool", claim["pool"])),
            own.pop("file", claim["file"]),
        )
        found, wanted = self.rows(role, pool, file), claim["where"] | own
        if wanted.get("task") == "shown":
            wanted["task"] = next(
                (row["task"] for row in self._csv(f"{role}-{pool}", "similarity")), None
            )
        if wanted.get("setting") == "studied":
            wanted["setting"] = "paper" if self.folder.name == "paper" else "suite"
        if (
            wanted.get("method") in CALIBRATED
            and found
            and "setting" in found[0]
            and "setting" not in wanted
        ):
            wanted["setting"] = self.setting
            run = {row["setting"] for row in found if row["method"] == wanted["method"]}
            free = (
                wanted["method"] != "featcal" or claim["kind"] == "checked" or file.endswith(".run")
            )
            if free and self.setting not in run and "suite" in run:
                wanted["setting"] = "suite"
        blocks = wanted.pop("block", None)
        if blocks == "last":
            blocks = max(
                (row["block"] for row in found if row["block"] not in NO_BLOCKS), default=None
            )
        if blocks == "all":
            found = [row for row in found if row["block"] not in NO_BLOCKS]
        elif blocks is not None:
            found = [row for row in found if row["block"] == blocks]
        found = [
            row
            for row in found
            if all(key in row and same(row[key], value) for key, value in wanted.items())
        ]
        return [row for row in found if row.get(claim["measure"], "") not in ("", None)]

    # ---- one sum of means

    def terms(self, claim: dict) -> list[tuple[float, dict]]:
        left, right, kind = side(claim["left"]), side(claim["right"]), claim["kind"]

        def merger(one):
            return {key: value for key, value in one.items() if key != "setting"} | {
                "method": "merged"
            }

        def top(one):
            return {key: value for key, value in one.items() if key != "at"} | {"chosen": 1}

        if kind == "gain":
            return [(1, left), (-1, merger(left)), (-1, right), (1, merger(right))]
        if kind == "closer":  # (left − than) − (right − left)
            return [(1, left), (-1, side(claim["than"])), (-1, right), (1, left)]
        if kind == "falls":
            return [(1, top(left)), (-1, left), (-1, top(right)), (1, right)]
        sign = -1 if claim["direction"] == "lower" else 1
        return [(sign * claim["times"], left), (-sign, right)]

    def compared(self, claim: dict) -> tuple[float, float, bool] | None:
        """Σ weight·mean, two standard errors, and whether these are known; None where something was
        not run.
        """
        parts, tasks = [], {}
        for weight, one in self.terms(claim):
            rows = self.chosen(claim, one)
            if not rows:
                return None
            if "task" in rows[0] and "task" not in one:
                place = (one.get("role"), one.get("pool"))
                if tasks.setdefault(place, {row["task"] for row in rows}) != {
                    row["task"] for row in rows
                }:
                    return None
            parts.append((weight, rows))
        measure = claim["measure"]
        total = sum(weight * mean_of(rows, measure) for weight, rows in parts)
        parts = together(parts)
        images, spreads = (
            image_part(parts, measure),
            [seed_part(rows, measure) for _, rows in parts],
        )
        seeds = sum(
            weight**2 * (spread or 0) for (weight, _), spread in zip(parts, spreads, strict=True)
        )
        once = any(len({row.get("seed", "") for row in rows} - {""}) == 1 for _, rows in parts)
        known = images is not None or (any(spread is not None for spread in spreads) and not once)
        return total, 2 * math.sqrt((images or 0) + seeds), known

    # ---- verdicts

    def verdict(self, claim: dict) -> tuple[str, float, float]:
        """Word, margin and two standard errors."""
        several = self.several(claim)
        if several is not None:
            return worst([self.verdict(part) for part in several])
        kind, nan = claim["kind"], math.nan
        if kind == "spreads":
            rows = self.chosen(claim, side(claim["left"]))
            groups = {
                block: [float(r[claim["measure"]]) for r in rows if r["block"] == block]
                for block in {r["block"] for r in rows}
            }
            sizes = [np.mean(values) for values in groups.values()]
            seen = sum(size >= 0.1 * max(sizes) for size in sizes)
            return ("one run", seen - len(sizes) / 2, 0.0) if rows else ("not run", nan, nan)
        if kind in ("together", "apart"):
            return self.two_gains(claim)
        found = self.compared(claim)
        if found is None:
            return "not run", nan, nan
        value, noise, known = found
        margin = claim["within"] - abs(value) if kind == "level" else value - claim["by"]
        if kind == "checked":
            applies = [
                float(row["value"])
                for row in self.rows(claim["role"], claim["pool"], claim["file"])
                if row.get("quantity") == "applies"
                and row.get("statement") == claim["where"].get("statement")
                and row["method"] == side(claim["left"])["method"]
            ]
            return (
                "vacuous"
                if applies and not any(applies)
                else "holds"
                if margin >= 0
                else "does not hold",
                margin,
                noise,
            )
        return word_of(margin, noise) if known else "one run", margin, noise

    def several(self, claim: dict) -> list[dict] | None:
        """A claim about several as claims about one; None where it is about one already."""
        if claim["over"]:
            lists = claim["over"] if isinstance(claim["over"], dict) else {"place": claim["over"]}
            found = []
            for values in itertools.product(*lists.values()):
                pick = dict(zip(lists, values, strict=True))
                role, pool = pick.get("place", (claim["role"], claim["pool"]))
                left, right = side(claim["left"]), side(claim["right"])
                if "upstream" in pick:
                    left["upstream"] = right["upstream"] = pick["upstream"]
                if "against" in pick:
                    right["method"] = pick["against"]
                one = claim | dict(over=None, role=role, pool=str(pool), left=left, right=right)
                inner = self.several(one)
                found += [one] if inner is None else inner
            return found
        if claim["kind"] in ("order", "weaker"):
            found = []
            for one, other in itertools.combinations(MERGERS, 2):
                above = {"kind": "above", "left": [one, "merged"], "right": [other, "merged"]}
                word, margin, _ = self.verdict(claim | above)
                if word == "not run":
                    return []
                better, worse = (one, other) if margin > 0 else (other, one)
                if word != "within noise" and claim["kind"] == "order":
                    found.append(
                        claim
                        | dict(kind="above", left=[better, "featcal"], right=[worse, "featcal"])
                    )
                elif word != "within noise":
                    found.append(
                        claim
                        | {"kind": "gain", "left": [worse, "featcal"], "right": [better, "featcal"]}
                    )
            return found
        column = claim["each"]
        if column == "other_task":
            others = [
                t
                for t in self.tasks(claim)
                if t not in (side(claim["left"])["task"], *claim["beside"])
            ]
            return [
                claim | {"each": "", "right": side(claim["right"]) | {"task": task}}
                for task in others
            ]
        if column == "task":
            values = self.tasks(claim)
        elif column:
            sides = [one for _, one in self.terms(claim) if column not in one]
            values = list(
                dict.fromkeys(row[column] for one in sides for row in self.chosen(claim, one))
            )
        else:
            return None
        return [
            claim | {"each": "", "where": claim["where"] | {column: v}}
            for v in values
            if v not in claim["beside"]
        ]

    def two_gains(self, claim: dict) -> tuple[str, float, float]:
        gains = []
        for task in self.tasks(claim):
            pairs = []
            for one in (side(claim["left"]), side(claim["right"])):
                cosines = self.chosen(claim | {"where": {"task": task}}, one)
                scored = claim | {"where": {"task": task}, "file": "scores", "measure": "value"}
                scores = self.chosen(
                    scored, one | ({"seed": cosines[0]["seed"]} if cosines else {})
                )
                pairs.append((cosines, scores))
            if all(cosines and scores for cosines, scores in pairs):
                (cos_l, acc_l), (cos_r, acc_r) = pairs
                line = []
                for measure, rows_l, rows_r in (("cosine", cos_l, cos_r), ("value", acc_l, acc_r)):
                    parts = [(1, rows_l), (-1, rows_r)]
                    change = mean_of(rows_l, measure) - mean_of(rows_r, measure)
                    line += [change, 2 * math.sqrt(image_part(parts, measure) or 0)]
                gains.append(line)
        if not gains:
            return "not run", math.nan, math.nan
        cosine, cosine_noise, accuracy, accuracy_noise = np.array(gains).T
        if claim["kind"] == "together":
            if len(gains) < 4 or not cosine.std() or not accuracy.std():
                return "within noise", math.nan, math.nan
            r = float(np.corrcoef(cosine, accuracy)[0, 1])
            room = 2 * math.sqrt((1 - r * r) / (len(gains) - 2))
            return word_of(r, room), r, room
        slight = (accuracy > 0) & (cosine < 0)
        clear = slight & (accuracy > accuracy_noise) & (-cosine > cosine_noise)
        return (
            "holds" if clear.any() else "within noise" if slight.any() else "does not hold",
            math.nan,
            math.nan,
        )


def word_of(margin: float, noise: float) -> str:
    return "holds" if margin > noise else "does not hold" if margin < -noise else "within noise"


def worst(parts: list[tuple[str, float, float]]) -> tuple[str, float, float]:
    """The part that decides: the clearest failure, else the least clear of those that keep the
    whole from holding.
    """
    words = [word for word, _, _ in parts]
    for word in ("not run", "does not hold", "within noise", "one run", "holds"):
        if word in words or not parts:
            own = [part for part in parts if part[0] == word]
            if word == "not run":
                return word, math.nan, math.nan
            return min(
                own, key=lambda part: part[1] + (part[2] if word == "does not hold" else -part[2])
            )
    raise AssertionError(words)


def together(parts):
    """Terms about the very same rows as one term: 2·left is one model, not two that were drawn
    independently.
    """
    found: list[tuple[float, list[dict]]] = []
    for weight, rows in parts:
        at = next((i for i, (_, other) in enumerate(found) if other == rows), None)
        if at is None:
            found.append((weight, rows))
        else:
            found[at] = (found[at][0] + weight, rows)
    return found


def by_seed(rows, measure):
    seeds = {row.get("seed", "") for row in rows}
    return {
        seed: [float(row[measure]) for row in rows if row.get("seed", "") == seed] for seed in seeds
    }


def mean_of(rows, measure):
    return float(np.mean([np.mean(values) for values in by_seed(rows, measure).values()]))


def seed_part(rows, measure):
    means = [np.mean(values) for values in by_seed(rows, measure).values()]
    return float(np.var(means, ddof=1)) / len(means) if len(means) > 1 else None


def image_part(parts, measure):
    """What the choice of test rows adds to the variance; None where nothing is known of it."""
    if any("task" not in rows[0] or "count" not in rows[0] for _, rows in parts):
        return None
    if measure == "value" and "metric" not in parts[0][1][0] or measure not in ("value", "cosine"):
        return None
    if measure == "cosine" and "cosine_sd" not in parts[0][1][0]:
        return None
    variance = 0.0
    for task in {row["task"] for _, rows in parts for row in rows}:
        own = [
            (weight, rows, [row for row in rows if row["task"] == task]) for weight, rows in parts
        ]
        own = [(weight, rows, some) for weight, rows, some in own if some]
        if measure == "value" and all(row.get("correct") for _, _, some in own for row in some):
            sum_of_rows = 0.0
            for weight, rows, some in own:
                for row in some:
                    seeds = by_seed(rows, measure)
                    share = weight / len(seeds) / len(seeds[row["seed"]])
                    packed = np.frombuffer(bytes.fromhex(row["correct"]), np.uint8)
                    sum_of_rows = (
                        sum_of_rows + share * 100.0 * np.unpackbits(packed)[: int(row["count"])]
                    )
            variance += float(np.var(sum_of_rows, ddof=1)) / len(sum_of_rows)
            continue
        for weight, rows, some in own:
            count, tasks = int(some[0]["count"]), len({row["task"] for row in rows})
            if measure == "cosine":
                one = float(some[0]["cosine_sd"]) ** 2 / count
            else:
                p = float(np.mean([float(row["value"]) for row in some])) / 100
                one = 100**2 * p * (1 - p) / count
                if some[0]["metric"] == "spearman":
                    one = 100**2 * (1 - p**2) ** 2 * (1 + p**2 / 2) / (count - 3)
            variance += weight**2 * one / tasks**2
    return variance
