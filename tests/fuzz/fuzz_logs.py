"""Traces, logs and metrics as targets: what profilers, engines and load generators write."""
from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzz_targets import TESTS, Target, shown, some


def _trace(path: Path) -> None:
    from kvlab.record.trace import read_trace
    from kvlab.record.trace_summary import summary
    from kvlab.show import print_trace
    opened = read_trace(path)
    found = summary(opened)
    shown(opened.problems, print_trace, path, opened.about, found, 15)


def _traces() -> list[bytes]:
    def x(name, ts, dur, cat="cpu_op", tid=1, **args):
        return dict(ph="X", name=name, ts=ts, dur=dur, cat=cat, pid=1, tid=tid, args=args)
    shapes = {"Input Dims": [[2, 3], [3, 4], []], "Input type": ["float", "float", ""],
              "Input Strides": [[3, 1], [4, 1], []]}
    torch = [x("kvlab:call 0", 0, 100, "user_annotation"), x("aten::mm", 1, 50, **shapes), x("aten::copy_", 5, 10),
             x("cudaLaunchKernel", 20, 5, "cuda_runtime", correlation=7),
             x("gemm", 30, 20, "kernel", 3, correlation=7, **{"est. achieved occupancy %": 40, "External id": 2}),
             x("Memcpy", 60, 2, "gpu_memcpy", 3, correlation=8), dict(ph="B", name="b", ts=1)]
    simulated = [x("prefill", 0, 10, ""), x("decode", 10, 5, ""), dict(ph="b", name="queued", id="r1", ts=0, pid=0),
                 dict(ph="e", name="queued", id="r1", ts=9, pid=0), dict(ph="C", name="state", ts=1, args={"n": 2})]
    return [json.dumps(one).encode() for one in (
        {"traceEvents": torch, "kvlab": {"variant": "sdpa", "trial": {"kv_format": "bf16"}}}, torch,
        {"traceEvents": simulated, "otherData": {"source": "kvlab.serving.gantt"}})]


def _packed(chance: Random, body: bytes) -> bytes:
    if chance.random() < 0.02:                                          # one that unpacks to very much more
        body = chance.choice((b" ", b"[", b"{},", b'{"a":', b"0")) * chance.choice((2**16, 2**18)) + body
    return gzip.compress(body, chance.choice((1, 6)), mtime=0)


def _unpacked(data: bytes) -> int:
    found = 0
    with contextlib.suppress(zlib.error):               # what comes before the damage is read too
        found = len(zlib.decompressobj(31).decompress(data, 2**28))
    return max(len(data), found, 64 * 2**10)


def _requests(path: Path) -> None:
    from kvlab.serving.traces import describe, read_trace
    first = None
    for more in (dict(bad="skip", sort=True), dict(bad="refuse")):      # leniently first: the strict one ends sooner
        try:
            describe(read_trace(path, **more))
        except ValueError as error:
            first = first or error
    if first:
        raise first


def _request_traces() -> list[bytes]:
    from serving.test_traces import GOOD
    return [text.encode() for text in GOOD.values()]


def _packed_if(chance: Random, body: bytes) -> bytes:
    return _packed(chance, body) if chance.random() < 0.2 else body


def _log_table(path: Path) -> None:
    from kvlab.serving.server_logs import check, summary
    from kvlab.show_serving import print_log_rows
    rows = check(path)
    shown(rows[:1], print_log_rows, rows[:20], summary(rows))


def _log_tables() -> list[bytes]:
    lines = (TESTS.parent / "data" / "server_logs.csv").read_bytes().splitlines()
    return [b"\n".join((lines[0], *lines[at:at + 3])) + b"\n" for at in range(1, len(lines) - 3, 9)]


def _start(path: Path) -> None:
    from kvlab.serving._log_plan import logged_pool
    from kvlab.serving.server_logs import check
    from kvlab.serving.startup_log import from_log
    from kvlab.show_serving import print_startup_log
    row = from_log(path)
    (judged,) = check([row])
    pool = logged_pool(row)
    if pool.settings:
        pool.command()
    shown(row, print_startup_log, row, judged)


def _starts() -> list[bytes]:
    from serving import test_startup_log as logs
    return [text.encode() for text in (logs.V0, logs.V1, logs.CPU, logs.SGLANG, logs.LLAMA_OLD, logs.LLAMA,
                                       logs.LLAMA_SWA, logs.TRTLLM, logs.TURBOMIND)]


def _prometheus(path: Path) -> None:
    from kvlab.serving.metrics import read
    from kvlab.serving.scrape import parse
    found = read(parse(path.read_bytes().decode("utf-8", "replace")), 0.0)
    for measure in (*found.gauges, *found.counters):
        found.value(measure)


def _expositions() -> list[bytes]:
    return [path.read_bytes() for path in sorted((TESTS / "serving" / "expositions").glob("*.txt"))]


def _address(path: Path) -> None:
    from kvlab.serving.scrape import Scrape
    shown = Scrape.of(path.read_bytes().decode("utf-8", "surrogateescape")).shown
    assert "?" not in shown and "@" not in shown.split("/")[2], f"shows what may be secret: {shown}"


def _addresses() -> list[bytes]:
    return [b"localhost:8000", b"http://user:secret@host:80/metrics?a=b#c", b"https://[::1]:443/metrics", b"http://1.2.3"]


def _bench(path: Path) -> None:
    from kvlab.serving.bench_files import is_bench, read_bench
    is_bench(path)
    found = read_bench(path)
    if some(found.cases):
        found.table()
        found.samples()


def _samples(*endings: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        found = [path.read_bytes() for ending in endings
                 for path in sorted((TESTS / "serving" / "bench_samples").rglob(f"*{ending}"))]
        return [one if len(one) < 12_000 else _shorter(one) for one in found]
    return seeds


def _shorter(report: bytes) -> bytes:
    """guidellm's report with one benchmark and two of its requests."""
    data = json.loads(report)
    data["benchmarks"] = data["benchmarks"][:1]
    requests = data["benchmarks"][0].get("requests")
    for name, rows in requests.items() if isinstance(requests, dict) else ():
        requests[name] = rows[:2] if isinstance(rows, list) else rows
    return json.dumps(data).encode()


def _simulated_rows() -> list[bytes]:
    from kvlab.serving._bench_simulated import COLUMNS
    rows = "".join(f"r{n},{n}.5,100,{n},0.1,0.2,0.03,1.5,0,0,\n" for n in range(1, 9))
    return [*_samples(".csv")(), f"{','.join(COLUMNS)}\n{rows}r9,9,1,1,,,,,0,0,too long\n".encode()]


LOG_TARGETS = (
    Target("trace", "trace.json", _trace, _traces),
    Target("trace_gz", "trace.json.gz", _trace, _traces, _packed, size=_unpacked),
    Target("requests", "requests", _requests, _request_traces, _packed_if, size=_unpacked),
    # what no rule explains is tried with some 130 settings, 31 µs each
    Target("log_table", "logs.csv", _log_table, _log_tables, line_s=0.005),
    Target("startup_log", "server.log", _start, _starts, line_s=5e-5),      # 8 to 15 µs for an empty one
    Target("prometheus", "metrics.txt", _prometheus, _expositions), Target("address", "url", _address, _addresses),
    Target("bench_json", "a.json", _bench, _samples(".json")),
    Target("bench_jsonl", "profile_export.jsonl", _bench, _samples(".jsonl")),
    Target("bench_csv", "a.csv", _bench, _simulated_rows))
