"""The code against facts.yaml: every repository, split, column, class name and prompt stands there with its source."""

from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from featcal.data.processors import CLIP_MEAN, CLIP_STD
from featcal.merging.settings import settings_of
from reproduction.data.domains import DOMAINS, DRESS
from reproduction.data.glue import GLUE, HUB_ID
from reproduction.data.prompts import load_prompts
from reproduction.data.public import PUBLIC
from reproduction.data.registry import POOLS, TASKS
from reproduction.experiments.params import Experiments, load_experiments
from reproduction.language.public_tests import PAPER
from reproduction.suites.suite import Suite, load_suite

ROOT = Path(__file__).parents[1]


@cache
def facts() -> dict:
    return yaml.safe_load((ROOT / "tests/facts.yaml").read_text("utf-8"))


@cache
def suite() -> Suite:
    return load_suite(ROOT, "paper")


@pytest.fixture(scope="module")
def experiments() -> Experiments:
    """What params.yaml runs of the paper's own models in the suite `paper`."""
    found, ours = load_experiments(ROOT / "params.yaml", "paper"), suite().sentences.roles
    kept = {n: {k: r for k, r in getattr(found, n).items() if r.role not in ours} for n in ("merge", "calibrate", "adapt")}
    return replace(found, **kept)


def digest(lines) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_image_tasks_are_read_from_the_repositories_splits_and_columns_of_the_facts():
    told = facts()["images"]["tasks"]
    assert list(told) == list(TASKS) == list(POOLS[20]), "in the order of the paper's tables"
    for key, task in TASKS.items():
        fact = told[key]
        assert (task.hub_id, task.config) == (fact["repository"], fact.get("config")), key
        assert ([task.train_split], [task.test_split]) == (list(fact["train"]), list(fact["test"])), key
        own = {"image": "image", "label": "label"} | {ours: theirs for theirs, ours in task.columns.items()}
        assert own == fact["columns"], key


@pytest.mark.parametrize("task", TASKS)
def test_class_names_and_templates_are_those_of_the_facts_to_the_letter(task):
    fact, prompts = facts()["images"]["tasks"][task], load_prompts(task)
    assert list(prompts.templates) == fact["templates"]
    assert (len(prompts.classes), digest(prompts.classes)) == (fact["classes"], fact["class_names"])
    assert digest(prompts.templates) == digest(fact["templates"]) == fact["template_sum"]


def test_pools_and_models_of_the_suite_are_those_of_the_facts(experiments):
    told = facts()
    assert suite().pools == POOLS
    found = {key: {"clip": role.clip, "experts": role.experts} for key, role in suite().roles.items()}
    multitask = {run.role: run.model for run in experiments.multitask.values() if run}
    known = {key: fact for key, fact in told["image_models"].items() if isinstance(fact, dict)}
    assert {key: entry | {"multitask": multitask[key]} for key, entry in found.items()} == known
    assert (suite().heads, suite().data.source) == ("prompts", "hub")
    texts = {key: {"model": r.model, "experts": r.experts, "dtype": r.dtype} for key, r in suite().language.roles.items()}
    assert texts == {key: fact for key, fact in told["text_models"].items() if isinstance(fact, dict)}


def test_pictures_are_normalised_as_clip_s_are():
    told = facts()["preprocessing"]
    assert (list(CLIP_MEAN), list(CLIP_STD)) == (told["mean"], told["std"])


def test_glue_is_read_and_asked_as_the_facts_say():
    told = facts()["glue"]
    assert told["repository"] == HUB_ID
    assert list(told["tasks"]) == list(GLUE) == list(suite().language.pools["glue"])
    for key, task in GLUE.items():
        fact = told["tasks"][key]
        assert (task.prompt, list(task.answers), task.metric) == (fact["prompt"], fact["answers"], fact["metric"]), key
        assert ([task.test_split], list(task.columns)) == (list(fact["test"]), fact["columns"]), key


def test_domains_and_their_dress_are_those_of_the_facts():
    told = facts()["domains"]
    assert told["dress"] == DRESS
    found = {k: {"repository": d.hub_id, "prompt": d.prompt, "completion": d.completion} for k, d in DOMAINS.items()}
    assert found == {key: fact for key, fact in told.items() if isinstance(fact, dict)}
    assert set(found) == set(suite().language.pools["mergebench"])


def test_public_tests_are_those_of_the_facts_and_their_variants_share_their_data():
    told = {key: fact for key, fact in facts()["tests"].items() if isinstance(fact, dict)}
    assert list(told) == list(PAPER) == list(suite().language.tests) == list(suite().language.tests.values())
    for key, fact in told.items():
        test = PUBLIC[key]
        assert (test.data, test.config, test.split) == (fact["repository"], fact.get("config"), fact["split"]), key
        found = {"task": test.task, "metric": test.metric, "filter": test.filter, "file": test.file}
        assert found == {name: fact[name] for name in found}, key
    known = {(fact["repository"], fact.get("config"), fact["split"]) for fact in told.values()}
    assert {(test.data, test.config, test.split) for test in PUBLIC.values()} == known


def test_mergers_of_the_suite_have_the_settings_of_the_facts(experiments):
    told = facts()["settings"]
    seen = set()
    for key, run in experiments.merge.items():
        fact = told.get(run.method)
        if run.options is None or fact is None or run.upstream == "wudi_closed_form":
            continue
        values = vars(settings_of(run.method, run.options, key))
        if run.method == "task_arithmetic":
            assert values["scale"] == fact[run.pool]["scale"], key
        else:
            assert {name: values[name] for name in fact["values"]} == fact["values"], key
        draw = {name: getattr(run.draw, name) for name in fact.get("draw", {})}
        assert draw == fact.get("draw", {}), key
        seen.add((run.method, run.pool))
    assert {("task_arithmetic", pool) for pool in (8, 14, 20, "glue", "mergebench")} <= seen
    assert {method for method, _ in seen} >= {"adamerging", "wudi", "ties", "regmean", "regmean_plus_plus"}


@pytest.mark.parametrize("method", ["surgery", "prob_surgery"])
def test_adapters_of_the_suite_have_the_settings_of_the_facts(experiments, method):
    fact, seen = facts()["settings"][method], 0
    for key, run in experiments.adapt.items():
        if run.method == method and run.settings and isinstance(run.pool, int):
            own = run.settings["paper"]
            assert {name: getattr(own.training, name) for name in fact["values"]} == fact["values"], key
            assert {name: getattr(own.draw, name) for name in fact["draw"]} == fact["draw"], key
            seen += 1
    assert seen == 6 * 5, "four mergers and WUDI in closed form, of two sizes and three pools"


def test_featcal_of_the_suite_has_the_settings_of_the_facts(experiments):
    told, seen = facts()["settings"]["featcal"], set()
    for key, run in experiments.calibrate.items():
        if run.calibration is not None:
            fact = told[run.role]
            assert {name: getattr(run.calibration, name) for name in fact} == fact, key
            assert (run.setting, run.samples) == ("paper", told["samples"]), key
            seen.add(run.role)
    assert seen == {role for role in told if isinstance(told[role], dict)}


def walked(node, path=()):
    """Every mapping of the facts with where it stands."""
    if isinstance(node, dict):
        yield path, node
        for key, inner in node.items():
            yield from walked(inner, (*path, key))


def test_every_fact_has_a_source_that_is_named_or_an_address():
    sources = set(facts()["sources"])
    for section in ("images", "image_models", "preprocessing", "glue", "text_models", "domains", "tests"):
        assert facts()[section].get("source"), section
    for fact in facts()["settings"].values():
        inner = [fact] if "source" in fact else [one for one in fact.values() if isinstance(one, dict)]
        assert inner and all("source" in one or "read" in one for one in inner)
    for path, node in walked(facts()):
        for name in (n for n in node if str(n).endswith("source")):
            word = str(node[name]).replace(";", " ").split()[0]
            assert word in sources or word.startswith("https://") or word == "paper", (path, name)
