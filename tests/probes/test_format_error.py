"""What a format costs is reported against the original K and V, and fails nobody."""
import pytest
from made_variants import compare, honest, made, of

from kvlab.attention import Comparison, trial
from kvlab.probes import measure
from kvlab.probes.format_error import FormatError
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

LONG = Workload.decode(AttentionShape(8, 2, 64), kv_len=512)


def errors(data):
    formats = ("fp32", "bf16", "int8/token", "int8/block16")
    rows = measure(Comparison(tuple(trial("naive", LONG, kv_format=f, data=data) for f in formats)),
                   [FormatError(), KernelError()])
    assert {r["status"] for r in rows} == {"ok"}
    return {r["kv_format"]: r["value"] for r in of(rows, "format_error")}


@pytest.mark.parametrize("data", ["gaussian", "outlier"])
def test_coarser_formats_cost_more(data):
    e = errors(data)
    assert e["fp32"] < 1e-5 < e["bf16"] < e["int8/token"] <= e["int8/block16"] < 0.2


def test_outliers_cost_int8_more_than_gaussian_data_do():
    assert errors("outlier")["int8/token"] > 2 * errors("gaussian")["int8/token"]


def test_the_reading_says_against_what_and_on_which_data():
    row, = of(measure(compare(honest(), data="outlier"), [KernelError(), FormatError()]), "format_error")
    assert row["note"] == "data: outlier" and "original K, V" in row["denominator"] and row["kind"] == "measured"


def test_a_large_format_error_gates_nothing(monkeypatch):
    class Late:
        name, metrics, needs, rotates = "late", {"late": "count"}, ("format_error",), False

        def why_not(self, trial):
            return None

        def measure(self, bench):
            from kvlab.record.reading import Reading
            for one in bench.trials:
                yield one, Reading("late", 1, "count", "measured")
    rows = measure(compare(honest(), kv_format="int8/block16", data="outlier"), [KernelError(), FormatError(), Late()])
    assert of(rows, "format_error")[0]["value"] > 1e-4 and of(rows, "late")[0]["value"] == 1


def test_a_variant_that_fails_only_here_is_failed_from_here_on():
    count = []

    def call(honest_call, inputs):
        count.append(1)
        return honest_call() if len(count) <= 2 else honest_call()[:0]               # kernel_error judges twice
    rows = measure(compare(made("second", call), honest()), [KernelError(), FormatError()])
    assert [r["status"] for r in of(rows, "kernel_error")] == ["ok", "ok"]
    assert sorted((r["status"], r["variant"]) for r in of(rows, "format_error")) == [
        ("failed", "second"), ("ok", "honest")]
