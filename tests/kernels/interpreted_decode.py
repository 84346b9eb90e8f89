"""Triton's decode kernel under its interpreter, against the oracle: a program, as TRITON_INTERPRET is read at import.

Prints one JSON object: case -> [error, largest allowed]. Whatever no sequence uses is NaN, or the largest code.
"""
import json
import os
import sys
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

assert os.environ.get("TRITON_INTERPRET") == "1"

import torch  # noqa: E402

from kvlab.attention import Comparison, reference, trial  # noqa: E402
from kvlab.attention._stored import checked_table, stored_sides  # noqa: E402
from kvlab.attention.triton_paged import TritonPaged  # noqa: E402
from kvlab.kernels import triton_decode as kernel  # noqa: E402
from kvlab.kernels.stored import Stored  # noqa: E402
from kvlab.kernels.triton_tuning import Config  # noqa: E402
from kvlab.kv.cache import Layout  # noqa: E402
from kvlab.kv.formats import format_names, kv_format  # noqa: E402
from kvlab.shapes import AttentionShape, Workload  # noqa: E402

RANDOM = Layout(16, "random")
MAP_NORESERVE = 0x4000               # of Linux; Python names it from 3.13 on
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1.3e-2}
found = {}


def poison(cache, packed, table):
    """All that no sequence uses becomes NaN, or the largest code (in fp8 that is NaN, too)."""
    for array in cache.arrays:
        array.fill_(float("nan") if array.is_floating_point() else torch.iinfo(array.dtype).max)
    for b, one in enumerate(packed):
        cache.write(one, table[b], b)


def attend(shape, lens, fmt="fp32", dtype="fp32", layout=RANDOM, parts=2, config=None, firsts=None):
    """(output, oracle, lse, oracle's lse) of a decode step over poisoned storage."""
    lens = tuple(lens)
    workload = Workload(shape, (1,) * len(lens), lens, 64 if layout.share_prefix else 0)
    one = trial("paged", workload, kv_format=fmt, layout=layout, dtype=dtype)
    inputs = Comparison((one,)).inputs()[fmt, layout][0]
    cache, B = inputs.cache, len(lens)
    rows = [row[:-(-n // cache.block_size)] for row, n in zip(inputs.block_table.tolist(), lens, strict=True)]
    packed = [cache.gather(row, n) for row, n in zip(rows, lens, strict=True)]
    pairs = [cache.format.decode(p, shape, torch.float32) for p in packed]
    poison(cache, packed, rows)
    firsts = tuple(workload.first_visible(b) for b in range(B)) if firsts is None else firsts
    if shape.window and fmt == "fp32":                              # what a window hides is no one's, either
        for first, row in zip(firsts, rows, strict=True):
            for token in range(first):
                for array in cache.by_head(cache.arrays):
                    array[row[token // cache.block_size], :, token % cache.block_size] = float("nan")
    out = torch.full((B, shape.num_q_heads, shape.v_dim), float("nan"), dtype=one.torch_dtype)
    lse = torch.full(out.shape[:2], float("nan"))
    kernel.splits = lambda *_: parts
    kernel.decode(inputs.q_TQD, *stored_sides(cache), checked_table(inputs), firsts, lens, softcap=shape.softcap,
                  out_BQE=out, lse_BQ=lse, workspace=inputs.workspace, config=config or Config(16, 64, 4, 2))
    exact, exact_lse = torch.zeros(out.shape).double(), torch.full(lse.shape, float("-inf")).double()
    for b, ((k, v), first, n) in enumerate(zip(pairs, firsts, lens, strict=True)):
        if first < n:
            q_TQD, k = inputs.q_TQD[b:b + 1], k[first:n]
            exact[b] = reference(Workload(shape, (1,), (n - first,)), [q_TQD], [k], [v[first:n]])
            score = torch.einsum("kgd,skd->kgs", q_TQD.double().view(k.shape[1], -1, k.shape[2]), k.double())
            score = score / k.shape[2]**0.5
            score = score if shape.softcap is None else shape.softcap * torch.tanh(score / shape.softcap)
            exact_lse[b] = score.logsumexp(-1).flatten()
    return out, exact, lse, exact_lse


def case(name, *args, dtype="fp32", **kwargs):
    out, exact, lse, exact_lse = attend(*args, dtype=dtype, **kwargs)
    empty = exact_lse.isinf()
    same = bool((lse.isinf() == empty).all()) and not bool(out[empty].any())
    error = float((out.double() - exact).norm() / exact.norm())
    lse_error = float((lse - exact_lse)[~empty].abs().max())
    found[name] = [max(error, lse_error / 3) if same else float("inf"), MOST[dtype]]


def shapes():
    for q, k in ((2, 2), (8, 2), (8, 1), (32, 1)):
        case(f"ratio {q // k}", AttentionShape(q, k, 64), (1, 17, 100))
    for width in (20, 64, 80, 96, 112, 128, 192, 256):
        case(f"head_dim {width}", AttentionShape(2, 1, width), (40,))
    case("K wider than V", AttentionShape(4, 2, 48, v_head_dim=32), (77,))
    case("V wider than K", AttentionShape(4, 2, 32, v_head_dim=48), (77,))
    case("rows in several tiles", AttentionShape(40, 1, 64), (90,))
    case("absorbed MLA, 576 and 512", AttentionShape(16, 1, 576, v_head_dim=512, v_in_k=True), (50,), parts=1)
    case("V in K, narrower than its first part", AttentionShape(4, 1, 72, v_head_dim=40, v_in_k=True), (50,))
    case("V in K, wider than its first part", AttentionShape(4, 1, 96, v_head_dim=80, v_in_k=True), (50,))
    case("soft-cap", AttentionShape(4, 2, 64, softcap=2.0), (9, 100))
    case("soft-cap far above the scores", AttentionShape(4, 2, 64, softcap=500.0), (100,))


def lengths():
    gqa, window = AttentionShape(4, 1, 64), AttentionShape(4, 1, 64, window=50)
    for parts in (1, 5):
        case(f"lengths, {parts} parts", gqa, (1, 63, 64, 65, 200), parts=parts)
    case("window", window, (30, 50, 51, 333))
    case("window in one part", window, (130,), parts=1)
    case("firsts of a shared prefix", gqa, (100, 70), layout=Layout(16, "random", share_prefix=True), firsts=(64, 64))
    case("empty ranges", gqa, (100, 70, 40), firsts=(0, 70, 40))
    case("a part of each sequence", gqa, (100, 70), firsts=(37, 69), parts=3)
    for size in (1, 16, 48, 64, 128, None):
        for order in ("head", "token"):
            case(f"block_size {size}, {order} order", AttentionShape(4, 2, 32), (150,),
                 layout=Layout(size, "random" if size else "in_order", order))
    case("window in a contiguous cache", window, (90, 33), layout=Layout())


def formats():
    for name in format_names():
        fmt = kv_format(name)
        if not fmt.residual:
            case(name, AttentionShape(4, 2, 80), (50,), name, layout=Layout(32, "random"))
    for name in ("int8/channel/g16", "int4/block16", "fp8_e5m2/head", "int4/channel/g64", "int4/token/g3",
                 "int4/channel/g3", "kivi4/g32", "int2/token", "int2/head"):
        layout = Layout(192, "random", "token") if name.endswith(("g64", "g3")) else Layout()
        case(f"{name}, another layout", AttentionShape(4, 2, 80), (70,), name, layout=layout)
    for name in ("int4/token/g32", "int4/channel/g32", "int2/token/g32", "int8/token", "int8/channel", "int4/head"):
        case(f"{name}, padded width", AttentionShape(4, 2, 99), (50,), name, layout=Layout(32, "random"))
    mla = AttentionShape(8, 1, 72, v_head_dim=64, v_in_k=True)
    for name in ("int8/token", "fp8_e4m3/head", "int4/token/g32", "int4/token"):
        case(f"{name}, V in K", mla, (50,), name)
    case("int8/token, window", AttentionShape(4, 1, 64, window=20), (90,), "int8/token")
    case("int4/channel/g32, window", AttentionShape(4, 1, 64, window=20), (90,), "int4/channel/g32", layout=Layout(32))


def half():
    for dtype in ("bf16", "fp16"):
        for name in (dtype, "fp32", "int8/token", "int8/channel", "fp8_e4m3", "fp8_e4m3/token", "int4/token",
                     "int4/head", "int4/channel/g32", "k8v4"):
            case(f"{name} in {dtype}", AttentionShape(8, 2, 64), (60,), name, dtype=dtype, layout=Layout(32, "random"))
        case(f"V in K in {dtype}", AttentionShape(8, 1, 72, v_head_dim=64, v_in_k=True), (70,), dtype, dtype=dtype)
    case("ratio 32 in bf16", AttentionShape(32, 1, 128, window=90), (100, 5), "bf16", dtype="bf16")


def strides():
    """Offsets beyond 2**31 of a block, a head, a token, a block's scales. Only pages that are used become memory."""
    generator = torch.Generator().manual_seed(0)
    promised = mmap(-1, 13 * 2**30, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
    storage = torch.frombuffer(promised, dtype=torch.int8)

    def drawn(*size):
        return torch.randint(-90, 90, size, generator=generator, dtype=torch.int8)

    def far(name, codes, ids, tokens, scale=None):
        heads = codes.shape[1]
        q, out = torch.randn(1, heads * 2, 32, generator=generator) / 20, torch.empty(1, heads * 2, 32)
        side = Stored(codes, "int8", 32, scale, None, codes.shape[2], 32)
        kernel.splits = lambda *_: 1
        kernel.decode(q, side, side, torch.tensor([ids], dtype=torch.int32), (0,), (tokens,), out_BQE=out,
                      workspace=None, config=Config(16, 32, 4, 2))
        k = codes[ids] * (1.0 if scale is None else scale[ids])
        k = k.transpose(1, 2).flatten(0, 1)[:tokens]
        exact = reference(Workload(AttentionShape(heads * 2, heads, 32), (1,), (tokens,)), [q], [k], [k])
        found[name] = [float((out.double() - exact).norm() / exact.norm()), 1e-6]

    for name, size, stride, ids, tokens in (("block", (4, 1, 16, 32), (2**30, 512, 32, 1), [3, 1], 27),
                                            ("head", (1, 4, 32, 32), (1024, 2**30, 32, 1), [0], 32),
                                            ("token", (1, 1, 4, 32), (128, 128, 2**30, 1), [0], 4)):
        codes = torch.as_strided(storage, size, stride)
        codes[ids] = drawn(len(ids), *size[1:])
        far(name, codes, ids, tokens)
    scale = torch.as_strided(storage.view(torch.float32), (4, 1, 1, 1), (2**30, 1, 1, 1))
    scale[3], scale[1] = 0.5, 2.0
    far("scale of a block", drawn(4, 1, 16, 32), [3, 1], 30, scale)


def merging():
    generator = torch.Generator().manual_seed(0)
    for rows, parts, width, dtype in ((3, 1, 80, "fp32"), (2, 20, 32, "fp32"), (2, 5, 192, "bf16")):
        part = torch.randn(parts, rows, width, generator=generator).transpose(0, 1)          # as a cascade has them
        lse = torch.randn(rows, parts, generator=generator) * 30
        lse[0, 0] = lse[1] = float("-inf")                          # an empty part; nothing but empty ones
        out, merged = torch.empty(rows, width, dtype=DTYPES[dtype]), torch.empty(rows)
        kernel.combine(part, lse, out, merged)
        weight = lse.double().softmax(-1).nan_to_num(0.0)
        exact = (weight[..., None] * part.double()).sum(1)
        error = float((out.double() - exact).norm() / exact.norm().clamp(min=1e-9))
        right = torch.allclose(merged, lse.logsumexp(-1), rtol=1e-6, atol=1e-5)
        found[f"{parts} parts of {width} in {dtype}"] = [error if right else float("inf"), MOST[dtype]]


def variant():
    """What TritonPaged plans: untuned, and reading q and the cache when it is called."""
    window, mla = AttentionShape(4, 1, 64, window=50, softcap=3.0), AttentionShape(8, 1, 72, 64, v_in_k=True)
    for name, shape, lens, fmt in (("window", window, (90, 33), "int8/token"), ("absorbed MLA", mla, (40,), "fp32")):
        workload = Workload(shape, (1,) * len(lens), lens)
        one = trial(TritonPaged(tune=False), workload, kv_format=fmt)
        inputs = Comparison((one,)).inputs()[fmt, one.layout][0]
        call = one.prepare([inputs])[0]
        for again in range(2):
            inputs.q_TQD.mul_(1 + again)
            exact = reference(workload, inputs.q_BTQD, *zip(*[
                inputs.cache.format.decode(inputs.cache.gather(row[:-(-n // 16)], n), shape, torch.float32)
                for row, n in zip(inputs.block_table.tolist(), lens, strict=True)], strict=True))
            found[f"{name}, call {again}"] = [float((call().double() - exact).norm() / exact.norm()), 1e-6]
        assert "default" in one.ran and one.format_path == "native", one.ran


def refusals():
    codes = torch.zeros(2, 1, 16, 32)
    side, q, out = Stored(codes, "fp32", 32), torch.zeros(1, 2, 32), torch.zeros(1, 2, 32)
    table = torch.tensor([[1, 0]], dtype=torch.int32)

    def refused(name, words, q=q, k=side, v=side, table=table, firsts=(0,), lens=(20,), out=out):
        try:
            kernel.decode(q, k, v, table, firsts, lens, out_BQE=out, workspace=None)
        except ValueError as error:
            found[name] = [0.0 if words in str(error) else str(error), 0.5]
        else:
            found[name] = ["was taken", 0.5]
    refused("q not contiguous", "contiguous", q=torch.zeros(1, 32, 2).transpose(1, 2))
    refused("q of another width", "do not fit", q=torch.zeros(1, 2, 48))
    refused("query heads of no group", "do not fit", k=Stored(torch.zeros(2, 3, 16, 32), "fp32", 32))
    refused("table in int64", "int32", table=table.long())
    refused("a row too few", "as many rows", firsts=())
    refused("first behind the last", "first token", firsts=(30,))
    refused("unknown codes", "nf4", k=side._replace(kind="nf4"))
    refused("codes that do not lie side by side", "side by side", k=Stored(codes.transpose(2, 3), "fp32", 32))


def everything():
    """The long matrix: every format in every dtype, ratio, layout and window."""
    for name in format_names():
        if kv_format(name).residual:
            continue
        for dtype in ("fp32", "bf16", "fp16"):
            for q, k in ((2, 2), (32, 1)):
                for layout in (Layout(), Layout(32, "random"), Layout(192, "random", "token")):
                    for window in (None, 40):
                        case(f"{name} {dtype} {q}/{k} {layout.block_size} window {window}",
                             AttentionShape(q, k, 112, window=window), (1, 130), name, dtype=dtype, layout=layout,
                             parts=3)


def others():
    strides()
    merging()
    variant()
    refusals()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    print(json.dumps(found))
