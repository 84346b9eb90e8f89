"""kvlab's flash kernel under Triton's interpreter, on a CPU, against the fp64 oracle: values only, never a time.

TRITON_INTERPRET is read when a kernel is defined, so the kernels run in one child process; each test judges what that
child found for its case.
"""
import math

import pytest
import torch
from watched_launch import watched_launches

from kvlab._child import python
from kvlab.attention import trial
from kvlab.attention import triton_flash as variant
from kvlab.attention._oracle import least_cost, reference
from kvlab.attention.triton_flash import TritonFlash, candidates
from kvlab.kernels.stored import Stored
from kvlab.kernels.triton_tuning import Config
from kvlab.kv.cache import Layout
from kvlab.libraries import Library, library
from kvlab.shapes import AttentionShape, Workload

SMALL = Config(32, 32, 4, 1)
ERROR = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.5e-2}              # of the worst row, relative

# shape (query heads, kv heads, head_dim, v_head_dim), q_lens, kv_lens, and what is not as in `attended`
CASES = {
    "one token": ((2, 1, 64, 64), (1,), (1,), {}),
    "prompt": ((2, 2, 64, 64), (70,), (70,), {}),
    "prompt after a cache": ((4, 1, 64, 64), (33,), (100,), {}),
    "ratio 8": ((8, 1, 32, 32), (21,), (40,), {}),
    "ratio 3": ((6, 2, 32, 32), (21,), (40,), {}),
    "ragged": ((4, 2, 32, 32), (1, 40, 7, 1), (1, 40, 70, 90), {}),
    "ragged, paged": ((4, 2, 32, 32), (1, 40, 7), (1, 40, 70), dict(block_size=16)),
    "paged, blocks of 1": ((2, 1, 32, 32), (9,), (37,), dict(block_size=1)),
    "paged, blocks of 48, token order": ((2, 2, 32, 32), (20,), (100,), dict(block_size=48, order="token")),
    "token order": ((4, 2, 32, 32), (20,), (50,), dict(order="token")),
    "window": ((2, 1, 32, 32), (50, 3), (130, 90), dict(window=40)),
    "window of 1": ((2, 1, 32, 32), (40,), (40,), dict(window=1)),
    "window inside a tile": ((2, 1, 32, 32), (70,), (70,), dict(window=7)),
    "wide window": ((2, 1, 32, 32), (12,), (170,), dict(window=100)),
    "window, paged": ((2, 1, 32, 32), (30,), (130,), dict(window=40, block_size=16)),
    "softcap": ((2, 1, 32, 32), (40,), (60,), dict(softcap=2.0)),
    "softcap and window": ((2, 1, 32, 32), (40,), (60,), dict(softcap=20.0, window=33)),
    "head_dim 8": ((2, 1, 8, 8), (20,), (40,), {}),
    "head_dim 80": ((2, 1, 80, 80), (20,), (40,), {}),
    "head_dim 96": ((2, 1, 96, 96), (20,), (40,), {}),
    "head_dim 112": ((2, 1, 112, 112), (20,), (40,), {}),
    "head_dim 128": ((2, 1, 128, 128), (20,), (40,), {}),
    "head_dim 192, v 128": ((2, 1, 192, 128), (20,), (40,), {}),
    "head_dim 256": ((2, 1, 256, 256), (20,), (40,), {}),
    "v wider than k": ((2, 1, 16, 80), (20,), (40,), {}),
    "v is a view of k": ((2, 1, 80, 64), (20,), (40,), dict(v_in_k=True)),
    "fp16": ((4, 2, 64, 64), (40,), (70,), dict(dtype="fp16")),
    "fp16, window, softcap, paged": ((4, 1, 80, 80), (20, 1), (70, 50), dict(dtype="fp16", window=30, softcap=10.0,
                                                                          block_size=16)),
    "bf16": ((4, 2, 64, 64), (40,), (70,), dict(dtype="bf16")),
    "bf16, window, softcap, paged": ((4, 1, 80, 80), (20, 1), (70, 50), dict(dtype="bf16", window=30, softcap=10.0,
                                                                          block_size=16)),
    "the GPU's tile": ((2, 1, 32, 32), (150,), (300,), dict(config=Config(128, 64, 8, 3))),
    "few tokens in a tile": ((2, 1, 32, 32), (30,), (60,), dict(config=Config(64, 16, 4, 3))),
    "q with strides": ((4, 2, 32, 32), (20,), (40,), dict(strided=True)),
    "offsets beyond 2**31": ((2, 2, 16, 16), (5,), (40,), dict(block_size=32, dtype="fp16", apart=2**31 + 64)),
}


def stored(x, table_BM, block_size, dtype, order, apart=None):
    """Tokens of each sequence in their blocks, everything else NaN; apart: elements between blocks."""
    N, (_, K, W) = int(table_BM.max()) + 1, x[0].shape
    size = (N, K, block_size, W) if order == "head" else (N, block_size, K, W)
    if apart is None:
        array = torch.full(size, math.nan, dtype=dtype)
    else:                                               # the pages in between are never touched, so never there
        array = torch.empty(apart * (N - 1) + math.prod(size[1:]), dtype=dtype).as_strided(
            size, (apart, *torch.empty(size[1:], device="meta").stride()))
    by_head = array if order == "head" else array.transpose(1, 2)
    for row, x_SKW in zip(table_BM.tolist(), x):
        for block, part in zip(row, x_SKW.split(block_size)):
            by_head[block] = math.nan
            by_head[block, :, :len(part)] = part.transpose(0, 1)
    return by_head


def attended(shape, q_lens, kv_lens, *, dtype="fp32", block_size=None, order="head", config=SMALL, strided=False,
             apart=None, **knobs):
    """(worst relative error of a row, worst error of the LSE), or "no memory"."""
    from kvlab.kernels.triton_flash import DTYPES, flash_prefill
    shape = AttentionShape(*shape, **knobs)
    Q, K, D, E = shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.v_dim
    gen, kind, T = torch.Generator().manual_seed(1), DTYPES[dtype], sum(q_lens)
    k = [torch.randn(n, K, D, generator=gen).to(kind) for n in kv_lens]
    v = [k_SKD[..., :E] if shape.v_in_k else torch.randn(len(k_SKD), K, E, generator=gen).to(kind) for k_SKD in k]
    q_TQD = torch.randn(T, Q, 2 * D if strided else D, generator=gen).to(kind)[..., :D]
    blocks = -(-max(kv_lens) // (block_size or max(kv_lens)))
    table_BM = torch.randperm(len(kv_lens) * blocks, generator=gen).view(len(kv_lens), blocks).int()
    try:
        k_codes, v_codes = (stored(x, table_BM, block_size or max(kv_lens), kind, order, apart) for x in (k, v))
    except RuntimeError:
        return "no memory"
    out_TQE, lse_TQ = torch.full((T, Q, E), math.nan, dtype=kind), torch.full((T, Q), math.nan)
    flash_prefill(q_TQD, Stored(k_codes, dtype, D), Stored(k_codes if shape.v_in_k else v_codes, dtype, E), table_BM,
                  q_lens, kv_lens, window=shape.window, softcap=shape.softcap, out_TQE=out_TQE, lse_TQ=lse_TQ,
                  config=config)
    right_TQE = reference(Workload(shape, q_lens, kv_lens), list(q_TQD.split(q_lens)), k, v)
    error = ((out_TQE.double() - right_TQE).norm(dim=-1) / right_TQE.norm(dim=-1)).max()
    return float(error), float((lse_TQ - lse(shape, q_TQD.split(q_lens), k)).abs().max())


def lse(shape, q, k):
    """Log of the sum of exp(score) over what each query sees, in fp64."""
    found = []
    for q_TQD, k_SKD in zip(q, k):
        T, S = len(q_TQD), len(k_SKD)
        score_QTS = torch.einsum("tqd,sqd->qts", q_TQD.double(), k_SKD.double().repeat_interleave(shape.group_ratio, 1))
        score_QTS /= shape.head_dim**0.5
        if shape.softcap:
            score_QTS = shape.softcap * (score_QTS / shape.softcap).tanh()
        back_TS = torch.arange(S - T, S)[:, None] - torch.arange(S)
        seen_TS = (back_TS >= 0) & (back_TS < (shape.window or S))
        found.append(score_QTS.masked_fill(~seen_TS, -math.inf).logsumexp(-1).T)
    return torch.cat(found)


def through_the_variant(block_size, order):
    """Worst relative error of a row, by TritonFlash on a trial's own inputs."""
    from kvlab.attention import Comparison
    shape = AttentionShape(4, 2, 16, window=40, softcap=20.0)
    one = trial(TritonFlash(tune=False), Workload(shape, (20, 1), (50, 30)), layout=Layout(block_size, "random", order))
    (inputs,), = Comparison((one,)).inputs().values()
    out_TQE = TritonFlash(tune=False).prepare(one, inputs)()
    right_TQE = reference(one.workload, inputs.q_BTQD, inputs.k, inputs.v)
    error = ((out_TQE.double() - right_TQE).norm(dim=-1) / right_TQE.norm(dim=-1)).max()
    return float(error), TritonFlash(tune=False).ran(one)


def everything():
    """What the child answers: a case's errors, each by its name."""
    for name, (*case, knobs) in CASES.items():
        yield name, attended(*case, **knobs)
    for layout in ((None, "head"), (16, "token")):
        yield str(layout), through_the_variant(*layout)


@pytest.fixture(scope="module")
def triton():
    if why := library("triton").why_not:
        pytest.skip(f"{why}; install kvlab[gpu] on Linux")


@pytest.fixture(scope="module")
def found(triton):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        answers, ended = python("import test_triton_flash as here\nfor name, value in here.everything():\n"
                                "    answer(**{name: value})\n", timeout_s=240)
    assert not ended, ended
    return answers


@pytest.mark.parametrize("name", CASES)
def test_flash_prefill_agrees_with_the_oracle(found, name):
    if found[name] == "no memory":
        pytest.skip("this machine does not hand out the address space of two 4 GiB arrays")
    error, lse_error = found[name]
    limit = ERROR[CASES[name][3].get("dtype", "fp32")]
    assert error < limit and lse_error < limit                      # not true of NaN either


@pytest.mark.parametrize("layout", [(None, "head"), (16, "token")])
def test_the_variant_reads_a_trials_cache_as_it_lies(found, layout):
    error, ran = found[str(layout)]
    assert error < ERROR["fp32"]
    assert ran == "tile of 32 queries by 32 tokens, 8 warps, 1 stages; default"


def test_wrong_arguments_are_said_before_anything_is_launched(triton):
    from kvlab.kernels.triton_flash import flash_prefill

    def call(q=(3, 2, 32), kind="fp32", last=1, width=32, kv_len=4):
        q_TQD = torch.zeros(*q[:2], q[2] * last)[..., ::last]
        side = Stored(torch.zeros(1, 1, 4, width), kind, width)
        flash_prefill(q_TQD, side, side, torch.zeros(1, 1, dtype=torch.int32), (3,), (kv_len,), config=SMALL,
                      out_TQE=torch.zeros(*q[:2], width))
    with pytest.raises(ValueError, match="sequence 0 has 3 query tokens and 2 KV tokens"):
        call(kv_len=2)
    with pytest.raises(ValueError, match="all three must be one of fp32, fp16, bf16"):
        call(kind="bf16")
    with pytest.raises(ValueError, match="256 at most"):
        call(q=(3, 2, 576), width=576)
    with pytest.raises(ValueError, match="last stride must be 1"):
        call(last=2)


def test_it_runs_on_the_device_of_q(triton, monkeypatch):
    from kvlab.kernels import triton_flash as kernel
    launched = watched_launches(monkeypatch, (kernel, "flash_prefill_kernel"))
    q_TQD, side = torch.zeros(3, 2, 32), Stored(torch.zeros(1, 1, 4, 32), "fp32", 32)
    kernel.flash_prefill(q_TQD, side, side, torch.zeros(1, 1, dtype=torch.int32), (3,), (4,), config=SMALL,
                         out_TQE=torch.zeros(3, 2, 32))
    assert len(launched) == 1 and len(launched[0]) == 1 and launched[0][0] is q_TQD


@pytest.fixture
def on(monkeypatch):
    """A trial on a GPU of that capability, where Triton imports."""
    def made(found=(9, 0), imports=None, **options):
        monkeypatch.setattr(variant, "capability", lambda device: found if device.startswith("cuda") else None)
        monkeypatch.setattr(variant, "library", lambda name: Library(name, "3.9", imports))
        shape = AttentionShape(8, 2, options.pop("head_dim", 64), window=options.pop("window", None))
        lens = options.pop("lens", ((100,), (300,)))
        return trial("triton_flash", Workload(shape, *lens), **{**dict(device="cuda"), **options})
    return made


def test_it_refuses_in_words(on, triton):
    refuse = TritonFlash().why_not
    assert refuse(on()) is None and refuse(on(layout=Layout(16, "random", "token"))) is None
    assert "a time of the interpreter is no number" in refuse(on(device="cpu"))
    assert "install kvlab[gpu]" in refuse(on(imports="triton is not installed"))
    assert "needs compute capability 8.0, and this is 7.5" in refuse(on((7, 5)))
    assert "int8/token would have to be decoded first" in refuse(on(kv_format="int8/token"))
    assert "heads of up to 256 channels, got head_dim=576" in refuse(on(head_dim=576))


@pytest.mark.parametrize("window", [None, 50])
def test_the_cost_is_a_read_of_k_and_v_per_tile_that_does_not_find_them(on, window):
    one = on(lens=((100, 1), (300, 40)), window=window, layout=Layout(16, "random"))
    rows = candidates("bf16", 64, (9, 0))[0].rows
    tokens = flops = count = 0
    for q_len, kv_len in zip(one.workload.q_lens, one.workload.kv_lens):
        each = [{token for token in range(kv_len) if 0 <= kv_len - q_len + row // 4 - token < (window or kv_len)}
                for row in range(4 * q_len)]
        tiles = [each[i:i + rows] for i in range(0, len(each), rows)]
        seen = [len(set.union(*tile)) for tile in tiles]
        tokens += sum(seen) - len(set.union(*each))
        flops += sum(2 * 2 * (64 + 64) * len(tile) * n for tile, n in zip(tiles, seen))
        count += len(tiles)
    least, cost, found = least_cost(one), TritonFlash().cost(one), TritonFlash().cost(one, 2**30)
    told = 20 * count + 4 * (19 + 3)                                # of the tiles, and the block table
    assert cost.read_bytes - least.read_bytes == tokens * 2 * (64 + 64) * 2 + told and tokens > 0
    assert found.read_bytes - least_cost(one, 2**30).read_bytes == told
    assert cost.executed_flops == flops >= least.executed_flops and cost.write_bytes == least.write_bytes


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("found", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_default_fits_the_generations_smallest_shared_memory(found, width):
    room = (227 if found[0] in (9, 10) else 99) * 1024
    for paged in (False, True):
        config = candidates("bf16", width, found, paged)[0]
        ahead = (config.stages + 1) // 2 if paged else config.stages
        ahead -= found[0] not in (9, 10)                            # without WGMMA what is multiplied is in registers
        assert 0 < config.rows * width * 2 + ahead * config.tokens * width * 4 <= room
