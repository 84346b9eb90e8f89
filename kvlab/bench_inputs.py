"""What the benchmark gates work on, made up as the real thing would look: readings, a trace's events, a large table."""
from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path


def readings(count: int) -> list[dict]:
    """Readings with about as many columns filled as a real run has."""
    from kvlab.record.reading import Reading
    reading = asdict(Reading("latency_s", 1.5e-3, "s", "measured", method="timer:thread_cpu", source="timer", n=30,
                             low=1.4e-3, high=1.6e-3, rel_std=0.02, cache_state="cold (unverified)", window_s=0.5))
    context = dict(variant="sdpa", device="cpu", dtype="fp32", kv_format="fp32", format_path="native", phase="decode",
                   page_order="in_order", batch_size=1, q_len=1, kv_len=8192, num_q_heads=32, num_kv_heads=4,
                   group_ratio=8, head_dim=128, data="gaussian", threads=1, seed=0, replica=0, case="{}" * 300)
    return [{**context, **reading, "case_id": f"{i:012x}"} for i in range(count)]


OPERATORS = (("matmul", "bmm", "qk"), ("mul", "mul_", "s-"), ("masked_fill", "where", "sm-"),
              ("softmax", "_softmax", "s--"), ("add_", "add_", "ss-"), ("clone", "copy_", "k-"))


def events() -> Iterator[dict]:
    """Without end, what torch writes of naive attention on a GPU: nested operators, launches, kernels, arrows.

    Shapes, strides, times and numbers vary as they would from call to call.
    """
    chance, number, now = random.Random(0), itertools.count(1), 5_132_936_168_478.0

    def event(cat, name, start, took, pid=4242, tid=4242, **args):
        return dict(ph="X", cat=cat, name=name, pid=pid, tid=tid, ts=round(start, 3), dur=round(took, 3), args=args)

    def operator(name, start, took, dims):
        i = next(number)
        return event("cpu_op", f"aten::{name}", start, took, **{
            "External id": i, "Sequence number": i // 3, "Fwd thread id": 0, "Record function id": 0,
            "Concrete Inputs": ["" if dim else str(i % 7) for dim in dims],
            "Input type": ["float" if dim else "Scalar" for dim in dims],
            "Input Strides": [[math.prod(dim[i + 1:]) for i in range(len(dim))] for dim in dims],
            "Input Dims": dims, "Ev Idx": i})
    while True:
        heads, kv_len, began = chance.choice([8, 16, 32, 64]), chance.randrange(64, 2**17), now
        dims_of = {"q": [heads, 1, 128], "k": [heads, 128, kv_len], "s": [heads, 1, kv_len], "m": [1, kv_len], "-": []}
        for name, inner, letters in OPERATORS:
            took, dims, link = chance.uniform(30, 90), [dims_of[letter] for letter in letters], next(number)
            for part, start, share in ((name, 0, 1), ("expand", 0.01, 0.05), ("reshape", 0.1, 0.2), ("view", 0.11, 0.1),
                                       (inner, 0.3, 0.6)):
                yield operator(part, now + start * took, share * took, dims)
            yield event("cuda_runtime", "cudaLaunchKernel", now + took / 2, 4.5, cbid=211, correlation=link)
            yield dict(ph="s", id=link, pid=4242, tid=4242, ts=now + took / 2, cat="ac2g", name="ac2g")
            yield event("kernel", f"void at::native::{inner}_kernel<float, {chance.randrange(40)}>(int, float*)",
                        now + took, took / 3, 0, 7, device=0, context=1, stream=7, correlation=link,
                        grid=[kv_len // 128, heads, 1], block=[128, 1, 1], **{"registers per thread": 40})
            now += took + chance.uniform(1, 9)
        yield event("user_annotation", "kvlab:call naive", began, now - began)


def many_readings(path: Path) -> None:
    """1,000,000 readings as Parquet: every number its own, twenty readings of a case, as many cases."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet

    from kvlab.record.export import write_parquet
    from kvlab.record.reading import table
    from kvlab.record.seal import sealed_parquet
    part, chance = table(readings(10_000)), np.random.default_rng(0)
    write_parquet(part, path)
    plan = pyarrow.parquet.read_schema(path)
    with open(path, "w+b") as file, sealed_parquet(file, plan) as writer:
        for i in range(100):
            part["value"] = chance.lognormal(-6, 2, len(part))
            part["low"] = part["value"] * chance.uniform(0.9, 1, len(part))
            part["high"] = part["value"] * chance.uniform(1, 1.1, len(part))
            part["rel_std"], part["window_s"] = chance.random(len(part)), chance.random(len(part))
            cases = [f"{i:04x}{n:08x}" for n in range(len(part) // 20)]
            part["case_id"] = np.repeat(cases, 20)
            part["case"] = np.repeat([json.dumps({"case": case, "workload": "." * 500}) for case in cases], 20)
            part["note"] = [f"{n} of {i}: what there is to say" for n in range(len(part))]
            writer.write_table(pyarrow.Table.from_pandas(part, plan, preserve_index=False))
