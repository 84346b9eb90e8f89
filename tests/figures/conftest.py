"""A small synthetic run of memory_wall, whose every number is known beforehand."""
import dataclasses
import json

import pytest

from kvlab.record.reading import Reading, failed, missing, table

RUN = "20261129T181422Z-8a68e5"
READ, MATMUL = 2e10, 1e11                                       # ridge 5 flop/B


def row(reading, **context):
    return {"run_id": RUN, "study": "memory_wall", "device": "cpu", "dtype": "fp32", "kv_format": "fp32",
            "head_dim": 128, "num_q_heads": 32, "replica": 0, **context, **dataclasses.asdict(reading)}


def decode(variant, kv_len, ratio, bandwidth, *, batch=1, replica=0, time_kind="measured", run_id=RUN):
    """One decode case that streams its ideal bytes at `bandwidth` (B/s), and its comparison's ceilings."""
    ideal, intensity = 2 * kv_len * (32 // ratio) * 128 * 4 * batch, ratio / 2
    seconds = ideal / bandwidth
    share = intensity * ideal / seconds / MATMUL
    comparison = f"d{kv_len}-{ratio}-{batch}"
    context = dict(run_id=run_id, phase="decode", variant=variant, kv_len=kv_len, q_len=1, batch_size=batch,
                   group_ratio=ratio, num_kv_heads=32 // ratio, replica=replica, comparison_id=comparison,
                   case_id=f"{comparison}-{variant}-{replica}")
    about = dict(hardware="A CPU, 2 logical cores")
    model = dict(kind="modelled", method="formula:x", **about)
    readings = [
        Reading("latency_s", seconds, "s", time_kind, low=0.99 * seconds, high=1.02 * seconds, n=20 + ratio, **about),
        Reading("ideal_bytes", ideal, "B", **model), Reading("intensity", intensity, "flop/B", **model),
        Reading("ridge", MATMUL / READ, "flop/B", **model),
        Reading("attainable_flops_share", min(1, intensity / (MATMUL / READ)), "ratio", **model),
        Reading("flops_share", share, "ratio", low=share / 1.02, high=share / 0.99, n=20 + ratio, **model)]
    whole = dict(context, variant="", case_id=comparison)
    return [row(r, **context) for r in readings] + [
        row(Reading("read_ceiling", READ, "B/s", "measured", n=9, scope="comparison", **about), **whole)]


def prefill(variant, n, value, resolution=2**20):
    reading = Reading("peak_extra_bytes", value, "B", "measured", n=1, low=max(0, value - resolution),
                      high=value + resolution, hardware="A CPU, 2 logical cores")
    return row(reading, phase="prefill", variant=variant, kv_len=n, q_len=n, batch_size=1, group_ratio=4, num_q_heads=4,
               comparison_id=f"p{n}", case_id=f"p{n}-{variant}")


def run_rows():
    rows = [r for kv_len in (1024, 2048, 4096) for v, b in (("sdpa", 8e9), ("naive_repeat", 6e8))
            for r in decode(v, kv_len, 8, b)]
    rows += [r for ratio in (1, 32) for r in decode("sdpa", 2048, ratio, 8e9)]
    rows += decode("sdpa", 2048, 8, 8.08e9, replica=1) + decode("sdpa", 1024, 8, 8e9, batch=4)
    for n in (512, 1024, 2048):
        rows += [prefill("naive", n, 16.0 * n * n, 0), prefill("flash", n, 2048.0 * n, 2**18)]
    case = dict(phase="decode", kv_len=1024, batch_size=1, comparison_id="d1024-8-1", case_id="bad")
    rows.append(row(failed("latency_s", "s", "RuntimeError: it broke"), variant="Mine", **case))
    rows.append(row(missing("power", "W", "LibraryNotFound: no driver"), variant="sdpa", **case))
    known = dict(hardware="none", method="formula:x", scope="comparison")
    rows += [row(Reading(name, value, unit, "modelled", **known), comparison_id="m", case_id="m", kv_len=2048,
                 model="Qwen/Qwen2-72B-Instruct", case=json.dumps({}))
             for name, value, unit in (("weight_bytes", 145_412_407_296, "B"), ("kv_bytes", 671_088_640, "B"),
                                       ("crossover_tokens", 443_763, "count"))]
    return rows


@pytest.fixture(scope="session")
def run():
    return table(run_rows())


@pytest.fixture(scope="session")
def build():
    """The builders of single cases, for tests that need another run than the shared one."""
    return dict(decode=decode, prefill=prefill, row=row, table=table, rows=run_rows)
