"""Rows by the question of their case: fields become columns, other cases are left alone."""
import json
from dataclasses import asdict

import pandas as pd

from kvlab.record.asked import asked, with_fields
from kvlab.record.reading import Reading, table


def rows(*cases):
    return table([{**asdict(Reading("hits", i, "count", "simulated")), "case_id": str(i), "case": case}
                  for i, case in enumerate(cases)])


def test_the_rows_of_a_question_get_its_fields_as_columns():
    found = asked(rows(json.dumps(dict(question="a", rate=2.0, label="x")), json.dumps(dict(question="b", rate=3.0)),
                       json.dumps(dict(question="a", rate=4.0, label="y"))), "a")
    assert list(found["value"]) == [0.0, 2.0] and list(found["rate"]) == [2.0, 4.0] and list(found["label"]) == ["x",
                                                                                                                "y"]


def test_cases_that_are_no_json_or_ask_nothing_are_left_out():
    found = asked(rows("", "an old case", json.dumps(dict(variant="sdpa")), json.dumps(dict(question="a"))), "a")
    assert list(found["case_id"]) == ["3"]


def test_a_field_that_the_table_has_already_does_not_replace_it():
    found = asked(rows(json.dumps(dict(question="a", block_size=99, value="no", more=1))), "a")
    assert pd.isna(found["block_size"].iloc[0]) and found["value"].iloc[0] == 0.0 and found["more"].iloc[0] == 1


def test_no_such_question_is_an_empty_table():
    assert asked(rows(json.dumps(dict(question="a"))), "b").empty and asked(table([]), "a").empty


def test_fields_of_rows_that_ask_differently_stand_side_by_side_whatever_the_index():
    some = rows(json.dumps(dict(question="a", x=1)), "an old case", json.dumps(dict(question="b", y=2)))
    again = pd.concat([some, some])                          # every index twice
    found = with_fields(again)
    assert len(found) == 6 and list(found["case_id"]) == ["0", "1", "2"] * 2
    assert found["x"].tolist()[::3] == [1, 1] and found["y"].isna().tolist() == [True, True, False] * 2
    assert set(some) < set(found) and len(with_fields(some.iloc[:0])) == 0
