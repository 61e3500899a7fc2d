"""The page of the whole field: its order, its words and its marks, out of invented results with
known relations.
"""

import pytest

from featcal.merging.registry import method_named, method_names
from reproduction.report import field
from reproduction.report.field_facts import BEHIND, MARKS, NOTHING, REFERENCES, TANGENT, TRAINED
from reproduction.report.field_facts import METHODS as FACTS


def test_every_method_has_its_facts():
    assert set(FACTS) == {*method_names(), *BEHIND, *TRAINED, TANGENT}
    assert {mark for known in FACTS.values() for mark in known.marks} <= set(MARKS)
    assert len(REFERENCES) == 18 and {name for names in REFERENCES for name in names} <= set(FACTS)
    for name in method_names():
        needs = method_named(name).needs
        assert (FACTS[name].sees != NOTHING, "H" in FACTS[name].marks) == (
            "batches" in needs,
            "head" in needs,
        ), name


def test_mergers_stand_by_what_featcal_makes_of_them(ours):
    assert field.mergers(ours) == ["wudi_closed_form", "iso_c", "average"]
    assert field.average(ours, "iso_c", "svc").mean == pytest.approx(76.0)
    assert (
        field.seconds(ours, "iso_c", "choosing"),
        field.seconds(ours, "average", "choosing"),
    ) == (9.0, None)


def test_the_sentence_tells_what_the_rows_say(ours):
    told = field.sentence(ours, "images")
    assert "best merger as it is: WUDI-Merging, closed form, 83.0" in told
    gains = field.gains(field.means_of(ours))
    assert gains["featcal"] == ("3 of 3", "+2.0 to +20.0", "80.0 to 85.0")
    assert gains["surgery"][:2] == ("2 of 3", "-1.0 to +10.0")
    assert gains["svc"][:2] == ("1 of 3", "-2.0 to +1.0")
    assert gains["featcal_best"] == ("1 of 1", "+22.5 to +22.5", "82.5 to 82.5")
    assert (
        "(60.0): FeatCal 80.0 in 3 s, FeatCal extended 82.5, ProDistill 81.0 in 120 s, SurgeryV2 78.0"
        in told
    )
    assert "highest of all: WUDI-Merging, closed form with FeatCal, 85.0" in told


def test_the_control_with_other_experts_is_told_apart(ours):
    page = field.values("clip_b32", "mini").text
    assert (
        page.index("Simple Averaging") < page.index("tangent space")
        and "reach 88.0 on their own tasks" in page
    )
    assert "tangent" not in field.sentence(ours, "images")
    assert field.seconds(ours, "average", "prob_surgery") == 7.0


def test_only_a_scale_that_was_chosen_bears_the_mark_of_it(ours):
    assert (field.marks_of("iso_c", ours), field.marks_of("average", ours)) == ("<sup>V</sup>", "")
    assert "at an end of what was tried" in field.chosen("clip_b32", "mini").text
