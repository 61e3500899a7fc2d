"""Stage `prepare` keeps finished experts when it is interrupted."""

import pytest
from smoke_graph import lay_out, working_in

from reproduction.prepare import experts as making
from reproduction.stages import prepare
from reproduction.stages.command import run_stage


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Make a smoke project with its images."""
    work = tmp_path_factory.mktemp("prepare")
    lay_out(work)
    with working_in(work):
        run_stage("prepare_data", None)
    return work


def expert_bytes(work) -> dict[str, bytes]:
    """Return the weights of every expert by task."""
    experts = work / "outputs/smoke/prepared/clip_b32-8/experts"
    return {path.parent.name: path.read_bytes() for path in experts.glob("*/model.safetensors")}


def test_an_interrupted_prepare_goes_on_with_the_experts_that_are_missing(project, monkeypatch):
    whole, made = making.write_expert, []

    def stopped_at_the_third(job, *rest):
        made.append(job.task)
        if len(made) == 3:
            raise KeyboardInterrupt
        whole(job, *rest)

    monkeypatch.setattr(prepare.experts, "write_expert", stopped_at_the_third)
    with working_in(project), pytest.raises(KeyboardInterrupt):
        run_stage("prepare", "clip_b32-8")
    assert not (project / "outputs/smoke/prepared/clip_b32-8").exists()
    first, made[:] = made[:2], []

    def noted(job, *rest):
        made.append(job.task)
        whole(job, *rest)

    monkeypatch.setattr(prepare.experts, "write_expert", noted)
    with working_in(project):
        run_stage("prepare", "clip_b32-8")
    assert len(made) == 1 and made[0] not in first
    resumed = expert_bytes(project)
    with working_in(project):
        run_stage("prepare", "clip_b32-8")
    assert len(made) == 4, "a finished stage keeps nothing that a new run would take over"
    assert expert_bytes(project) == resumed and len(resumed) == 3


def test_a_larger_pool_makes_what_no_smaller_one_has_made_nested_or_not(project, monkeypatch):
    made = []
    monkeypatch.setattr(prepare.experts, "write_expert", lambda job, *rest: made.append(job.task))
    monkeypatch.setattr(prepare.experts, "write_base_and_heads", write_nothing)
    suite, pool = project / "suites/smoke.yaml", "14: [mnist, svhn, dtd, eurosat]"
    nested = suite.read_text()
    expected = {"mnist, svhn, dtd, eurosat": ["eurosat"]}
    for tasks, wanted in (expected | {"eurosat, mnist, gtsrb": ["eurosat", "gtsrb"]}).items():
        larger = f"14: [{tasks}]\n  20: [mnist, svhn, dtd, eurosat, gtsrb]"
        suite.write_text(nested.replace(pool, larger))
        made[:] = []
        with working_in(project):
            run_stage("prepare", "clip_b32-14")
        assert made == wanted
    suite.write_text(nested)


def write_nothing(*given):
    """Write an empty base and empty heads."""
    (given[-1] / "base").mkdir(parents=True)
    (given[-1] / "heads.safetensors").touch()


def test_other_settings_take_over_no_expert_of_an_interrupted_run(project, monkeypatch):
    made = []

    def stopped_at_once(job, *rest):
        made.append(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare.experts, "write_expert", stopped_at_once)
    with working_in(project), pytest.raises(KeyboardInterrupt):
        run_stage("prepare", "clip_b32-8")
    suite = project / "suites/smoke.yaml"
    suite.write_text(suite.read_text().replace("steps: 6", "steps: 7"))
    with working_in(project), pytest.raises(KeyboardInterrupt):
        run_stage("prepare", "clip_b32-8")
    assert [job.recipe.steps for job in made] == [6, 7]
    assert len(list((project / ".featcal/smoke").iterdir())) == 2
