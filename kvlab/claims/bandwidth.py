"""Claims of section 1: whether memory or arithmetic limits a step, and what more arithmetic would give."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.claims import _steps
from kvlab.claims._base import Claim, Evidence, Found, Known, Verdict, absent, conditional, refuted, supported
from kvlab.claims._results import Results, catalogue, given
from kvlab.lang import Text

if TYPE_CHECKING:
    from kvlab.catalog.gpus import GPUSpec
    from kvlab.shapes import LayerSpec

SECTION = 1
NEARLY_ALL = 0.95               # of the pairs of a model and a GPU: a single odd pair does not make a condition
HALF = 0.5                      # of the pairs
CLAIMED = 0.1                   # of the peak: the article's "below 10 %"
FASTER = 1.1                    # times: less gain than this from twice the flop/s is none to speak of
LARGE, SHORT, LONG = 256, 128, 4096      # a batch that is compute-bound while its contexts are short; two contexts


def intensity(layer: LayerSpec) -> float:
    """flop per byte of one decode step's attention in 16 bits over a long cache; MLA as it is absorbed.

    Source: 2 · query heads · (K width + V width) ÷ bytes stored per token; q and the output are left out.
    """
    from kvlab.kv.sizing import layer_bytes
    tokens = 128
    return 2 * layer.num_q_heads * (layer.head_dim + layer.heads.v_dim) * tokens / layer_bytes(layer, tokens, "bf16")


def accelerators() -> list[GPUSpec]:
    """GPUs of the catalogue whose 16-bit ridge point is known."""
    from kvlab.catalog.gpus import gpus
    return [one for one in gpus().values() if one.compute_capability and (one.ridge() or one.ridge("fp16"))]


def _ridge(one: GPUSpec) -> float:
    return given(one.ridge() or one.ridge("fp16"), f"a ridge point of {one.name}")


def _intensities() -> dict[str, list[float]]:
    """Of each model that reads all earlier tokens somewhere, the largest intensity: latent ones apart."""
    from kvlab.catalog.models import models
    found: dict[str, list[float]] = {"heads": [], "latent": []}
    for spec in models().values():
        whole = [layer for layer in spec.layers if layer.kind in ("full", "mla")]
        if whole and not spec.approximate and "sparse" not in spec.attention_type:
            kind = "latent" if any(layer.kind == "mla" for layer in whole) else "heads"
            found[kind].append(max(map(intensity, whole)))
    return found


def _walls(results: Results) -> Iterator[Evidence]:
    """Where attention and a whole step stand against ridge points; how measured time follows the context.

    The last decides nothing: time follows the length whichever of the two limits it.
    """
    ridges, source = [_ridge(one) for one in accelerators()], "data/models.csv; ridge points of data/gpus.csv"
    abouts = {"heads": Text("models with K and V heads × GPUs where decode attention is bound by memory",
                            "有 KV 头的模型 × GPU 的组合中，decode 注意力受访存限制的占比"),
              "latent": Text("models with a latent (MLA) × GPUs where decode attention is bound by memory",
                             "MLA 模型 × GPU 的组合中，decode 注意力受访存限制的占比")}
    for kind, each in reversed(_intensities().items()):
        pairs = [value < ridge for value in each for ridge in ridges]
        yield catalogue(kind, abouts[kind], sum(pairs) / len(pairs), "share", source, n=len(pairs))
    for name, kv_len in (("short", SHORT), ("long", LONG)):
        yield catalogue(name, Text(f"time of a step's bytes ÷ time of its flop, {LARGE} × {kv_len:,} tokens",
                                   f"一步的访存时间 ÷ 计算时间，{LARGE} × {kv_len} token"),
                        _steps.memory_to_compute(_steps.decode(LARGE, kv_len)), "ratio", _steps.roofline().source)
    yield _exponent(results)


def _exponent(results: Results) -> Evidence:
    """Exponent with which the fastest variant's decode time grows with the context, on the machine of the run."""
    about = Text("exponent of decode attention's time over context, fastest variant on the machine of the run",
                 "decode 注意力耗时随上下文增长的指数（该次运行的机器上最快的变体）")
    table = results.rows("memory_wall")
    if table is None or table.empty:
        return results.lacking("memory_wall", "exponent", about)
    from kvlab.record.statistics import fit
    from kvlab.studies.memory_wall import sweep
    times = sweep(table[(table["status"] == "ok") & (table["kind"] != "missing")], "latency_s")
    if times["kv_len"].nunique() < 4:
        return results.lacking("memory_wall", "exponent", about)
    longest = times[times["kv_len"] == times["kv_len"].max()]
    times = times[times["variant"] == longest.loc[longest["value"].idxmin(), "variant"]].sort_values("kv_len")
    value, low, high = fit(times["kv_len"], times["value"], times["low"], times["high"], power=True)
    return Evidence("exponent", about, value, "ratio", "measured", low, high, len(times),
                    results.source("memory_wall"))


def _bound_when_long(found: Found) -> Verdict:
    heads, latent, short, long = (found[name] for name in ("heads", "latent", "short", "long"))
    en = (f"decode attention is below the ridge point in {_counted(heads)} pairs of a model with K/V heads and a "
          f"GPU, with MLA {_counted(latent)}; memory takes {short.value:.2f} × the time of arithmetic in a step of "
          f"{LARGE} × {SHORT} tokens and {long.value:.2f} × at {LARGE} × {LONG:,}")
    zh = (f"decode 注意力低于脊点的“模型 × GPU”组合：有 KV 头的 {_counted(heads, '/')}，"
          f"MLA 的 {_counted(latent, '/')}；一步的访存时间与计算时间之比，{LARGE} × {SHORT} token 时为 "
          f"{short.value:.2f}，{LARGE} × {LONG} 时为 {long.value:.2f}")
    if heads.below(HALF) or long.below(1):
        return refuted(en, zh)
    if min(heads.value, latent.value) >= NEARLY_ALL:
        return supported(en, zh)
    return conditional(f"not where attention's arithmetic passes the ridge point, as with MLA on some GPUs: {en}",
                       f"注意力的计算强度越过脊点之处（如部分 GPU 上的 MLA）不成立：{zh}")


def _counted(pairs: Known, of: str = " of ") -> str:
    n = given(pairs.n, "a number of pairs")
    return f"{round(pairs.value * n):,}{of}{n:,}"


def _utilisation(results: Results) -> Iterator[Evidence]:
    """At best by the roofline, as reached by a CPU's attention, and how busy SMs were where a GPU was watched."""
    best = _steps.roofline()
    for batch_size in (1, 16, 64):
        yield catalogue(f"batch_{batch_size}", Text(
            f"share of the peak that a decode step reaches at best, {batch_size} × 2,048 tokens on {best.device}",
            f"decode 一步最多能达到的峰值算力占比，{batch_size} × 2048 token，{best.device}"),
            _steps.mfu(_steps.decode(batch_size)), "share", best.source)
    each = [_steps.mfu(_steps.decode(1), one.name) < CLAIMED for one in accelerators()]
    yield catalogue("gpus", Text("GPUs on which a step of batch 1 stays below 10 % of the peak",
                                 "batch 1 时低于峰值 10% 的 GPU 占比"), sum(each) / len(each), "share",
                    f"{_steps.MODEL}; data/gpus.csv", n=len(each))
    yield results.finding("memory_wall", "flops_share:sdpa:ratio1", Text(
        "share of the matmul ceiling that sdpa reaches with 1 query head per KV head, on the machine of the run",
        "该次运行的机器上，group_ratio 为 1 时 sdpa 达到矩阵乘上限的占比"), name="reached", unit="share")
    yield _busy(results)


def _busy(results: Results) -> Evidence:
    """The least share of time that SMs had work in a decode call, where a run watched a GPU."""
    about = Text("share of the time that SMs had work in decoding, the least of the calls",
                 "decode 时 SM 有任务的时间占比（各次调用的最小值）")
    table = results.rows("counters")
    if table is not None:
        busy = table[(table["metric"] == "sm_utilization") & (table["kind"] != "missing")]
        busy = busy[busy["phase"] == "decode"]
        if len(busy):
            return results.reading("counters", "sm_busy", about, busy.nsmallest(1, "value"), unit="share")
    run, show = "kvlab run counters --device cuda", "kvlab claims --results RUN"
    return absent("sm_busy", about, f"no run watched a GPU; on a machine with an NVIDIA GPU run: {run}, then {show}",
                  f"没有观测过 GPU 的运行；请在有 NVIDIA GPU 的机器上运行：{run}，再运行 {show}")


def _below_ten(found: Found) -> Verdict:
    one, sixteen, gpus, busy = found["batch_1"], found["batch_16"], found["gpus"], found.get("sm_busy")
    en = (f"no kernel can pass {one.value:.3%} of the peak at 1 × 2,048 tokens; on {_counted(gpus)} GPUs this bound "
          f"is below 10 %, and at batch 16 it is {sixteen.value:.1%}")
    zh = (f"1 × 2048 token 时任何 kernel 都超不过峰值的 {one.value:.3%}，{gpus.n} 种 GPU 中有 "
          f"{round(gpus.value * (gpus.n or 0))} 种的上限低于 10%；batch 16 时上限为 {sixteen.value:.1%}")
    if not one.below(CLAIMED):
        return refuted(f"a step of batch 1 can reach {one.value:.0%} of the peak",
                       f"batch 1 的一步可达到峰值的 {one.value:.0%}")
    if busy is not None:
        en += f"; SMs had work for {busy.value:.0%} of the time at least, which is another quantity"
        zh += f"；SM 至少有 {busy.value:.0%} 的时间有任务，但那是另一个量"
    if gpus.value < NEARLY_ALL:
        return conditional(f"on some GPUs: {en}", f"仅在部分 GPU 上成立：{zh}")
    return supported(en, zh)


def _more_compute(results: Results) -> Iterator[Evidence]:
    """What twice the flop/s and what a batch give by the roofline; beside it, what a second CPU thread gave.

    The last decides nothing: a thread brings bandwidth along, and a CPU's ridge point is not a GPU's.
    """
    best = _steps.roofline()
    shown = (("decode", "a decode step of 16 × 2,048 tokens", "decode 一步（16 × 2048 token）", _steps.decode(16)),
             ("prefill", "a prompt of 2,048 tokens", "2048 token 的 prefill", _steps.prefill()))
    for name, en, zh, batch in shown:
        yield catalogue(name, Text(f"speed-up of {en} by twice the flop/s", f"算力翻倍时的加速：{zh}"),
                        _steps.gain(batch), "ratio", best.source)
    one, many = (size / best(_steps.decode(size)) for size in (1, 64))
    yield catalogue("batch", Text("tokens/s at batch 64 ÷ at batch 1, the same memory",
                                  "显存带宽不变，batch 64 与 batch 1 的吞吐之比"), many / one, "ratio", best.source)
    yield results.finding("kernels", "threads", name="threads", about=Text(
        "speed-up of a CPU's decode attention by a second thread, 32 query heads on one KV head",
        "CPU 上 decode 注意力用两个线程的加速，32 个 query 头共用 1 个 KV 头"))


def _walled(found: Found) -> Verdict:
    decode, prefill, batch = found["decode"], found["prefill"], found["batch"]
    en = (f"twice the flop/s make a decode step {decode.value:.2f} × as fast and a prompt {prefill.value:.2f} ×; "
          f"batch 64 gives {batch.value:.0f} × the tokens/s of batch 1 from the same memory")
    zh = (f"算力翻倍时 decode 一步的速度为原来的 {decode.value:.2f} 倍，prefill 为 {prefill.value:.2f} 倍；"
          f"带宽不变，batch 64 的吞吐是 batch 1 的 {batch.value:.0f} 倍")
    if decode.above(FASTER):
        return refuted(en, zh)
    if prefill.above(FASTER) or batch.above(FASTER):
        return conditional(f"decoding at a given batch, not prefill, and batching moves the wall: {en}",
                           f"只对给定 batch 的 decode 成立，prefill 不成立，而且批处理会推移内存墙：{zh}")
    return supported(en, zh)


CLAIMS = (
    Claim("C05", Text("As sequences grow, memory bandwidth becomes the hard limit", "序列越长，访存带宽越成为硬瓶颈"),
          "seq_len ↑, bandwidth", _walls, _bound_when_long, studies=("memory_wall",), figure="decode_roofline"),
    Claim("C06", Text("The GPU's compute utilisation can fall below 10 %", "GPU 算力利用率可能降到 10% 以下"), "< 10 %",
          _utilisation, _below_ten, studies=("memory_wall", "counters"), figure="memory_wall"),
    Claim("C07", Text("However much compute there is, the memory wall holds inference back",
                      "算力再多，推理速度也被内存墙卡住"), "memory wall", _more_compute, _walled,
          studies=("kernels",), figure="decode_roofline"),
)
