"""Every stored log is in the rows with its verdict, factors are reckoned from the log, and findings turn with them."""
import json
from collections import Counter

import made_serving as made
import pytest

from kvlab.catalog import rows as rows_of
from kvlab.record.asked import asked
from kvlab.record.reading import schema, table
from kvlab.serving.server_logs import check
from kvlab.studies import capacity
from kvlab.studies._capacity_findings import VERDICTS, findings


@pytest.fixture(scope="module")
def rows():
    return table([row for case in capacity.cases("smoke") for row in capacity.run(case)])


def found(*rows):
    return {one.name: one for one in findings(table(rows))}


def test_every_size_is_the_same_two_cases():
    ids = {size: [case.comparison_id for case in capacity.cases(size)] for size in capacity.SIZES}
    assert ids["smoke"] == ids["small"] == ids["large"] and len(set(ids["smoke"])) == 2


@pytest.mark.parametrize("wrong", [dict(variants=("sdpa",)), dict(model="meta-llama/Llama-3.1-8B")])
def test_what_it_cannot_take_is_refused(wrong):
    with pytest.raises(ValueError, match="kvlab plan MODEL"):
        next(capacity.cases("smoke", **wrong))


def test_rows_agree_with_the_checker_line_by_line(rows):
    schema().validate(rows)
    lines = rows_of("server_logs.csv")
    logs = asked(rows, "log")
    assert len(logs) == len(lines)
    assert Counter(logs["verdict"]) == Counter(one["verdict"] for one in check(lines))
    for row, line in zip(logs.to_dict("records"), check(lines)):
        if line["predicted"] is not None and line["logged"]:
            assert row["value"] == pytest.approx(line["predicted"] / line["logged"]) and row["kind"] == "modelled"
        else:
            assert row["kind"] == "missing" and row["note"]
    agreed = logs[(logs["verdict"] == "agreed") & (logs["kind"] != "missing")]
    assert agreed["value"].between(0.98, 1.02).all()


def test_a_factor_is_the_logs_own_arithmetic(rows):
    budget = asked(rows, "budget")
    logged = budget[(budget["metric"] == "pool_gib") & (budget["kind"] == "quoted")].set_index("id")
    for row in budget[budget["metric"] == "safety_factor"].to_dict("records"):
        pool = logged.loc[row["id"], "value"]
        if pool > 0:
            assert row["value"] == pytest.approx((row["vram_gib"] - row["weights_gib"]) / pool)
            assert row["kind"] == "quoted"
        else:
            assert row["kind"] == "missing" and "refused to start" in row["note"]
    modelled = budget[budget["kind"] == "modelled"]
    assert (modelled["low"] <= modelled["value"]).all() and (modelled["value"] <= modelled["high"]).all()


def test_rows_name_their_log_and_no_machine(rows):
    assert (rows["source"] != "").all() and (rows["device"] == "none").all()
    assert all(json.loads(text)["question"] in ("log", "budget") for text in rows["case"])
    assert set(rows["metric"]) == set(capacity.METRICS)


def test_the_four_counts():
    said = found(made.log("a", "agreed", 1.0), made.log("b", "explained", 1.1), made.log("c", "unexplained", 2.0),
                 made.log("d", "unmatched", None))["logs"]
    assert "1 agreed, 1 explained, 1 unexplained, 1 unmatched: of the 3" in said.sentence
    assert said.value == pytest.approx(1 / 3)
    nothing = found(made.log("d", "unmatched", None))["logs"]
    assert nothing.value == 0 and "of the 0" in nothing.sentence
    assert VERDICTS == ("agreed", "explained", "unexplained", "unmatched")


def test_the_budgets_error_is_of_logs_that_nothing_was_fitted_to():
    one, two, fitted = (made.server("one", 5.0, 5.24, 1.8), made.server("two", 6.0, 6.72, 1.4, inside=False),
                        made.server("three", 7.0, 9.0, 1.4, fitted=True))
    said = found(*one, *two, *fitted)["budget"]
    assert "On the 2 logs" in said.sentence
    assert "off by 2.0% of the VRAM (median) and 3.0% at most; 1 lie" in said.sentence
    assert "budget" not in found(*fitted), "nothing is left to judge it by"


@pytest.mark.parametrize("factors, verdict", [
    ((1.8, 1.4, 2.5), "1 of 3 servers, and 0 could not start at all: refuted"), ((1.35, 1.4, 2.5), "2 of 3 servers"),
    ((1.4, None), "1 of 1 servers, and 1")])
def test_the_rule_turns_with_the_factors(factors, verdict):
    said = found(*(row for i, factor in enumerate(factors) for row in made.server(str(i), 5.0, 5.0, factor)))
    assert verdict in said["safety factor"].sentence
    assert ("refuted" in said["safety factor"].sentence) == ("refuted" in verdict)
    assert "safety factor" not in found(*made.server("a", -1.0, -1.0, None))


def test_a_table_without_the_study_has_no_finding():
    (none,) = findings(table([]))
    assert none.name == "none"
