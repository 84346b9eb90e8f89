"""MLA the expanding way: the same function as the absorbed form, by way of K and V of every head in memory."""
from dataclasses import replace

import pytest
import torch

from kvlab.attention import Comparison, least_cost, reference, trial
from kvlab.attention.mla_expand import _matrices
from kvlab.kv.cache import Layout
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

LATENT = AttentionShape(4, 1, 80, 64, v_in_k=True)
SHAPES = {"one latent": LATENT, "two latents": AttentionShape(6, 2, 40, 24, v_in_k=True),
          "no rope": AttentionShape(4, 1, 32, v_in_k=True), "window": replace(LATENT, window=20)}
LENGTHS = {"ragged decode": ((1, 1, 1), (7, 64, 200)), "decode": ((1, 1), (77, 77)), "one token": ((1,), (1,)),
           "mixed": ((5, 17, 1), (33, 17, 90)), "prefill": ((40, 40), (40, 40))}
DECODE = Workload.decode(LATENT, kv_len=100)


def judged(*trials):
    return measure(Comparison(trials), [KernelError()])


def prepared(workload, **rest):
    """(a trial, its one copy of inputs, the call), so that what the call works in is in inputs.scratch."""
    one = trial("mla_expand", workload, **rest)
    (inputs,) = Comparison((one,)).inputs()[one.kv_format, one.layout]
    return one, inputs, one.variant.load().prepare(one, inputs)


def workspace(inputs):
    (space,) = [kept for key, kept in inputs.scratch.items() if key[0] == "expanded"]
    return space


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_function_of_the_absorbed_form(shape, lengths):
    workload = Workload(SHAPES[shape], *LENGTHS[lengths])
    for fmt in ("fp32", "bf16", "int8/token", "kivi4/g8/r32"):
        (row,) = judged(trial("mla_expand", workload, kv_format=fmt))
        assert row["status"] == "ok" and row["value"] < 1e-6, (fmt, row["error"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_half_precision_rounded_matrices_stay_within_the_tolerance(dtype):
    for lengths in LENGTHS.values():
        rows = judged(*(trial("mla_expand", Workload(LATENT, *lengths), dtype=dtype, kv_format=fmt)
                        for fmt in (dtype, "fp8_e4m3")))
        assert {row["status"] for row in rows} == {"ok"}, [row["error"] for row in rows]


def test_each_head_has_matrices_of_its_own_that_turn_and_do_not_stretch():
    one, inputs, _ = prepared(DECODE)
    both = _matrices(one, inputs)
    assert both.shape == (4, 64, 128)
    eye = torch.eye(64)
    every = [*both[..., :64], *both[..., 64:]]
    for i, matrix in enumerate(every):
        assert (matrix @ matrix.T - eye).abs().max() < 1e-6 and (matrix - eye).norm() > 1
        assert all((matrix - other).norm() > 1 for other in every[:i])
    other = replace(one, seed=1)
    (again,) = Comparison((other,)).inputs()[one.kv_format, one.layout]
    assert torch.equal(_matrices(one, replace(again, scratch={})), both)
    assert not torch.equal(_matrices(other, again), both)


def test_k_and_v_of_every_head_are_written_and_attended_fused():
    one, inputs, call = prepared(DECODE)
    call()
    space = workspace(inputs)
    assert space.shape == (4, 100, 80 + 64)
    latent, rope, matrices = inputs.k[0][:, 0, :64], inputs.k[0][:, 0, 64:], _matrices(one, inputs)
    for head in range(4):
        assert torch.equal(space[head, :, :16], rope)
        assert torch.allclose(space[head, :, 16:], latent @ matrices[head], atol=1e-5)
    (row,) = judged(one)
    assert "operators: _scaled_dot_product_flash_attention_for_cpu; expanded, then torch's attention with V read as " \
           "wide as K" in row["note"]
    assert "wide" not in trial("mla_expand", Workload.decode(SHAPES["no rope"], kv_len=9)).ran


def test_reads_q_and_the_cache_when_called_and_nothing_of_what_the_workspace_held():
    workload = Workload(SHAPES["two latents"], (1, 3, 1), (90, 33, 7))
    one, inputs, call = prepared(workload)
    first = call().clone()
    workspace(inputs).fill_(float("nan"))
    assert torch.equal(call(), first)
    inputs.q_TQD.neg_()
    inputs.cache.k_arrays[0].mul_(0.5)
    exact = reference(workload, inputs.q_BTQD, [k * 0.5 for k in inputs.k], [None] * 3)
    second = call()
    assert float((second - exact).norm() / exact.norm()) < 1e-6 < float((second - first).norm() / first.norm())
    inputs.cache.k_arrays[0][2, :, 7:] = float("nan")                # slots behind the last token of sequence 2
    assert torch.equal(call(), second)


@pytest.mark.parametrize("changed, why", [
    (dict(workload=Workload.decode(replace(LATENT, v_in_k=False), kv_len=100)), "this shape stores V apart; use sdpa"),
    (dict(layout=Layout(16)), "contiguous caches only"),
    (dict(workload=Workload.decode(replace(LATENT, softcap=5.0), kv_len=100)), "no soft-capping"),
])
def test_what_it_cannot_compute_is_refused_in_words(changed, why):
    assert why in trial("mla_expand", **{"workload": DECODE, **changed}).why_not()


def cost_of(name, workload, cache_bytes=0, **rest):
    one = trial(name, workload, **rest)
    return one.variant.load().cost(one, cache_bytes)


def test_the_cost_is_of_what_it_writes_reads_back_and_multiplies():
    least, half = least_cost(trial("mla_expand", DECODE)), 4 * 64 * 64 * 4
    expanded, latent, q, wide, narrow = 4 * 100 * 144 * 4, 100 * 80 * 4, 4 * 80 * 4, 4 * 80 * 4, 4 * 64 * 4
    cost = cost_of("mla_expand", DECODE)
    assert cost.write_bytes == least.write_bytes + expanded + narrow + q + wide + narrow
    assert cost.read_bytes == (least.read_bytes + 4 * half + 3 * latent + expanded + narrow + q + wide + narrow)
    assert cost.executed_flops == (least.executed_flops + 2 * 4 * 64 * 128 * 100 + 2 * 2 * 4 * 64 * 64
                                   + 2 * 4 * 16 * 100), "products, two turns, and V's columns that are dropped"
    assert cost_of("mla_expand", DECODE, 2**30).read_bytes == least.read_bytes + 2 * half


def test_a_gpu_reads_v_as_narrow_as_it_is():
    cpu, gpu = (cost_of("mla_expand", DECODE, device=device, dtype="fp32", kv_format="fp32")
                for device in ("cpu", "cuda"))
    assert cpu.executed_flops - gpu.executed_flops == 2 * 4 * 16 * 100
    assert cpu.write_bytes - gpu.write_bytes == 4 * 16 * 4 == cpu.read_bytes - gpu.read_bytes


def test_expanding_costs_more_than_absorbing_and_the_more_the_longer():
    """At DeepSeek-V2's latents: 16 heads of it, decode and prefill."""
    shape = AttentionShape(16, 1, 576, 512, v_in_k=True)
    for phase in (Workload.decode(shape, kv_len=1024), Workload.prefill(shape, q_len=256)):
        expanding = cost_of("mla_expand", phase, device="cuda")
        absorbing = cost_of("sdpa", phase, device="cuda")
        assert all(mine > 2 * theirs for mine, theirs in zip(expanding[:2], absorbing[:2], strict=True))
        assert expanding.executed_flops > absorbing.executed_flops
    longer = cost_of("mla_expand", Workload.decode(shape, kv_len=2048), device="cuda")
    shorter = cost_of("mla_expand", Workload.decode(shape, kv_len=1024), device="cuda")
    assert longer.write_bytes - shorter.write_bytes == 1024 * 16 * (576 + 512) * 2
