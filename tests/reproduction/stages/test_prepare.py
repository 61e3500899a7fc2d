"""Stage `prepare` keeps finished experts when it is interrupted."""

import json
from contextlib import chdir

import pytest
from smoke_graph import lay_out

from reproduction.stages import prepare
from reproduction.stages.command import run_stage

KEY = "clip_b32-8"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Make a smoke project with its images."""
    work = tmp_path_factory.mktemp("prepare")
    lay_out(work)
    with chdir(work):
        run_stage("prepare_data", None)
    return work


@pytest.fixture
def jobs(project, monkeypatch):
    """Return a function that runs the stage up to expert `stop` and returns the experts begun."""
    write_expert = prepare.write_expert

    def run(key=KEY, stop=None, train=True):
        begun = []

        def noted(job, *rest):
            begun.append(job)
            if len(begun) == stop:
                raise KeyboardInterrupt
            if train:
                write_expert(job, *rest)

        monkeypatch.setattr(prepare, "write_expert", noted)
        with chdir(project):
            if stop is None:
                run_stage("prepare", key)
            else:
                with pytest.raises(KeyboardInterrupt):
                    run_stage("prepare", key)
        return begun

    return run


def expert_bytes(work) -> dict[str, bytes]:
    """Return the weights of every expert by task."""
    experts = work / f"outputs/smoke/prepared/{KEY}/experts"
    return {path.parent.name: path.read_bytes() for path in experts.glob("*/model.safetensors")}


def test_an_interrupted_prepare_goes_on_with_the_experts_that_are_missing(project, jobs):
    first = {job.task for job in jobs(stop=3)[:2]}
    assert not (project / f"outputs/smoke/prepared/{KEY}").exists()
    (missing,) = jobs()
    resumed = expert_bytes(project)
    assert missing.task not in first and resumed.keys() == first | {missing.task}
    # a finished stage keeps nothing that a new run would take over
    assert len(jobs()) == 3 and expert_bytes(project) == resumed


def test_a_larger_pool_makes_what_no_smaller_one_has_made_nested_or_not(project, jobs, monkeypatch):
    monkeypatch.setattr(prepare, "write_base_and_heads", write_nothing)
    suite, pool = project / "suites/smoke.yaml", "14: [mnist, svhn, dtd, eurosat]"
    nested = suite.read_text()
    expected = {"mnist, svhn, dtd, eurosat": ["eurosat"]}
    for tasks, trained in (expected | {"eurosat, mnist, gtsrb": ["eurosat", "gtsrb"]}).items():
        larger = f"14: [{tasks}]\n  20: [mnist, svhn, dtd, eurosat, gtsrb]"
        suite.write_text(nested.replace(pool, larger))
        assert [job.task for job in jobs("clip_b32-14", train=False)] == trained
    suite.write_text(nested)


def write_nothing(*arguments):
    (arguments[-1] / "base").mkdir(parents=True)
    (arguments[-1] / "heads.safetensors").touch()


def test_other_settings_and_pins_take_over_no_expert_of_an_interrupted_run(project, jobs):
    begun, suite = jobs(stop=1), project / "suites/smoke.yaml"
    text, pins = suite.read_text(), suite.with_name("smoke.pins.json")
    suite.write_text(text.replace("steps: 6", "steps: 7"))
    assert [job.recipe.steps for job in begun + jobs(stop=1)] == [6, 7]
    assert len(list((project / ".featcal/smoke").iterdir())) == 2
    suite.write_text(text.replace("models/clip_b32}", "models/clip_b32, experts: 'of/{task}'}"))
    for commit in "aab":
        commits = {f"of/{task}": commit * 40 for task in ("mnist", "svhn", "dtd")}
        pins.write_text(json.dumps({"models": commits}))
        jobs(stop=1)
    assert len(list((project / ".featcal/smoke").iterdir())) == 4
