"""Tables, figures and the one-liners of pages, on invented results and on none."""

import xml.etree.ElementTree as ElementTree

import pytest
from synthetic_results import TASKS

from featcal.errors import MissingPath
from reproduction.report.evidence import Evidence, project_root, select
from reproduction.report.html import SIGNS, arrow, compact, plain


def test_signs_can_be_read_without_colour():
    assert [plain(arrow(change)) for change in (4.25, -0.81, 0.04)] == ["↑4.2", "↓0.8", "="]
    assert len(set(SIGNS.values())) == len(SIGNS)


def test_settings_are_read_without_the_notation_of_programs():
    values = (0.05, 256, 1e-6, 2.5e-5, 1e10)
    assert [compact(value) for value in values] == ["0.05", "256", "10⁻⁶", "2.5·10⁻⁵", "10¹⁰"]


def test_the_project_is_found_by_climbing_and_otherwise_named(tmp_path):
    (tmp_path / "params.yaml").write_text("suite: mini\n")
    deep = tmp_path / "book" / "pages"
    deep.mkdir(parents=True)
    assert project_root(deep) == tmp_path.resolve()
    with pytest.raises(MissingPath, match="params.yaml"):
        project_root(tmp_path.parent)


@pytest.mark.parametrize(
    ("kind", "file", "wanted"),
    [
        ("drift", "drift/clip_b32-8/drift.csv", {"method": "merged"}),
        ("scores", "scores/clip_b32-8/scores.csv", {"method": "featcal", "setting": "suite"}),
        ("scores", "ablate/clip_b32-8/ablate.csv", {"method": "anchor"}),
        ("corrupted", "corrupted/clip_b32-8/corrupted.csv", {"corruption": "motion_blur"}),
        ("corrupted", "scores/clip_b32-8/scores.csv", {"corruption": "clean", "method": "featcal"}),
    ],
)
def test_rows_that_were_picked_before_are_picked_anew_from_a_changed_file(
    kind, file, wanted, results
):
    def found():
        return select(Evidence("mini", "clip_b32", "8").table(kind), wanted)

    before, path = found(), results / file
    assert len(before) and found().equals(before)
    head, *lines = path.read_text().splitlines(keepends=True)
    said = wanted["method"] if "method" in wanted else wanted["corruption"]
    path.write_text("".join([head, *(line for line in lines if f",{said}," not in line)]))
    assert found().empty
    path.write_text("".join([head, *lines]))
    assert found().equals(before)


def test_controls_and_correctness_that_come_and_go_are_seen(results):
    def found(column):
        return set(Evidence("mini", "clip_b32", "8").table("scores")[column])

    ablate, correct = (results / f"{kind}/clip_b32-8/{kind}" for kind in ("ablate", "scores"))
    assert "anchor" in found("method")
    ablate.with_suffix(".csv").unlink()
    assert "anchor" not in found("method") and "" not in found("correct")
    correct.with_suffix(".correct.csv").unlink()
    assert "correct" not in Evidence("mini", "clip_b32", "8").table("scores")
