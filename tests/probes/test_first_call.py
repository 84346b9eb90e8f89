"""Compilation and the like are counted once, in the first call, and in no other number."""
import time

from made_variants import compare, honest, made, of

from kvlab.attention.naive import Naive
from kvlab.probes import measure
from kvlab.probes.first_call import FirstCall
from kvlab.probes.kernel_error import KernelError


def test_planning_and_the_first_call_are_in_it():
    calls = []

    def compiles(honest_call, inputs):
        if not calls:
            time.sleep(0.3)
        calls.append(1)
        return honest_call()

    def plans(trial, inputs):
        time.sleep(0.3)
        return Naive().prepare(trial, inputs)
    rows = of(measure(compare(honest(), made("compiles", compiles), made("plans", prepare=plans)),
                      [FirstCall(), KernelError()]), "first_call_s")
    by = {r["variant"]: r for r in rows}
    assert by["honest"]["value"] > 0 and min(by["compiles"]["value"], by["plans"]["value"]) >= 0.3 and len(calls) == 2
    for row in rows:
        assert (row["kind"], row["unit"], row["n"], row["method"]) == ("measured", "s", 1, "timer:wall")
        assert "in this process" in row["note"]


def test_a_wrong_variant_has_no_first_call_and_without_kernel_error_there_is_none():
    wrong = made("wrong", lambda call, inputs: call() * 2)
    (row,) = of(measure(compare(wrong), [KernelError(), FirstCall()]), "first_call_s")
    assert row["status"] == "failed" and row["value"] is None
    (row,) = measure(compare(honest()), [FirstCall()])
    assert row["value"] is None and row["kind"] == "missing" and "gave no reading" in row["error"] + row["note"]
