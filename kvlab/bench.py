"""The benchmark gates of kvlab itself: `make bench` prints them and writes profiles/bench/bench.json.

A ratio gate is the median of paired, interleaved ratios with its 95 % interval: met if the whole interval clears the
goal, missed if the whole interval fails it, else ambiguous and run again. Times of whole commands likewise.
"""
from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvlab import bench_kernels, bench_models, bench_serving, bench_simulator, bench_store
from kvlab.bench_inputs import events, many_readings, readings
from kvlab.probes._clock import paired_ratio, summarise
from kvlab.record.environment import cpu_name, load_average
from kvlab.units import MiB

PAIRS = 16
TRIES = 3


@dataclass(frozen=True)
class Gate:
    """One gate: what is measured, in which unit, and the goal: "<= x", ">= x", "within x y" or "includes x"."""
    name: str
    unit: str
    goal: str
    measure: Callable[[], tuple[float, float, float]]

    def met(self, low: float, high: float) -> bool | None:
        """True, False, or None where the interval straddles the goal."""
        rule, *bounds = self.goal.split()
        least, most = float(bounds[0]), float(bounds[-1])
        if rule == "includes":                       # one interval in twenty misses the truth: near by, look again
            return True if low <= least <= high else None if 0.98 * least <= high and low <= 1.02 * least else False
        if rule == "<=":
            least = float("-inf")
        elif rule == ">=":
            most = float("inf")
        return True if least <= low and high <= most else False if high < least or low > most else None


def gates() -> list[Gate]:
    """All gates, in the order they are run."""
    return [
        Gate("kvlab --help", "s", "<= 1.0", lambda: _command("--help")),
        Gate("kvlab size", "s", "<= 1.0", lambda: _command("size", "Qwen/Qwen2-72B", "--kv-len", "4096", "--json")),
        Gate("torch or matplotlib loaded by import kvlab", "count", "<= 0", _heavy_imports),
        Gate("timer ÷ bare loop, spinning call", "ratio", "within 0.98 1.02", _timer_against_bare_loop),
        Gate("A/A pair, sdpa ÷ sdpa", "ratio", "includes 1", lambda: _decode_ratio("sdpa", "sdpa")),
        Gate("naive_repeat ÷ naive, ratio 8, kv_len 8192", "ratio", ">= 12",
             lambda: _decode_ratio("naive_repeat", "naive")),
        Gate("sdpa_enable_gqa ÷ sdpa, ratio 8, kv_len 8192", "ratio", ">= 3",
             lambda: _decode_ratio("sdpa_enable_gqa", "sdpa")),
        Gate("sdpa_enable_gqa ÷ sdpa, ratio 8, kv_len 32768", "ratio", ">= 3",
             lambda: _decode_ratio("sdpa_enable_gqa", "sdpa", kv_len=32768)),
        Gate("paged_gather ÷ sdpa, block 16, random order, kv_len 8192", "ratio", "<= 6",
             lambda: _decode_ratio("paged_gather", "sdpa")),
        *(Gate(name, "ratio", goal, measure) for name, goal, measure in bench_kernels.gates()),
        Gate("journal 10,000 readings", "s", "<= 1.0", lambda: _journal(write=True)),
        Gate("read back 10,000 readings", "s", "<= 1.0", lambda: _journal(write=False)),
        Gate("figure from stored rows, whole command", "s", "<= 3.0", _figure),
        Gate("size of a local config.json, whole command", "s", "<= 1.0", _size_of_config),
        Gate("doctor, whole command", "s", "<= 8.0", lambda: _command("doctor", "--json", runs=5)),
        Gate("trace of 50 MB, read and summarised", "s", "<= 2.0", _trace),
        Gate("scoring ÷ transformers, SmolLM2, 512 tokens", "ratio", ">= 0.9",
             bench_models.scoring_against_transformers),
        Gate("paged ÷ contiguous decode, SmolLM2, kv_len 4096", "ratio", ">= 0.8",
             bench_models.paged_against_contiguous),
        Gate("peak RSS of scoring 512 tokens − weights", "B", f"<= {500 * MiB}", bench_models.memory_of_scoring),
        *(Gate(name, "ratio", goal, measure) for name, goal, measure in bench_serving.gates()),
        *(Gate(*gate) for gate in bench_store.gates()),
        *(Gate(*gate) for gate in bench_simulator.gates()),
        *(Gate(f"export 1,000,000 readings to {to}, whole command", unit, goal, partial(_export, to, unit))
          for to in ("csv", "parquet") for unit, goal in (("s", "<= 10.0"), ("B", "<= 1e9"))),
    ]


def _interval(seconds: list[float]) -> tuple[float, float, float]:
    s = summarise(seconds)
    return s.median, s.low, s.high


def _command(*arguments: str, runs: int = 7) -> tuple[float, float, float]:
    """Wall seconds of a whole command, the interpreter's start included."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "kvlab", *arguments], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return _interval(seconds)


def _heavy_imports() -> tuple[float, float, float]:
    code = "import sys, kvlab; print(sum(m in sys.modules for m in ('torch', 'matplotlib')))"
    found = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    return found, found, found


def _bench_of(*names: str, kv_len: int = 8192):
    """(sampler, one runner per name) of the gates' decode call: 64 query heads on 8 KV heads, as in Qwen2-72B."""
    from kvlab.attention import Comparison, trial
    from kvlab.probes._base import Bench, rotation
    from kvlab.probes.timer import CpuSampler, Runner
    from kvlab.record.environment import free_memory, last_level_cache
    from kvlab.shapes import AttentionShape, Workload
    workload = Workload.decode(AttentionShape(64, 8, 128), kv_len=kv_len)
    comparison = Comparison(tuple(trial(name, workload, replica=i) for i, name in enumerate(names)))
    nbytes = comparison.cache_bytes().values()
    copies = rotation(min(nbytes), sum(nbytes), last_level_cache()[0], free_memory())
    bench = Bench(comparison, list(comparison.trials), comparison.inputs(copies))
    runners = [Runner(t, t.prepare(bench.inputs_of(t)), 0.0) for t in comparison.trials]
    return CpuSampler(bench), runners


def _decode_ratio(a: str, b: str, kv_len: int = 8192) -> tuple[float, float, float]:
    """Time of variant a over time of variant b, call by call in turn, on cold inputs, one thread."""
    import torch
    torch.set_num_threads(1)
    with torch.no_grad():
        sampler, (first, second) = _bench_of(a, b, kv_len=kv_len)
        for runner in (first, second):
            sampler.sample(runner, 2)
        pairs = []
        for i in range(PAIRS):                               # each goes first every other time
            order = (first, second) if i % 2 else (second, first)
            took = {id(runner): sampler.sample(runner, 1) for runner in order}
            pairs.append((took[id(first)], took[id(second)]))
    return paired_ratio([p[0] for p in pairs], [p[1] for p in pairs])


def _timer_against_bare_loop() -> tuple[float, float, float]:
    """The timer's seconds for a call of fixed work (≥ 1 ms) over those of a bare loop around the same call."""
    import hashlib

    import torch
    output, work = torch.zeros(1), bytes(4 * MiB)

    def spin():                                              # in C: where Python's numbers come to lie costs it ± 3 %
        hashlib.sha256(work).digest()
        return output
    torch.set_num_threads(1)
    with torch.no_grad():
        sampler, (runner,) = _bench_of("sdpa")
        runner.calls = [spin]
        now, pairs = sampler.clock.now, []

        def bare() -> float:
            began = now()
            spin()
            return now() - began
        for i in range(10 * PAIRS):                          # each goes first every other time
            pairs.append((sampler.sample(runner, 1), bare()) if i % 2 else (bare(), sampler.sample(runner, 1))[::-1])
    return paired_ratio([p[0] for p in pairs], [p[1] for p in pairs])


def _journal(write: bool) -> tuple[float, float, float]:
    from kvlab.record.environment import Manifest
    from kvlab.record.store import RunStore
    seconds = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            store = RunStore.create(folder, "bench", Manifest(study="bench", environment={}))
            rows = readings(100)
            began = time.perf_counter()
            for i in range(100):
                store.append(f"{i:012x}", rows)
            middle = time.perf_counter()
            RunStore.open(store.path).table()
            seconds.append(middle - began if write else time.perf_counter() - middle)
    return _interval(seconds)


def _figure() -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        return _command("figure", "memory_wall", "--out", folder, runs=5)


def _size_of_config() -> tuple[float, float, float]:
    facts = dict(model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
                 num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(facts), encoding="utf-8")
        return _command("size", str(path), "--kv-len", "4096", "--json")


def _trace() -> tuple[float, float, float]:
    """Seconds to read and summarise a trace of 50 MB, compact as kvlab stores it."""
    from kvlab.record.trace import read_trace
    from kvlab.record.trace_summary import summary
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with open(path, "w", encoding="utf-8") as file:
            file.write('{"traceEvents":[')
            for event in events():
                file.write(json.dumps(event, separators=(",", ":")))
                if file.tell() >= 50_000_000:
                    break
                file.write(",")
            file.write("]}")
        for _ in range(5):
            began = time.perf_counter()
            summary(read_trace(path))
            seconds.append(time.perf_counter() - began)
    return _interval(seconds)


# a child's peak counts what its parent held when it was started, so a small process starts the command and waits for it
_WATCH = """import os, subprocess, sys, time
began = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(child.pid, 0)
print(status, time.perf_counter() - began, used.ru_maxrss * (1 if sys.platform == 'darwin' else 1024))"""


def _export(to: str, unit: str) -> tuple[float, float, float]:
    """Wall seconds of the command, or the most memory that it held."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        many = Path(folder) / "many.parquet"
        many_readings(many)
        command = [sys.executable, "-m", "kvlab", "export", str(many), "--format", to, "--out",
                   str(Path(folder) / f"out.{to}")]
        for _ in range(3):
            told = subprocess.run([sys.executable, "-c", _WATCH, *command], check=True, capture_output=True,
                                  text=True)
            status, seconds, peak = told.stdout.split()
            if status != "0":
                raise RuntimeError(f"the command ended with status {status}: {told.stderr.strip()[-200:]}")
            found.append(float(seconds if unit == "s" else peak))
    return _interval(found)


def _measured(gate: Gate) -> dict:
    """The gate's row, measured again while it is ambiguous.

    What fails is missed, with the reason; what needs a package that is not installed is "not run", and met is null.
    """
    row = dict(name=gate.name, value=None, low=None, high=None, goal=gate.goal, met=False, unit=gate.unit, error="")
    for _ in range(TRIES):
        try:
            value, low, high = gate.measure()
        except bench_models.NotRun as why:
            row.update(value=None, low=None, high=None, met=None, error=f"not run: {why}")
            break
        except Exception as error:
            row.update(error=f"{type(error).__name__}: {error}")
            break
        row.update(value=value, low=low, high=high, met=gate.met(low, high))
        if row["met"] is not None:
            break
    return {**row, "load": load_average()}


def _verdict(row: dict) -> str:
    if row["met"] is None and row["error"]:
        return row["error"]                                  # not run: why
    verdict = {True: "met", False: "MISSED", None: "ambiguous"}[row["met"]]
    return f"{verdict}: {row['error']}" if row["error"] else verdict


def main() -> int:
    """Run every gate; exit 0 only if all are met that could run here."""
    from rich.console import Console
    from rich.table import Table
    table = Table("gate", "value", "95 % interval", "goal", "verdict", "load", box=None, pad_edge=False)
    found = []
    for gate in gates():
        row = _measured(gate)
        found.append(row)
        shown = ("", "") if row["value"] is None else (f"{row['value']:.3g} {gate.unit}",
                                                        f"{row['low']:.3g} … {row['high']:.3g}")
        table.add_row(gate.name, *shown, gate.goal, _verdict(row),
                      "" if row["load"] is None else f"{row['load']:.1f}")
    Console(width=140).print(table)
    path = Path("profiles/bench/bench.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{cpu_name()}; written to {path}")
    return 0 if all(row["met"] or _verdict(row).startswith("not run") for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
