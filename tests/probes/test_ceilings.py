"""Ceilings are measured beside each comparison, on buffers of its size."""
import pytest
import torch
from made_variants import SMALL, compare, honest, made

from kvlab.attention import trial
from kvlab.probes import ceilings, measure
from kvlab.probes._base import Bench
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload


def test_three_ceilings_about_the_whole_comparison():
    comparison = compare(honest(), made("wrong", lambda call, inputs: call() * 2))
    rows = [r for r in measure(comparison, [KernelError(), Ceilings(samples=6)]) if r["metric"] in Ceilings.metrics]
    assert {r["metric"]: r["unit"] for r in rows} == Ceilings.metrics and len(rows) == 3
    for row in rows:
        assert row["scope"] == "comparison" and row["case_id"] == comparison.comparison_id and row["variant"] == ""
        assert 0 < row["low"] <= row["value"] <= row["high"] and row["n"] == 6 and row["hardware"]
    nbytes = sum(comparison.cache_bytes().values())
    assert f"{nbytes:,} bytes" in rows[0]["note"] and rows[0]["note"].startswith("torch ")
    assert "fp32 " in rows[2]["note"] and "matmul" in rows[2]["note"]


def test_rates_are_amounts_over_median_seconds(monkeypatch):
    monkeypatch.setattr(ceilings, "_stopwatch", lambda device, threads: lambda work: work() is None or 0.05)
    comparison = compare(honest())
    bench = Bench(comparison, list(comparison.trials), comparison.inputs(1))
    read, copy, matmul = [reading for _, reading in Ceilings(samples=3).measure(bench)]
    nbytes = sum(comparison.cache_bytes().values())
    assert read.value == pytest.approx(nbytes / 0.05) and copy.value == pytest.approx(2 * nbytes / 0.05)
    assert matmul.value == pytest.approx(2 * 1024**3 / 0.05) and "1024 x 1024" in matmul.note


def test_the_square_product_is_halved_while_it_takes_long():
    sizes = []

    def seconds(work):
        sizes.append(work().shape[0])
        return sizes[-1] / 3000                                      # 1024: 0.34 s, 512: 0.17 s, 256: 0.085 s
    reading = Ceilings(samples=2)._matmul(torch, trial("naive", SMALL, dtype="bf16"), seconds, 1024)
    assert sizes == [1024, 512, 256, 256, 256] and reading.note == "bf16 256 x 256 matmul"
    assert reading.value == pytest.approx(2 * 256**3 / (256 / 3000))


def test_the_square_product_never_falls_below_128():
    sizes = []
    Ceilings(samples=1)._matmul(torch, trial("naive", SMALL), lambda work: sizes.append(work().shape[0]) or 9.0, 256)
    assert sizes == [256, 128, 128]


def test_buffers_stay_small_for_a_huge_cache(monkeypatch):
    monkeypatch.setattr(ceilings, "LARGEST", 4096)
    monkeypatch.setattr(ceilings, "room_on", lambda device: (2**30, 3 * 4096))
    comparison = compare(honest())
    bench = Bench(comparison, list(comparison.trials), comparison.inputs(1))
    read, *_ = [reading for _, reading in Ceilings(samples=1).measure(bench)]
    assert read.note.endswith("over 16 buffers of 4,096 bytes")


def test_the_tiniest_cache_has_a_buffer_too():
    workload = Workload.decode(AttentionShape(1, 1, 1, 1, v_in_k=True), kv_len=1)
    comparison = compare(honest(), workload=workload, dtype="bf16")
    read, *_ = [reading for _, reading in Ceilings(samples=1).measure(
        Bench(comparison, list(comparison.trials), comparison.inputs(1)))]
    assert "buffers of 4 bytes" in read.note and read.value > 0


def test_a_gpu_is_waited_for_before_and_after(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    assert ceilings._stopwatch("cuda", 1)(lambda: order.append("work")) >= 0
    assert order == ["wait", "work", "wait"]
