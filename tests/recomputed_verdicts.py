"""Compute every verdict again from claims.yaml and the result files, with csv, json and numpy.

Written from the words of claims.yaml and the book's page Claims; imports no reproduction.report.
"""

import csv
import json
import math
from functools import cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import yaml

MERGERS = ("average", "task_arithmetic", "adamerging", "wudi")
FOLDERS = dict.fromkeys(("similarity", "alignment", "vectors", "projection"), "drift")
FOLDERS["references"] = "scores"
CALIBRATED = ("featcal", "surgery", "prob_surgery")
NOT_RUN = ("not run", math.nan, math.nan)
SHARED = dict(kind="above", file="scores", measure="value", direction="higher", times=1, by=0)
SHARED |= {"within": 0, "each": "", "beside": [], "where": {}, "over": None, "than": None}


def all_claims(path: Path) -> list[dict]:
    """Return the entries of claims.yaml, each with the defaults of its section."""
    claims = []
    for location, section in yaml.safe_load(path.read_text("utf-8")).items():
        shared = {"role": section["role"], "pool": str(section["pool"]), "place": location}
        claims += [SHARED | shared | claim for claim in section["claims"]]
    for claim in claims:
        for name in ("left", "right", "than"):
            if isinstance(claim.get(name), list):
                claim[name] = dict(zip(("upstream", "method"), claim[name], strict=True))
    return claims


def read(path: Path) -> list[dict]:
    """Return the rows of a CSV file; none without the file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def same(cell, value) -> bool:
    try:
        return float(cell) == float(value)
    except (TypeError, ValueError):
        return str(cell) == str(value)


def distinct(rows, column) -> list:
    return list(dict.fromkeys(row[column] for row in rows))


class Results:
    """The result files of one folder, and verdicts on claims at one setting of FeatCal."""

    def __init__(self, folder: Path, setting: str):
        self.folder, self.setting = folder, setting
        self.rows = cache(self._rows)

    def _csv(self, key: str, file: str = "scores") -> list[dict]:
        path = self.folder / FOLDERS.get(file, file) / key / f"{file}.csv"
        scores, right = read(path), read(path.with_name(f"{file}.correct.csv"))
        keys = [key for row in right[:1] for key in row if key != "correct"]
        correct = {tuple(row[key] for key in keys): row["correct"] for row in right}
        return [row | {"correct": correct.get(tuple(row[k] for k in keys), "")} for row in scores]

    def _rows(self, role: str, pool: str, file: str) -> list[dict]:
        key = f"{role}-{pool}"
        if file.endswith(".run"):
            path = self.folder / file.removesuffix(".run") / key / "run.json"
            cost = json.loads(path.read_text()).get("cost", []) if path.is_file() else []
            return [{k: "" if value is None else value for k, value in row.items()} for row in cost]
        rows = self._csv(key, file)
        if file == "scores":
            return rows + self._csv(key, "ablate")
        if file == "corrupted" and rows:
            keys = ("upstream", "method", "setting", "seed")
            models = {tuple(row[name] for name in keys) for row in rows}
            models |= {(model[0], "merged", "", "") for model in models}
            clean = [row for row in self._csv(key) if tuple(row[n] for n in keys) in models]
            return [row | {"corruption": "clean"} for row in clean] + rows
        return rows

    def tasks(self, claim: dict) -> list[str]:
        return distinct(self.rows(claim["role"], claim["pool"], "scores"), "task")

    def side_rows(self, claim: dict, side: dict) -> list[dict]:
        columns = dict(side)
        role, pool, file = (columns.pop(name, claim[name]) for name in ("role", "pool", "file"))
        rows, key = self.rows(role, str(pool), file), claim["where"] | columns
        if key.get("task") == "shown":
            shown = self._csv(f"{role}-{pool}", "similarity")
            key["task"] = shown[0]["task"] if shown else None
        method = key.get("method")
        if key.get("setting") == "studied":
            main = "paper" if self.folder.name == "paper" or role == "vit_s" else "suite"
            key["setting"] = main if self.setting == main else "not run"
        elif "setting" not in key and method in CALIBRATED and rows and "setting" in rows[0]:
            run = {row["setting"] for row in rows if row["method"] == method}
            free = method != "featcal" or claim["kind"] == "checked" or file.endswith(".run")
            order = (*([] if method == "featcal" else ["paper"]), self.setting, "suite")
            available = next((name for name in order if name in run), self.setting)
            key["setting"] = available if free else self.setting
        if "block" in key:
            of_blocks = [row for row in rows if row["block"] not in ("embeddings", "features")]
            if key["block"] == "last":
                key["block"] = max((row["block"] for row in of_blocks), default=None)
            elif key["block"] == "all":
                rows = of_blocks
                del key["block"]
        rows = [row for row in rows if row.get(claim["measure"], "") not in ("", None)]
        return [r for r in rows if all(k in r and same(r[k], v) for k, v in key.items())]

    # ---- one sum of means

    def terms(self, claim: dict) -> list[tuple[float, dict]]:
        left, right, kind = claim["left"], claim["right"], claim["kind"]

        def without(name, side, **others):
            return {key: value for key, value in side.items() if key != name} | others

        if kind == "gain":
            before = [without("setting", side, method="merged") for side in (left, right)]
            return [(1, left), (-1, before[0]), (-1, right), (1, before[1])]
        if kind == "closer":  # (left − than) − (right − left)
            return [(2, left), (-1, claim["than"]), (-1, right)]
        if kind == "falls":
            tops = [without("at", side, chosen=1) for side in (left, right)]
            return [(1, tops[0]), (-1, left), (-1, tops[1]), (1, right)]
        sign = -1 if claim["direction"] == "lower" else 1
        return [(sign * claim["times"], left), (-sign, right)]

    def compared(self, claim: dict) -> tuple[float, float, bool] | None:
        """Return Σ weight·mean, two standard errors, and whether these are known; None if not all ran."""
        parts, tasks, measure = [], {}, claim["measure"]
        for weight, side in self.terms(claim):
            rows = self.side_rows(claim, side)
            if not rows:
                return None
            if "task" in rows[0] and "task" not in side:
                names = {row["task"] for row in rows}
                if tasks.setdefault((side.get("role"), side.get("pool")), names) != names:
                    return None
            parts.append((weight, rows))
        by_seed = [(weight, seed_means(rows, measure)) for weight, rows in parts]
        total = sum(weight * float(np.mean(means)) for weight, means in by_seed)
        images = image_part(parts, measure)
        several = [(weight, means) for weight, means in by_seed if len(means) > 1]
        seeds = sum(w**2 * (float(np.var(means, ddof=1)) / len(means)) for w, means in several)
        once = any(len({row.get("seed", "") for row in rows} - {""}) == 1 for _, rows in parts)
        known = images is not None or (bool(several) and not once)
        return total, 2 * math.sqrt((images or 0) + seeds + self.expert_part(claim, total)), known

    def expert_part(self, claim: dict, total: float) -> float:
        """Return the variance between trainings of the experts; 0 without three of them."""
        totals = [total]
        if claim["file"] == "scores":
            again = claim | {"file": "expert_seeds"}
            trained = self.rows(claim["role"], claim["pool"], "expert_seeds")
            for seed in distinct(trained, "expert_seed"):
                result = self.compared(again | {"where": claim["where"] | {"expert_seed": seed}})
                totals += [result[0]] if result else []
        return float(np.var(totals, ddof=1)) if len(totals) > 2 else 0.0

    # ---- verdicts

    def verdict(self, claim: dict) -> tuple[str, float, float]:
        """Return word, margin and two standard errors."""
        parts = self.parts(claim)
        if parts is not None:
            return worst([self.verdict(part) for part in parts])
        kind, left = claim["kind"], claim["left"]
        if kind == "spreads":
            rows = self.side_rows(claim, left)
            by_block = by_value(rows, "block", claim["measure"])
            sizes = [np.mean(values) for values in by_block.values()]
            seen = sum(size >= 0.1 * max(sizes) for size in sizes)
            return ("one run", seen - len(sizes) / 2, 0.0) if rows else NOT_RUN
        if kind in ("together", "apart"):
            return self.verdict_on_gains(claim)
        result = self.compared(claim)
        if result is None:
            return NOT_RUN
        value, noise, known = result
        margin = claim["within"] - abs(value) if kind == "level" else value - claim["by"]
        if kind == "checked":
            condition = {"quantity": "applies", "method": left["method"]}
            condition |= {"statement": claim["where"].get("statement")}
            rows = self.rows(claim["role"], claim["pool"], claim["file"])
            rows = [row for row in rows if condition.items() <= row.items()]
            if rows and not any(float(row["value"]) for row in rows):
                return "vacuous", margin, noise
            return "holds" if margin >= 0 else "does not hold", margin, noise
        return word_of(margin, noise) if known else "one run", margin, noise

    def parts(self, claim: dict) -> list[dict] | None:
        """Return the single claims of a claim about several; None for a single claim."""
        if claim["over"]:
            return self.single_claims(claim)
        if claim["kind"] in ("order", "weaker"):
            return self.merger_pairs(claim)
        column = claim["each"]
        if not column:
            return None
        if column == "other_task":
            values = [task for task in self.tasks(claim) if task != claim["left"]["task"]]
            changes = [{"right": claim["right"] | {"task": task}} for task in values]
        else:
            sides = [side for _, side in self.terms(claim) if column not in side]
            rows = [row for side in sides for row in self.side_rows(claim, side)]
            values = self.tasks(claim) if column == "task" else distinct(rows, column)
            changes = [{"where": claim["where"] | {column: value}} for value in values]
        kept = zip(values, changes, strict=True)
        return [claim | {"each": ""} | change for v, change in kept if v not in claim["beside"]]

    def single_claims(self, claim: dict) -> list[dict]:
        lists = claim["over"] if isinstance(claim["over"], dict) else {"place": claim["over"]}
        parts = []
        for values in product(*lists.values()):
            pick = dict(zip(lists, values, strict=True))
            role, pool = pick.get("place", (claim["role"], claim["pool"]))
            upstream = {"upstream": pick["upstream"]} if "upstream" in pick else {}
            against = {"method": pick["against"]} if "against" in pick else {}
            part = claim | dict(over=None, role=role, pool=str(pool), left=claim["left"] | upstream)
            part["right"] = claim["right"] | upstream | against
            inner = self.parts(part)
            parts += [part] if inner is None else inner
        return parts

    def merger_pairs(self, claim: dict) -> list[dict]:
        def comparison(kind, method, left, right):
            left, right = ({"upstream": merger, "method": method} for merger in (left, right))
            return claim | {"kind": kind, "left": left, "right": right}

        parts = []
        for first, second in combinations(MERGERS, 2):
            word, margin, _ = self.verdict(comparison("above", "merged", first, second))
            if word == "not run":
                return []
            better, worse = (first, second) if margin > 0 else (second, first)
            if word != "within noise" and claim["kind"] == "order":
                parts.append(comparison("above", "featcal", better, worse))
            elif word != "within noise":
                parts.append(comparison("gain", "featcal", worse, better))
        return parts

    def verdict_on_gains(self, claim: dict) -> tuple[str, float, float]:
        gains = []
        for task in self.tasks(claim):
            part = claim | {"where": {"task": task}, "kind": "above", "measure": "cosine"}
            sides = {name: self.side_rows(part, part[name]) for name in ("left", "right")}
            if all(sides.values()):
                seeded = {n: part[n] | {"seed": rows[0]["seed"]} for n, rows in sides.items()}
                scores = self.compared(part | seeded | {"file": "scores", "measure": "value"})
                gains += [[*self.compared(part)[:2], *scores[:2]]] if scores else []
        if not gains:
            return NOT_RUN
        cosine, cosine_noise, accuracy, accuracy_noise = np.array(gains).T
        if claim["kind"] == "together":
            if len(gains) < 4 or not cosine.std() or not accuracy.std():
                return "within noise", math.nan, math.nan
            r = float(np.corrcoef(cosine, accuracy)[0, 1])
            room = 2 * math.sqrt((1 - r * r) / (len(gains) - 2))
            return word_of(r, room), r, room
        clear = (accuracy > accuracy_noise) & (-cosine > cosine_noise)
        never = ((cosine > cosine_noise) | (-accuracy > accuracy_noise)).all()
        word = "holds" if clear.any() else "does not hold" if never else "within noise"
        return word, math.nan, math.nan


def word_of(margin: float, noise: float) -> str:
    return "holds" if margin > noise else "does not hold" if margin < -noise else "within noise"


def worst(parts: list[tuple[str, float, float]]) -> tuple[str, float, float]:
    """Return the part that decides: the clearest failure, else the least clear success."""
    kinds = {word for word, _, _ in parts}
    if not parts or "not run" in kinds:
        return NOT_RUN
    word = next(w for w in ("does not hold", "within noise", "one run", "holds") if w in kinds)
    sign = 1 if word == "does not hold" else -1
    return min((p for p in parts if p[0] == word), key=lambda part: part[1] + sign * part[2])


def by_value(rows, column, measure) -> dict:
    values = {}
    for row in rows:
        values.setdefault(row.get(column, ""), []).append(float(row[measure]))
    return values


def seed_means(rows, measure):
    return [np.mean(values) for values in by_value(rows, "seed", measure).values()]


def image_part(parts, measure):
    """Return the variance from the choice of test rows; None if unknown."""
    needed = {"value": "metric", "cosine": "cosine_sd"}.get(measure)
    columns = [rows[0].keys() for _, rows in parts]
    if needed not in columns[0] or not all({"task", "count"} <= own for own in columns):
        return None
    variance = 0.0
    for task in {row["task"] for _, rows in parts for row in rows}:
        of_task = [(w, rows, [r for r in rows if r["task"] == task]) for w, rows in parts]
        of_task = [part for part in of_task if part[2]]
        if measure == "value" and all(row.get("correct") for *_, some in of_task for row in some):
            total = sum(
                weight * 100.0 / len(seeds) / len(seeds[row["seed"]]) * flags(row)
                for weight, rows, some in of_task
                for seeds in [by_value(rows, "seed", measure)]
                for row in some
            )
            variance += float(np.var(total, ddof=1)) / len(total)
        else:
            for weight, rows, some in of_task:
                variance += weight**2 * error(some, measure) / len(distinct(rows, "task")) ** 2
    return variance


def flags(row):
    packed = np.frombuffer(bytes.fromhex(row["correct"]), np.uint8)
    return np.unpackbits(packed)[: int(row["count"])]


def error(rows, measure) -> float:
    """Return the variance of one task's mean from its share of right rows alone."""
    count = int(rows[0]["count"])
    if measure == "cosine":
        return float(rows[0]["cosine_sd"]) ** 2 / count
    p = float(np.mean([float(row["value"]) for row in rows])) / 100
    if rows[0]["metric"] == "spearman":
        return 100**2 * (1 - p**2) ** 2 * (1 + p**2 / 2) / (count - 3)
    return 100**2 * p * (1 - p) / count
