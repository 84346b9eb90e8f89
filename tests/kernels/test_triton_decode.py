"""Triton's decode kernel against the oracle under the interpreter (in a child process), and how its work is cut."""
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from watched_launch import watched_launches

from kvlab._child import run
from kvlab.attention import least_cost, trial, triton_paged
from kvlab.attention.triton_paged import TritonPaged
from kvlab.kernels.decode_tiles import SHARED_BYTES, candidates, parts, splits
from kvlab.kernels.stored import Stored
from kvlab.kernels.triton_tuning import Config
from kvlab.kv.cache import Layout
from kvlab.libraries import Library, library
from kvlab.shapes import AttentionShape, Workload

CHILD = Path(__file__).with_name("interpreted_decode.py")
GROUPS = {"shapes": 20, "lengths": 20, "formats": 45, "half": 23, "others": 19}           # and how many cases
GQA = AttentionShape(32, 8, 128)


def interpreted(group: str, timeout_s: float) -> dict:
    if library("triton").why_not:
        pytest.skip(library("triton").why_not)
    ended = run([sys.executable, str(CHILD), group], timeout_s=timeout_s, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert not ended.how, ended.stderr[-2000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("group", GROUPS)
def test_agrees_with_the_oracle_under_the_interpreter(group):
    found = interpreted(group, 200)
    assert len(found) == GROUPS[group]
    assert {case: error for case, (error, most) in found.items()
            if not (isinstance(error, float) and error <= most)} == {}


@pytest.mark.skipif(os.environ.get("KVLAB_CHECK_ALL") != "1", reason="takes minutes; KVLAB_CHECK_ALL=1 runs it")
def test_agrees_with_the_oracle_on_the_long_matrix():
    found = interpreted("everything", 3600)
    assert len(found) > 800
    assert {case: error for case, (error, most) in found.items() if not error <= most} == {}


def test_both_kernels_run_on_the_device_of_q(monkeypatch):
    if why := library("triton").why_not:
        pytest.skip(why)
    from kvlab.kernels import triton_combine, triton_decode
    launched = watched_launches(monkeypatch, (triton_decode, "paged_decode_kernel"), (triton_combine, "combine_kernel"))
    monkeypatch.setattr(triton_decode, "splits", lambda *_: 2)
    q, side = torch.zeros(1, 2, 32), Stored(torch.zeros(2, 1, 16, 32), "fp32", 32)
    triton_decode.decode(q, side, side, torch.tensor([[1, 0]], dtype=torch.int32), (0,), (20,), out_BQE=q.clone(),
                         workspace=lambda name, *size, dtype: torch.zeros(size, dtype=dtype))
    assert [[tuple(t.shape) for t in of] for of in launched] == [[(1, 2, 32)], [(2, 2, 32)]]


@pytest.mark.parametrize("width, cut", [(1, (16, 0)), (16, (16, 0)), (20, (16, 16)), (64, (64, 0)), (80, (64, 16)),
                                        (96, (64, 32)), (112, (64, 64)), (192, (128, 64)), (256, (256, 0)),
                                        (576, (512, 64))])
def test_a_width_is_a_power_of_two_and_the_padded_rest(width, cut):
    assert parts(width) == cut


def test_parts_fill_the_multiprocessors_and_no_more():
    assert splits(4096, 32768, 64, 132) == 1                         # a large batch fills them by itself
    assert splits(1, 64, 64, 132) == splits(1, 1, 64, 132) == splits(1, 0, 64, 132) == 1       # too short to cut
    assert splits(1, 65536, 64, 132) >= 0.9 * 2 * 132                # MQA, batch 1: every place is taken
    for programs in (1, 3, 8, 100, 128, 200, 264, 265, 300):
        count = splits(programs, 32768, 64, 132)
        rounds = -(-programs * count // 264)
        assert programs * count >= 0.8 * 264 * rounds, (programs, count)        # the last round is nearly full
        assert 32768 / count >= 2 * 64
    assert splits(8, 1024, 64, 132) <= 8                             # parts of two tiles at least


@pytest.mark.parametrize("group", [1, 4, 32, 128])
@pytest.mark.parametrize("sides, itemsize", [
    ((("bf16", 128),) * 2, 2), ((("int8", 128),) * 2, 2), ((("fp8_e4m3", 576),), 2), ((("bf16", 576),), 2),
    ((("fp32", 256),) * 2, 4), ((("int8", 80), ("int4", 80)), 2), ((("fp32", 576),), 4)])
def test_every_configuration_is_one_the_kernel_takes(sides, itemsize, group):
    found = candidates(group, sides, itemsize)
    assert 1 <= len(found) <= 4 and len(set(found)) == len(found)
    for config in found:
        assert config.rows >= 16 and config.tokens >= 16 and not config.rows & (config.rows - 1)
        stored = sum(sum(parts(w)) for _, w in sides) * {"fp32": 4, "bf16": 2}.get(sides[0][0], 1) / 2
        assert config.tokens * stored * (config.stages - 1) <= SHARED_BYTES
        assert config.rows <= 16 or max(w for _, w in sides) <= 256  # the sums of wide rows would not fit registers


def decode(shape=GQA, kv_len=4096, **rest):
    return trial(TritonPaged(), Workload.decode(shape, batch_size=2, kv_len=kv_len), **rest)


def test_a_cpu_is_refused_and_told_what_to_use():
    why = decode().why_not()
    assert "interpreter" in why and "use paged or sdpa" in why
    assert decode().layout == Layout(16, "random")


def test_refusals_on_a_gpu_are_sentences(monkeypatch):
    monkeypatch.setattr(triton_paged, "library", lambda name: Library(name, "3.9.0", None))
    monkeypatch.setattr(triton_paged, "capability", lambda device: (9, 0))

    def refused(one):
        return one.variant.load().why_not(one)
    assert refused(decode(device="cuda")) is None
    for fmt in ("int8/token", "fp8_e4m3/head", "int4/token/g32", "int2/token/g32", "kivi4/g32", "k8v4"):
        assert refused(decode(device="cuda", kv_format=fmt, layout=Layout(32))) is None, fmt
    assert refused(decode(AttentionShape(128, 1, 576, v_head_dim=512, v_in_k=True), device="cuda")) is None
    assert "newest tokens apart" in refused(decode(device="cuda", kv_format="kivi4/g32/r128"))
    assert "up to 576 channels" in refused(decode(AttentionShape(4, 1, 640), device="cuda"))
    prefill = trial(TritonPaged(), Workload.prefill(GQA, q_len=64), device="cuda")
    assert "decode steps only" in refused(prefill)
    huge = trial(TritonPaged(), Workload.decode(AttentionShape(4096, 4096, 64), batch_size=3000, kv_len=1),
                 device="cuda")
    assert "more programs than CUDA launches" in refused(huge)
    monkeypatch.setattr(triton_paged, "capability", lambda device: (7, 5))
    assert "7.5" in refused(decode(device="cuda"))
    monkeypatch.setattr(triton_paged, "library", lambda name: Library(name, None, "triton is not installed"))
    assert "kvlab[gpu]" in refused(decode(device="cuda"))


def test_cost_counts_tables_lengths_and_parts_once_each_way(monkeypatch):
    one = decode(kv_format="fp32", layout=Layout(16))
    least = least_cost(one)
    config = candidates(4, (("fp32", 128),) * 2, 4)[0]
    count = splits(2 * 8, 4096, config.tokens, 2)
    assert count == 1
    cost = one.variant.load().cost(one)
    assert cost.read_bytes == least.read_bytes + 2 * (4 * 256 + 8) and cost.write_bytes == least.write_bytes
    assert cost.executed_flops == 4 * least.executed_flops           # four query heads in a tile of 16 rows
    monkeypatch.setattr(triton_paged, "multiprocessors", lambda device: 132)
    count = splits(2 * 8, 4096, config.tokens, 132)
    assert count > 8
    partial = 4 * 2 * 32 * count * (128 + 1)
    cost = one.variant.load().cost(one)
    assert cost.write_bytes == least.write_bytes + partial
    assert cost.read_bytes == least.read_bytes + 2 * (4 * 256 + 8) + partial
    assert one.variant.load().cost(one, 2**40).read_bytes == cost.read_bytes - partial      # found in a large cache


def test_cost_counts_the_blocks_that_a_window_leaves():
    shape = AttentionShape(4, 4, 64, window=100)
    one = trial(TritonPaged(), Workload.decode(shape, kv_len=1000), kv_format="fp32", layout=Layout(16))
    assert one.variant.load().cost(one).read_bytes == least_cost(one).read_bytes + 4 * (63 - 56) + 8
    assert isinstance(candidates(1, (("fp32", 64),) * 2, 4)[0], Config)
