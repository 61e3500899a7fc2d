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
NO_BLOCKS = ("embeddings", "features")
FOLDERS = {"references": "scores"} | dict.fromkeys(
    ("similarity", "alignment", "vectors", "projection"), "drift"
)
CALIBRATED = ("featcal", "surgery", "prob_surgery")
NOT_RUN = ("not run", math.nan, math.nan)
SHARED = dict(kind="above", file="scores", measure="value", direction="higher", times=1, by=0)
SHARED |= {"within": 0, "each": "", "beside": [], "where": {}, "over": None, "than": None}


def all_claims(path: Path) -> list[dict]:
    """Entries of claims.yaml with what their section says of all of them."""
    found = []
    for place, section in yaml.safe_load(path.read_text("utf-8")).items():
        shared = {"role": section["role"], "pool": str(section["pool"]), "place": place}
        found += [SHARED | shared | claim for claim in section["claims"]]
    for claim in found:
        for name in ("left", "right", "than"):
            if isinstance(claim.get(name), list):
                claim[name] = dict(zip(("upstream", "method"), claim[name], strict=True))
    return found


def read(path: Path) -> list[dict]:
    """The rows of a CSV file; none without the file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def same(cell, wanted) -> bool:
    try:
        return float(cell) == float(wanted)
    except (TypeError, ValueError):
        return str(cell) == str(wanted)


def distinct(rows, column) -> list:
    return list(dict.fromkeys(row[column] for row in rows))


class Results:
    """The result files of one folder, and verdicts on claims at one setting of FeatCal."""

    def __init__(self, folder: Path, setting: str):
        self.folder, self.setting = folder, setting
        self.rows = cache(self._rows)

    def _csv(self, key: str, file: str = "scores") -> list[dict]:
        path = self.folder / FOLDERS.get(file, file) / key / f"{file}.csv"
        found, right = read(path), read(path.with_name(f"{file}.correct.csv"))
        keys = [key for row in right[:1] for key in row if key != "correct"]
        known = {tuple(row[key] for key in keys): row["correct"] for row in right}
        return [row | {"correct": known.get(tuple(row[k] for k in keys), "")} for row in found]

    def _rows(self, role: str, pool: str, file: str) -> list[dict]:
        key = f"{role}-{pool}"
        if file.endswith(".run"):
            file = file.removesuffix(".run")
            path = self.folder / file / key / "run.json"
            cost = json.loads(path.read_text()).get("cost", []) if path.is_file() else []
            return [{k: "" if value is None else value for k, value in row.items()} for row in cost]
        found = self._csv(key, file)
        if file == "scores":
            return found + self._csv(key, "ablate")
        if file == "corrupted" and found:
            named = ("upstream", "method", "setting", "seed")
            models = {tuple(row[name] for name in named) for row in found}
            models |= {(model[0], "merged", "", "") for model in models}
            clean = [row for row in self._csv(key) if tuple(row[n] for n in named) in models]
            return [row | {"corruption": "clean"} for row in clean] + found
        return found

    def tasks(self, claim: dict) -> list[str]:
        return distinct(self.rows(claim["role"], claim["pool"], "scores"), "task")

    def chosen(self, claim: dict, one: dict) -> list[dict]:
        """The rows of one side."""
        own = dict(one)
        role, pool, file = (own.pop(name, claim[name]) for name in ("role", "pool", "file"))
        found, wanted = self.rows(role, str(pool), file), claim["where"] | own
        if wanted.get("task") == "shown":
            shown = self._csv(f"{role}-{pool}", "similarity")
            wanted["task"] = shown[0]["task"] if shown else None
        method = wanted.get("method")
        if wanted.get("setting") == "studied":
            main = "paper" if self.folder.name == "paper" or role == "vit_s" else "suite"
            wanted["setting"] = main if self.setting == main else "not run"
        elif "setting" not in wanted and method in CALIBRATED and found and "setting" in found[0]:
            run = {row["setting"] for row in found if row["method"] == method}
            free = method != "featcal" or claim["kind"] == "checked" or file.endswith(".run")
            order = (*([] if method == "featcal" else ["paper"]), self.setting, "suite")
            own = next((one for one in order if one in run), self.setting)
            wanted["setting"] = own if free else self.setting
        if "block" in wanted:
            of_blocks = [row for row in found if row["block"] not in NO_BLOCKS]
            if wanted["block"] == "last":
                wanted["block"] = max((row["block"] for row in of_blocks), default=None)
            elif wanted["block"] == "all":
                found = of_blocks
                del wanted["block"]
        found = [row for row in found if row.get(claim["measure"], "") not in ("", None)]
        return [r for r in found if all(k in r and same(r[k], v) for k, v in wanted.items())]

    # ---- one sum of means

    def terms(self, claim: dict) -> list[tuple[float, dict]]:
        left, right, kind = claim["left"], claim["right"], claim["kind"]

        def without(name, one, **more):
            return {key: value for key, value in one.items() if key != name} | more

        if kind == "gain":
            before = [without("setting", one, method="merged") for one in (left, right)]
            return [(1, left), (-1, before[0]), (-1, right), (1, before[1])]
        if kind == "closer":  # (left − than) − (right − left)
            return [(2, left), (-1, claim["than"]), (-1, right)]
        if kind == "falls":
            tops = [without("at", one, chosen=1) for one in (left, right)]
            return [(1, tops[0]), (-1, left), (-1, tops[1]), (1, right)]
        sign = -1 if claim["direction"] == "lower" else 1
        return [(sign * claim["times"], left), (-sign, right)]

    def compared(self, claim: dict) -> tuple[float, float, bool] | None:
        """Σ weight·mean, two standard errors, and whether these are known; None if not all was run."""
        parts, tasks, measure = [], {}, claim["measure"]
        for weight, one in self.terms(claim):
            rows = self.chosen(claim, one)
            if not rows:
                return None
            if "task" in rows[0] and "task" not in one:
                own = {row["task"] for row in rows}
                if tasks.setdefault((one.get("role"), one.get("pool")), own) != own:
                    return None
            parts.append((weight, rows))
        total = sum(weight * mean_of(rows, measure) for weight, rows in parts)
        images = image_part(parts, measure)
        spreads = [(weight, seed_part(rows, measure)) for weight, rows in parts]
        seeds = sum(weight**2 * (spread or 0) for weight, spread in spreads)
        once = any(len({row.get("seed", "") for row in rows} - {""}) == 1 for _, rows in parts)
        drawn = any(spread is not None for _, spread in spreads)
        known = images is not None or (drawn and not once)
        return total, 2 * math.sqrt((images or 0) + seeds + self.expert_part(claim, total)), known

    def expert_part(self, claim: dict, total: float) -> float:
        """The variance between trainings of the experts, of scores with three of them; else 0."""
        totals = [total]
        if claim["file"] == "scores":
            again = claim | {"file": "expert_seeds"}
            trained = self.rows(claim["role"], claim["pool"], "expert_seeds")
            for seed in distinct(trained, "expert_seed"):
                found = self.compared(again | {"where": claim["where"] | {"expert_seed": seed}})
                totals += [found[0]] if found else []
        return float(np.var(totals, ddof=1)) if len(totals) > 2 else 0.0

    # ---- verdicts

    def verdict(self, claim: dict) -> tuple[str, float, float]:
        """Word, margin and two standard errors."""
        several = self.several(claim)
        if several is not None:
            return worst([self.verdict(part) for part in several])
        kind, left = claim["kind"], claim["left"]
        if kind == "spreads":
            rows = self.chosen(claim, left)
            by_block = by_value(rows, "block", claim["measure"])
            sizes = [np.mean(values) for values in by_block.values()]
            seen = sum(size >= 0.1 * max(sizes) for size in sizes)
            return ("one run", seen - len(sizes) / 2, 0.0) if rows else NOT_RUN
        if kind in ("together", "apart"):
            return self.two_gains(claim)
        found = self.compared(claim)
        if found is None:
            return NOT_RUN
        value, noise, known = found
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

    def several(self, claim: dict) -> list[dict] | None:
        """A claim about several as claims about one; None where it is about one already."""
        if claim["over"]:
            return self.places(claim)
        if claim["kind"] in ("order", "weaker"):
            return self.of_two_mergers(claim)
        column = claim["each"]
        if not column:
            return None
        if column == "other_task":
            values = [task for task in self.tasks(claim) if task != claim["left"]["task"]]
            own = [{"right": claim["right"] | {"task": task}} for task in values]
        else:
            sides = [one for _, one in self.terms(claim) if column not in one]
            rows = [row for one in sides for row in self.chosen(claim, one)]
            values = self.tasks(claim) if column == "task" else distinct(rows, column)
            own = [{"where": claim["where"] | {column: value}} for value in values]
        kept = zip(values, own, strict=True)
        return [claim | {"each": ""} | one for v, one in kept if v not in claim["beside"]]

    def places(self, claim: dict) -> list[dict]:
        lists = claim["over"] if isinstance(claim["over"], dict) else {"place": claim["over"]}
        found = []
        for values in product(*lists.values()):
            pick = dict(zip(lists, values, strict=True))
            role, pool = pick.get("place", (claim["role"], claim["pool"]))
            both = {"upstream": pick["upstream"]} if "upstream" in pick else {}
            other = {"method": pick["against"]} if "against" in pick else {}
            one = claim | dict(over=None, role=role, pool=str(pool), left=claim["left"] | both)
            one["right"] = claim["right"] | both | other
            inner = self.several(one)
            found += [one] if inner is None else inner
        return found

    def of_two_mergers(self, claim: dict) -> list[dict]:
        def held(kind, method, left, right):
            left, right = ({"upstream": one, "method": method} for one in (left, right))
            return claim | {"kind": kind, "left": left, "right": right}

        found = []
        for one, other in combinations(MERGERS, 2):
            word, margin, _ = self.verdict(held("above", "merged", one, other))
            if word == "not run":
                return []
            better, worse = (one, other) if margin > 0 else (other, one)
            if word != "within noise" and claim["kind"] == "order":
                found.append(held("above", "featcal", better, worse))
            elif word != "within noise":
                found.append(held("gain", "featcal", worse, better))
        return found

    def two_gains(self, claim: dict) -> tuple[str, float, float]:
        gains = []
        for task in self.tasks(claim):
            own = claim | {"where": {"task": task}, "kind": "above", "measure": "cosine"}
            found = {name: self.chosen(own, own[name]) for name in ("left", "right")}
            if all(found.values()):
                seeded = {n: own[n] | {"seed": rows[0]["seed"]} for n, rows in found.items()}
                scores = self.compared(own | seeded | {"file": "scores", "measure": "value"})
                gains += [[*self.compared(own)[:2], *scores[:2]]] if scores else []
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
    """The part that decides: the clearest failure, else what is least clear to hold."""
    words = {word for word, _, _ in parts}
    if not parts or "not run" in words:
        return NOT_RUN
    word = next(w for w in ("does not hold", "within noise", "one run", "holds") if w in words)
    sign = 1 if word == "does not hold" else -1
    return min((p for p in parts if p[0] == word), key=lambda part: part[1] + sign * part[2])


def by_value(rows, column, measure) -> dict:
    found = {}
    for row in rows:
        found.setdefault(row.get(column, ""), []).append(float(row[measure]))
    return found


def mean_of(rows, measure):
    return float(np.mean([np.mean(values) for values in by_value(rows, "seed", measure).values()]))


def seed_part(rows, measure):
    means = [np.mean(values) for values in by_value(rows, "seed", measure).values()]
    return float(np.var(means, ddof=1)) / len(means) if len(means) > 1 else None


def image_part(parts, measure):
    """What the choice of test rows adds to the variance; None where nothing is known of it."""
    needed = {"value": "metric", "cosine": "cosine_sd"}.get(measure)
    if needed not in parts[0][1][0] or any(
        not {"task", "count"} <= rows[0].keys() for _, rows in parts
    ):
        return None
    variance = 0.0
    for task in {row["task"] for _, rows in parts for row in rows}:
        own = [
            (weight, rows, [row for row in rows if row["task"] == task]) for weight, rows in parts
        ]
        own = [part for part in own if part[2]]
        if measure == "value" and all(row.get("correct") for *_, some in own for row in some):
            total = sum(
                weight * 100.0 / len(seeds) / len(seeds[row["seed"]]) * flags(row)
                for weight, rows, some in own
                for seeds in [by_value(rows, "seed", measure)]
                for row in some
            )
            variance += float(np.var(total, ddof=1)) / len(total)
        else:
            for weight, rows, some in own:
                variance += weight**2 * error(some, measure) / len(distinct(rows, "task")) ** 2
    return variance


def flags(row):
    packed = np.frombuffer(bytes.fromhex(row["correct"]), np.uint8)
    return np.unpackbits(packed)[: int(row["count"])]


def error(rows, measure) -> float:
    """The variance of one task's mean, of which only the share of right rows is known."""
    count = int(rows[0]["count"])
    if measure == "cosine":
        return float(rows[0]["cosine_sd"]) ** 2 / count
    p = float(np.mean([float(row["value"]) for row in rows])) / 100
    if rows[0]["metric"] == "spearman":
        return 100**2 * (1 - p**2) ** 2 * (1 + p**2 / 2) / (count - 3)
    return 100**2 * p * (1 - p) / count
