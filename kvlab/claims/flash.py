"""Claims of section 4 on Flash Attention: what it saves and what not, and which engine takes it unasked."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, outdated, refuted, supported
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

SECTION = 4
MODEL, LENGTH = "Qwen2-72B-Instruct", 4096      # the article's example
# The article's n² and n as bounds on a fitted exponent: what a run adds at all lengths alike lowers it a little
QUADRATIC, LINEAR = 1.8, 1.2
SMALL = 0.25                                    # of a layer's K and V: scores that take less are not worth a saving
# From what factor on fewer bytes in a decode step count as a saving: a third of the traffic
WORTH = 1.5
YES = 0.5                                       # between the no and the yes of a fact


def _executed(results: Results, study: str, name: str, about: Text, variant: str, phase: str) -> Evidence:
    """Executed ÷ useful flops of a variant in that phase, the least of all cases."""
    table = results.rows(study)
    if table is None:
        return results.lacking(study, name, about)
    rows = table[(table["variant"] == variant) & (table["phase"] == phase) & (table["kind"] != "missing")]
    done, needed = (rows[rows["metric"] == metric].drop_duplicates("case_id").set_index("case_id")["value"]
                    for metric in ("executed_flops", "useful_flops"))
    ratios = (done / needed).dropna()
    if ratios.empty:
        return results.lacking(study, name, about)
    return Evidence(name, about, float(ratios.min()), "ratio", "modelled", n=len(ratios), source=results.source(study))


def _work(results: Results) -> Iterator[Evidence]:
    yield _executed(results, "kernels", "flash", Text(
        "tiled attention (flash), prefill: operations executed ÷ operations that the result needs",
        "分块注意力（flash）prefill：执行的运算 ÷ 结果必需的运算"), "flash", "prefill")
    yield _executed(results, "paging", "paged", Text(
        "paged attention, decode: operations executed ÷ operations that the result needs",
        "分页注意力 decode：执行的运算 ÷ 结果必需的运算"), "paged", "decode")
    yield _executed(results, "kernels", "naive", Text(
        "attention with the whole score matrix, prefill: the same (it computes the masked half, too)",
        "写出完整分数矩阵的注意力 prefill：同上（被掩去的一半也算了）"), "naive", "prefill")
    yield results.finding("kernels", "flops:flash", Text("bytes that it moves ÷ bytes that flash moves, same prompt",
                                                         "同一 prompt，它搬运的字节 ÷ flash 搬运的字节"), name="bytes")
    yield results.finding("paging", "pages:paged", Text("time of a decode call on pages ÷ on a contiguous cache",
                                                        "分页的 decode 耗时 ÷ 连续缓存的耗时"), name="pages")


def _is_about_work(found: Found) -> Verdict:
    flash, paged = found["flash"], found["paged"]
    less = {one.name for one in (flash, paged) if one.below(1)}
    en = (f"flash executes {flash.value:.2f} × and paged attention {paged.value:.2f} × the operations that the result "
          "needs")
    zh = f"flash 执行的运算是必需的 {flash.value:.2f} 倍，分页注意力是 {paged.value:.2f} 倍"
    if naive := found.get("naive"):
        en += f" (naive attention {naive.value:.2f} ×: the masked half too, which can be left out without tiles)"
        zh += f"（朴素注意力为 {naive.value:.2f} 倍，连被掩去的一半也算了；不分块同样可以略去）"
    if fewer := found.get("bytes"):
        en += f"; what flash cuts are bytes, {fewer.value:.0f} × fewer in one prompt"
        zh += f"；flash 减少的是字节，同一 prompt 降到 1/{fewer.value:.0f}"
    if pages := found.get("pages"):
        en += f"; a call on pages takes {pages.value:.2f} × the time of one on a contiguous cache where it was measured"
        zh += f"；实测分页的耗时是连续缓存的 {pages.value:.2f} 倍"
    if len(less) == 2:
        return supported(en, zh)
    if less:
        only = less.pop()
        return conditional(f"only {only} computes less: {en}", f"只有 {only} 算得更少：{zh}")
    return refuted(en, zh)


def _score_bytes(heads: int, queries: int, length: int) -> int:
    """Bytes of one layer's score matrix in fp32, if it were written out."""
    return 4 * heads * queries * length


def _memory(results: Results) -> Iterator[Evidence]:
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import layer_bytes
    yield results.finding("kernels", "memory", Text(
        "prefill memory beyond the inputs, the whole score matrix: exponent of n, in study kernels (longer prompts)",
        "prefill 额外内存，写出完整分数矩阵：n 的指数，取自 kernels（更长的 prompt）"), name="longer")
    for variant, en, zh in (("naive", "the whole score matrix", "写出完整分数矩阵"), ("flash", "flash", "flash"),
                            ("sdpa", "torch's tiled attention", "torch 的分块注意力")):
        yield results.finding("memory_wall", f"memory_exponent:{variant}", Text(
            f"prefill memory beyond the inputs, {en}: exponent of n",
            f"prefill 额外内存，{zh}：n 的指数"), name=variant)
    spec = model(MODEL)
    source, stored = f"{spec.name}, {spec.source}", layer_bytes(spec.layers[0], LENGTH, "bf16")
    for name, queries, unit, en, zh in (("decode", 1, "share", "decode, one query", "decode 只有一个 query"),
                                        ("prefill", LENGTH, "ratio", "prefill", "prefill")):
        yield catalogue(name, Text(f"{en}: scores of one layer ÷ its K and V, {LENGTH:,} tokens",
                                   f"{zh}：单层的分数 ÷ 该层的 K、V，{LENGTH:,} token"),
                        _score_bytes(spec.num_q_heads, queries, LENGTH) / stored, unit, source)


def _is_linear(found: Found) -> Verdict:
    naive, flash = found.get("longer") or found["naive"], found["flash"]
    en = f"in prefill n^{naive.value:.2f} without tiles and n^{flash.value:.2f} with them"
    zh = f"prefill 中不分块为 n^{naive.value:.2f}，分块为 n^{flash.value:.2f}"
    square, line = naive.above(QUADRATIC), flash.below(LINEAR)
    if square is False or line is False:
        return refuted(en, zh)
    if square is None or line is None:
        more = Text("longer prompts: kvlab run memory_wall --size large, kvlab run kernels",
                    "需要更长的 prompt：kvlab run memory_wall --size large，kvlab run kernels")
        return inconclusive(f"{en}: the intervals reach over the bounds", f"{zh}：区间跨过了界限", more)
    decode = found["decode"]
    if decode.below(SMALL):
        return conditional(f"{en}; a decode step has one query: its scores are {decode.value:.1%} of a layer's K and V",
                           f"{zh}；decode 每步只有一个 query，分数只占该层 K、V 的 {decode.value:.1%}")
    return supported(en, zh)


def _traffic(results: Results) -> Iterator[Evidence]:
    from kvlab.record.counters import counted, swept
    least = Text("prefill, bytes without tiles ÷ with them behind the same simulated cache, several sizes: least",
                 "prefill，同一模拟缓存（多种大小）后，不分块 ÷ 分块的字节：最小")
    most = Text("the same: most", "同上：最大")
    decode = Text("decode without tiles: bytes read ÷ bytes that any kernel must read, most",
                  "decode 不分块：读取字节 ÷ 任何内核都必须读的字节，最大")
    table = results.rows("counters")
    if table is None:
        yield from (results.lacking("counters", name, about) for name, about in
                    (("least", least), ("most", most), ("decode", decode)))
        return
    bytes_moved = counted(table, "callgrind", "hbm_bytes").drop_duplicates("case_id").set_index("case_id")["value"]
    rows = swept(table)
    rows = rows[rows["phase"] == "prefill"].assign(moved=rows["case_id"].map(bytes_moved).astype(float))
    places = ["q_len", "kv_len", "group_ratio", "head_dim", "cache_bytes"]
    whole, tiled = (rows[rows["variant"].str.split("(").str[0] == name].groupby(places)["moved"].min()
                    for name in ("c_naive", "c_flash"))
    ratios = (whole / tiled).dropna()
    reads = counted(table, "callgrind", "read_amplification")
    reads = reads[(reads["variant"] == "naive") & (reads["phase"] == "decode")]["value"].astype(float)
    for name, about, values, value in (("least", least, ratios, ratios.min()), ("most", most, ratios, ratios.max()),
                                       ("decode", decode, reads, reads.max())):
        yield (results.lacking("counters", name, about) if values.empty else
               Evidence(name, about, float(value), "ratio", "simulated", n=len(values),
                        source=results.source("counters")))


def _cuts_traffic(found: Found) -> Verdict:
    least, most, decode = found["least"], found["most"], found["decode"]
    en = f"in prefill {least.value:.1f} to {most.value:.0f} × fewer bytes, by the size of the simulated cache"
    zh = f"prefill 中字节降到 1/{least.value:.1f} 至 1/{most.value:.0f}，取决于模拟缓存的大小"
    if not most.above(1):
        return refuted(f"no fewer bytes with tiles in any case: {most.value:.2f} × at most",
                       f"分块在任何情形下都没有减少字节：最多 {most.value:.2f} 倍")
    if not least.above(1):
        return conditional(f"{en}: not in every case", f"{zh}：并非每种情形")
    if decode.below(WORTH):
        return conditional(f"{en}; in decode even the kernel without tiles reads {decode.value:.2f} × the least, so K "
                           "and V are read all the same",
                           f"{zh}；decode 中不分块的内核也只读了下限的 {decode.value:.2f} 倍，K、V 照样要全读一遍")
    return supported(en, zh)


CARDS = (("c30_fa2_cc8", "8.x (A100, L40S)"), ("c30_fa2_cc9", "9.0 (H100)"), ("c30_fa2_cc10", "10 (B200)"))


def _vllm_default(results: Results) -> Iterator[Evidence]:
    yield from (results.quoted(key) for key, _ in CARDS)
    yield results.quoted("c30_fa2_once")


def _vllm_takes_fa2(found: Found) -> Verdict:
    here = [card for key, card in CARDS if found[key].above(YES)]
    there = [card for _, card in CARDS if card not in here]
    if not there:
        return supported("on every generation looked at", "所查各代 GPU 都是")
    if here:
        return conditional(f"on compute capability {', '.join(here)}; not on {', '.join(there)}: newer kernels there",
                           f"在计算能力 {'、'.join(here)} 上成立；在 {'、'.join(there)} 上不成立，那里默认用更新的内核")
    if found["c30_fa2_once"].above(YES):
        return outdated("it was so in mid-2024; no generation gets it unasked now",
                        "2024 年年中如此；现在各代 GPU 都不再默认用它")
    return refuted("no generation gets it unasked", "没有哪一代 GPU 默认用它")


def _tgi_default(results: Results) -> Iterator[Evidence]:
    yield from (results.quoted(f"c31_fa2_{name}", name=name) for name in ("now", "fallback", "once"))


def _tgi_takes_fa2(found: Found) -> Verdict:
    if found["now"].above(YES):
        return supported("it is the default for the common head dims", "常见 head_dim 默认就是它")
    other = found.get("fallback")
    still = other is not None and other.above(YES)
    en, zh = ("; other head dims still fall back to it", "；其他 head_dim 仍退回它") if still else ("", "")
    if found["once"].above(YES):
        return outdated(f"it was the first choice once; the default for head_dim 64, 128 and 256 is FlashInfer now{en}",
                        f"早先确为首选；如今 head_dim 64、128、256 默认 FlashInfer{zh}")
    return refuted(f"the default is another{en}", f"默认是别的{zh}")


CLAIMS = (
    Claim("C27", Text("Flash and Paged Attention are optimisations of the amount of computing",
                      "Flash Attention 与 Paged Attention 属于计算量优化"), "compute",
          _work, _is_about_work, ("kernels", "paging"), "flash_flops"),
    Claim("C28", Text("Tiling brings attention's memory from O(n²) down to O(n)",
                      "分块把注意力的内存从 O(n²) 降到 O(n)"),
          "O(n²) → O(n)", _memory, _is_linear, ("memory_wall", "kernels"), "attention_memory"),
    Claim("C29", Text("Flash Attention uses fast on-chip memory to visit HBM less often",
                      "Flash Attention 借助片上 SRAM 减少对 HBM 的访问"), "fewer HBM accesses",
          _traffic, _cuts_traffic, ("counters",), "traffic_by_cache"),
    Claim("C30", Text("vLLM runs on Flash Attention 2 unless told otherwise", "vLLM 默认使用 Flash Attention 2"),
          "vLLM: FA2", _vllm_default, _vllm_takes_fa2),
    Claim("C31", Text("TGI runs on Flash Attention 2 unless told otherwise", "TGI 默认使用 Flash Attention 2"),
          "TGI: FA2", _tgi_default, _tgi_takes_fa2),
)
