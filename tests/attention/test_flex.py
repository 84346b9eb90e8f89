"""FlexAttention: compiled once and in prepare, never uncompiled, with block masks that show what may be seen."""
import sys
from dataclasses import replace

import pytest
import torch

from kvlab.attention import Comparison, trial
from kvlab.attention import flex as flex_module
from kvlab.attention._matrix import WORKLOADS
from kvlab.attention.flex import BLOCK, Flex, block_mask
from kvlab.kernels.folded_sdpa import visible_mask
from kvlab.kv.cache import Layout
from kvlab.libraries import Library
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

# each is compiled, for seconds where no kernel of an earlier run is kept: few cells; `kvlab check flex` runs all
FLEX = {"a batch of one kind": (WORKLOADS["decode, GQA, batch"], "fp32"), "lengths that differ, all rules": (
    Workload(AttentionShape(8, 2, 32, window=150, softcap=20.0), (17, 40), (200, 240)), "bf16")}


@pytest.fixture
def compiler():
    if why := flex_module._cannot_compile(False):
        pytest.skip(why)


@pytest.mark.parametrize("name", FLEX)
def test_flex_agrees_with_the_oracle_compiled(compiler, name):
    def eager(*_, **__):
        pytest.fail("flex_attention ran uncompiled: the score matrix was written")
    one = trial("flex", FLEX[name][0], dtype=FLEX[name][1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["torch._higher_order_ops.flex_attention"], "math_attention", eager)
        (row,) = measure(Comparison((one,)), [KernelError()])
    assert (row["status"], row["error"]) == ("ok", "")
    assert row["note"].endswith("operators: none that torch dispatched (compiled, or a library's)")


@torch.no_grad()                                                    # as measure does: with gradients is another kernel
def test_flex_is_compiled_in_prepare_and_never_again(compiler):
    from torch._dynamo.utils import counters
    workload = WORKLOADS["decode, GQA, batch"]
    one = trial("flex", workload)
    one.prepare(Comparison((one,)).inputs()["fp32", one.layout])
    built = counters["stats"]["unique_graphs"]
    assert built > 0
    for seed, data in ((0, "gaussian"), (7, "outlier")):
        other = replace(one, seed=seed, data=data)
        outputs = [call() for call in other.prepare(Comparison((other,)).inputs(2)["fp32", one.layout])]
        assert not torch.equal(*outputs)
    assert counters["stats"]["unique_graphs"] == built


def test_flex_says_what_it_lacks_to_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no no-such-compiler" in flex_module._cannot_compile.__wrapped__(False)
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(flex_module.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h" in flex_module._cannot_compile.__wrapped__(False)
    monkeypatch.setattr(flex_module, "library", lambda name: Library(name, None, f"{name} is not installed"))
    assert flex_module._cannot_compile.__wrapped__(True).endswith("and triton is not installed")
    monkeypatch.setattr(flex_module, "_cannot_compile", lambda cuda: None)
    assert Flex().why_not(trial("flex", WORKLOADS["decode, ragged"])) is None
    assert "contiguous caches only" in Flex().why_not(trial("flex", WORKLOADS["decode, ragged"], layout=Layout(16)))


@pytest.mark.parametrize("window", [None, 1, 50, 128, 129, 300, 1000])
@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 300), (2, 2), (128, 128), (129, 400), (300, 300), (256, 512)])
def test_the_block_mask_of_flex_shows_each_query_what_it_may_see(q_len, kv_len, window):
    mask, seen_TS = block_mask(q_len, kv_len, window, "cpu"), visible_mask(q_len, kv_len, window, "cpu")
    if mask is None:
        assert seen_TS is None
        return
    wanted = torch.ones(q_len, kv_len, dtype=torch.bool) if seen_TS is None else seen_TS
    shown = torch.zeros_like(wanted)
    t, s = torch.arange(q_len)[:, None], torch.arange(kv_len)
    rule_TS = mask.mask_mod(0, 0, t, s)
    for counts, indices, whole in ((mask.kv_num_blocks, mask.kv_indices, False),
                                   (mask.full_kv_num_blocks, mask.full_kv_indices, True)):
        for i, count in enumerate(counts[0, 0].tolist()):
            for j in indices[0, 0, i, :count].tolist():
                block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                assert not shown[block].any(), "a block is listed twice"
                shown[block] = True if whole else rule_TS[block]
    assert torch.equal(shown, wanted)
