"""Hand-computed numbers for one decode call under injected ceilings and time."""
import pytest
from made_variants import compare, honest, made, of

from kvlab.attention import Cost
from kvlab.probes import measure, roofline
from kvlab.probes._base import Bench
from kvlab.probes.roofline import Roofline
from kvlab.record.reading import Reading
from kvlab.shapes import AttentionShape, Workload

# 4 query heads on 2 KV heads of 16, 64 tokens, fp32: q and output 4·16·4 = 256 B each, K/V 64·2·2·16·4 = 16,384 B
DECODE = Workload.decode(AttentionShape(4, 2, 16), kv_len=64)
IDEAL, FLOPS = 16_384 + 256 + 256, 2 * 4 * (16 + 16) * 64


@pytest.fixture(autouse=True)
def tiny_cache(monkeypatch):
    monkeypatch.setattr(roofline, "room_on", lambda device: (2**30, 1024))


def readings(*, ceilings=True, time=True, variant=None, ends=True, ceiling_ends=True):
    comparison = compare(variant or honest(), workload=DECODE)
    bench = Bench(comparison, list(comparison.trials), {})
    if ceilings:
        read, matmul = (dict(low=0.8e6, high=1.25e6), dict(low=3.2e6, high=5e6)) if ceiling_ends else ({}, {})
        bench.readings += [(None, Reading("read_ceiling", 1e6, "B/s", "measured", **read)),
                           (None, Reading("matmul_ceiling", 4e6, "flop/s", "measured", **matmul))]
    if time:
        interval = dict(low=0.016, high=0.025) if ends else {}
        bench.readings.append((comparison.trials[0], Reading("latency_s", 0.02, "s", "measured", n=30,
                                                             cache_state="cold (unverified)", **interval)))
    return {reading.metric: reading for _, reading in Roofline().measure(bench)}


def test_what_the_call_needs():
    r = readings()
    assert r["ideal_bytes"].value == IDEAL == 16_896 and r["useful_flops"].value == FLOPS == 16_384
    assert r["intensity"].value == pytest.approx(16_384 / 16_896)
    assert r["read_amplification"].value == pytest.approx(1) and r["hbm_read_bytes"].value == 16_640
    assert r["hbm_write_bytes"].value == 256 and r["hbm_bytes"].value == 16_896


def test_what_the_ceilings_allow():
    r = readings()
    assert r["ridge"].value == 4.0
    assert r["roof_latency"].value == pytest.approx(16_896 / 1e6)                   # memory is the lower roof
    assert r["attainable_flops_share"].value == pytest.approx(16_384 / 16_896 / 4)


def test_what_was_reached_with_the_interval_of_the_time():
    r = readings()
    assert r["effective_bandwidth"].value == pytest.approx(16_896 / 0.02)
    assert (r["effective_bandwidth"].low, r["effective_bandwidth"].high) == (
        pytest.approx(16_896 / 0.025), pytest.approx(16_896 / 0.016))
    assert r["bandwidth_share"].value == pytest.approx(0.8448) and r["bandwidth_share"].denominator == "read_ceiling"
    assert r["useful_flops_rate"].value == pytest.approx(16_384 / 0.02)
    assert r["flops_share"].value == pytest.approx(0.2048) and r["flops_share"].denominator == "matmul_ceiling"
    assert r["flops_share"].n == 30 and r["flops_share"].cache_state == "cold (unverified)"


def test_a_share_is_as_uncertain_as_the_time_and_its_ceiling_together():
    r = readings()
    assert (r["bandwidth_share"].low, r["bandwidth_share"].high) == (
        pytest.approx(16_896 / 0.025 / 1.25e6), pytest.approx(16_896 / 0.016 / 0.8e6))
    assert (r["flops_share"].low, r["flops_share"].high) == (
        pytest.approx(16_384 / 0.025 / 5e6), pytest.approx(16_384 / 0.016 / 3.2e6))
    assert (r["useful_flops_rate"].low, r["useful_flops_rate"].high) == (
        pytest.approx(16_384 / 0.025), pytest.approx(16_384 / 0.016))


@pytest.mark.parametrize("without, certain", [("ends", ()), ("ceiling_ends", ("effective_bandwidth",
                                                                             "useful_flops_rate"))])
def test_no_interval_where_the_time_or_the_ceiling_has_none(without, certain):
    r = readings(**{without: False})
    for name in ("effective_bandwidth", "bandwidth_share", "useful_flops_rate", "flops_share"):
        assert r[name].value > 0 and (r[name].low is not None) == (r[name].high is not None) == (name in certain)


def test_modelled_traffic_says_what_it_takes_the_cache_to_hold():
    r = readings()
    for name in ("hbm_read_bytes", "hbm_write_bytes", "hbm_bytes"):
        assert "behind a cache of 1,024 bytes that forgets what was used longest ago" in r[name].note
    assert r["ideal_bytes"].note == ""


def test_a_compute_bound_call_has_the_other_roof():
    comparison = compare(honest(), workload=Workload.prefill(AttentionShape(4, 2, 16), q_len=64))
    bench = Bench(comparison, list(comparison.trials), {})
    bench.readings += [(None, Reading("read_ceiling", 1e6, "B/s", "measured")),
                       (None, Reading("matmul_ceiling", 1e6, "flop/s", "measured"))]
    r = {reading.metric: reading for _, reading in Roofline().measure(bench)}
    flops = 2 * 4 * 32 * 64 * 65 // 2
    assert r["roof_latency"].value == pytest.approx(flops / 1e6) and r["attainable_flops_share"].value == 1.0


def test_every_number_is_modelled_and_has_the_declared_unit():
    r = readings()
    assert {m: x.unit for m, x in r.items()} == Roofline.metrics and {x.kind for x in r.values()} == {"modelled"}
    assert all(x.method.startswith("formula:") for x in r.values())


def test_without_ceilings_their_metrics_are_missing_with_the_next_step():
    r = readings(ceilings=False)
    assert set(r) == set(Roofline.metrics) and r["ideal_bytes"].value == IDEAL
    absent = {m for m, x in r.items() if x.kind == "missing"}
    assert absent == {"roof_latency", "ridge", "attainable_flops_share", "effective_bandwidth", "bandwidth_share",
                      "useful_flops_rate", "flops_share"} and "add the probe ceilings" in r["ridge"].note


def test_without_a_time_only_what_needs_it_is_missing():
    r = readings(time=False)
    absent = {m for m, x in r.items() if x.kind == "missing"}
    assert absent == {"effective_bandwidth", "bandwidth_share", "useful_flops_rate", "flops_share"}
    assert "add the probe timer" in r["flops_share"].note and r["ridge"].value == 4.0


@pytest.mark.parametrize("cache, there", [(16_640 // 2, True), (16_640 // 2 + 1, False)])
def test_no_amplification_where_the_cache_could_hold_half_of_the_reads(monkeypatch, cache, there):
    monkeypatch.setattr(roofline, "room_on", lambda device: (2**30, cache))
    reading = readings()["read_amplification"]
    assert (reading.kind == "modelled") == there
    assert there or "below twice the last-level cache" in reading.note


def test_the_variants_own_cost_is_what_amplification_is_about():
    greedy = honest("greedy")
    greedy.cost = lambda self, trial, cache_bytes=0: Cost(3 * 16_640, 1000, 77)
    r = readings(variant=greedy)
    assert r["read_amplification"].value == pytest.approx(3) and r["executed_flops"].value == 77
    assert r["hbm_bytes"].value == 3 * 16_640 + 1000 and r["ideal_bytes"].value == IDEAL


def test_a_cost_model_that_raises_fails_its_own_rows_only():
    broken = made("broken", lambda call, inputs: call())
    broken.cost = lambda self, trial, cache_bytes=0: 1 / 0
    rows = measure(compare(broken, honest(), workload=DECODE), [Roofline()])
    assert {r["status"] for r in rows if r["variant"] == "broken"} == {"failed"}
    assert of(rows, "ideal_bytes", "honest")[0]["value"] == IDEAL
