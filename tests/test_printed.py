"""What the paper's own tables say of its claims, as printed and with what cannot be right corrected."""

from featcal.report.claims import claims
from featcal.report.errata import corrected_table
from featcal.report.extended import COLUMNS
from featcal.report.margins import MARGINS
from featcal.report.printed import in_doubt, paper_margin, paper_says
from featcal.report.values import AVERAGE, PRINTED, paper_table


def claim(name):
    return next(c for c in claims() if c.id == name)


def test_what_fails_in_the_papers_own_numbers_fails_only_as_printed():
    """Two claims about every task meet rows with shifted cells; nothing else is contradicted, and nothing once corrected."""
    read = [c for c in claims() if not c.paper and (c.table or c.over or c.kind in MARGINS)]
    assert {c.id for c in read if paper_margin(c) <= 0} == {"t8_ta_every_task", "t11_ta_every_task"}
    assert not [c.id for c in read if paper_margin(c, corrected_table) <= 0]


def test_the_paper_is_quoted_as_printed_and_corrected_where_a_claim_depends_on_it():
    assert paper_says(claim("t8_ta_every_task")) == "13 of 14 tasks as printed, 14 of 14 tasks corrected"
    assert paper_says(claim("t10_average_upstream")) == "87.3 against 61.1 as printed, 73.2 against 61.1 corrected"
    assert paper_says(claim("t1_gain_ta_wudi")) == "18.0 against 4.3 points gained"
    assert paper_says(claim("t2_ta_surgery")) == "5 of 5 columns"


def test_a_claim_is_in_doubt_only_where_nothing_better_can_be_told():
    assert "FeatCal run" in in_doubt(claim("t11_ta_prob_surgery"))[0]
    assert in_doubt(claim("t10_average_upstream")) == [], "its average can be corrected"
    assert in_doubt(claim("t7_wudi_upstream")) == []


def test_the_columns_of_table_2_repeat_the_averages_of_the_large_tables():
    small = paper_table("table02").set_index(["upstream", "method", "task"])["value"]
    for column, place in COLUMNS.items():
        large = paper_table(PRINTED[place])
        large = large[large["task"] == AVERAGE].set_index(["upstream", "method"])["value"]
        for upstream, method, task in small.index:
            assert task != column or small[upstream, method, task] == large[upstream, method], (column, upstream, method)
