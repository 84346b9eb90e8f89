"""Claims of section 2: sixteen requests beside the weights, and what one server of eight GPUs holds."""
from __future__ import annotations

import json
from collections.abc import Iterator

from kvlab.claims import _steps
from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, refuted, supported
from kvlab.claims._results import Results, catalogue, given
from kvlab.claims.sizing import SIZE, TOKENS, example
from kvlab.lang import Text

SECTION = 2
REQUESTS = 16
SAID_KV, ROUNDED_KV = 20, 0.5   # the article's GB for sixteen requests, and what no decimals round away
SAID_WEIGHTS, ABOUT = 140, 0.05  # the article's GB for the weights; "about" is taken to be within 5 %
EASILY = 2                      # times the requests asked for: with room for as many again it is easy
COUNTS = (8, 4, 2)              # GPUs; three do not divide the model's query heads


def _requests(results: Results) -> Iterator[Evidence]:
    """Sixteen requests at their full length, and sixteen at the lengths of live requests at a random moment."""
    from kvlab.kv.sizing import kv_bytes
    spec, source = example()
    each = kv_bytes(spec, TOKENS, "bf16")
    for name, unit, scale in (("gib", "GiB", 2**30), ("gb", "GB", 1e9)):
        yield catalogue(name, Text(f"{REQUESTS} requests of {TOKENS:,} tokens, in {unit}",
                                   f"{REQUESTS} 个 {TOKENS} token 的请求，单位 {unit}"),
                        REQUESTS * each / scale, unit, source)
    yield _live(results, kv_bytes(spec, 1, "bf16") / 2**30)


def _live(results: Results, per_token: float) -> Evidence:
    """KV in GiB that sixteen requests of the study's trace hold at a random moment of their decoding, on average."""
    from kvlab.record.asked import asked
    about = Text(f"{REQUESTS} live requests of a chat trace, at the lengths they have reached",
                 f"{REQUESTS} 个运行中的对话请求，按当前长度")
    table = results.rows("paging")
    rows = None if table is None else asked(table[table["status"] == "ok"], "waste")
    if rows is None or rows.empty:
        return results.lacking("paging", "live", about)
    rows = rows[(rows["metric"] == "used_share") & rows["case"].map(
        lambda case: json.loads(case).get("reserved") == "max_model_len")]
    share = results.reading("paging", "live", about, rows)
    if share.value is None:
        return share
    scale = REQUESTS * per_token * json.loads(rows["case"].iloc[0])["max_model_len"]
    low, high = (None if end is None else end * scale for end in (share.low, share.high))
    return Evidence("live", about, share.value * scale, "GiB", share.kind, low, high, share.n, share.source)


def _twenty(found: Found) -> Verdict:
    gib, gb, live = found["gib"], found["gb"], found.get("live")
    en, zh = f"at {TOKENS:,} tokens each it is {gib.value:.1f} GiB ({gb.value:.1f} GB)", (
        f"各 {TOKENS} token 时为 {gib.value:.1f} GiB（{gb.value:.1f} GB）")
    if min(abs(one.value - SAID_KV) for one in (gib, gb)) > ROUNDED_KV:
        return refuted(en, zh)
    if live is not None and live.below(SAID_KV - ROUNDED_KV):
        return conditional(f"only if all {REQUESTS} are at full length at once: {en}; at the lengths of a chat trace "
                           f"they hold {live.value:.1f} GiB on average",
                           f"仅当 {REQUESTS} 个请求同时达到满长度：{zh}；"
                           f"按对话 trace 的当前长度平均只占 {live.value:.1f} GiB")
    if abs(gb.value - SAID_KV) > ROUNDED_KV:
        return conditional(f"in GiB, not in GB: {en}", f"单位是 GiB 时成立，GB 不成立：{zh}")
    return supported(en, zh)


def _weights(results: Results) -> Iterator[Evidence]:
    from kvlab.kv.sizing import weight_bytes
    spec, source = example()
    weights = given(weight_bytes(spec), "weights")
    for name, unit, scale in (("gb", "GB", 1e9), ("gib", "GiB", 2**30)):
        yield catalogue(name, Text(f"weights in 16 bits, in {unit}", f"16 位权重，单位 {unit}"),
                        weights / scale, unit, source)
    yield catalogue("params", Text("parameters", "参数量"), given(spec.params, "parameters"), "count", source)


def _about_140(found: Found) -> Verdict:
    gb, gib = found["gb"], found["gib"]
    off = gb.value / SAID_WEIGHTS - 1
    en, zh = f"{gb.value:.1f} GB or {gib.value:.1f} GiB", f"{gb.value:.1f} GB，即 {gib.value:.1f} GiB"
    if abs(off) <= ABOUT:
        return supported(f"{en}, {off:+.1%} from what is said", f"{zh}，与文中相差 {off:+.1%}")
    if abs(gib.value / SAID_WEIGHTS - 1) <= ABOUT:
        return conditional(f"in GiB only: {en}", f"仅以 GiB 计时成立：{zh}")
    return refuted(en, zh)


def _server(results: Results) -> Iterator[Evidence]:
    """What a server needs for the weights and sixteen requests, and how many requests of 4,096 tokens it holds."""
    from kvlab.catalog.gpus import gpu as gpu_named
    from kvlab.kv.sizing import kv_bytes, weight_bytes
    from kvlab.serving.capacity import Settings, plan
    (spec, source), sheet = example(), gpu_named(_steps.GPU)
    needed = given(weight_bytes(spec), "weights") + REQUESTS * kv_bytes(spec, TOKENS, "bf16")
    source = f"kvlab plan; {source}; {sheet.name}, {sheet.source}"
    for count in COUNTS:
        found = plan(spec, sheet, count, Settings(tp=count, max_len=TOKENS, util=0.9))
        yield Evidence(f"on_{count}", Text(f"requests of {TOKENS:,} tokens whose KV fits on {count} × {sheet.name}",
                                           f"{count} × {sheet.name} 能放下 KV 的 {TOKENS} token 请求数"),
                       found.requests, "count", "modelled", found.least, found.most, source=source)
    yield catalogue("needed", Text(f"weights, {REQUESTS} requests of {TOKENS:,} tokens ÷ 8 × {sheet.name}'s memory",
                                   f"权重加 {REQUESTS} 个 {TOKENS} token 请求 ÷ 8 × {sheet.name} 的显存"),
                    needed / (8 * given(sheet.memory_bytes, "memory")), "share", source)


def _carries(found: Found) -> Verdict:
    eight, needed, four = found["on_8"], found["needed"], found.get("on_4")
    en = (f"weights and {REQUESTS} requests take {needed.value:.0%} of its memory; beside the weights it holds "
          f"{eight.value:,.0f} such requests" + (f", and four of its GPUs {four.value:,.0f}" if four else ""))
    zh = (f"权重加 {REQUESTS} 个请求占其显存的 {needed.value:.0%}；权重之外可放下 {eight.value:,.0f} 个这样的请求"
          + (f"，其中 4 张卡就能放 {four.value:,.0f} 个" if four else ""))
    if eight.above(EASILY * REQUESTS):
        return refuted(en, zh)
    if eight.above(REQUESTS - 1):
        return conditional(f"it carries them, but not {EASILY} times as many: {en}",
                           f"放得下，但放不下 {EASILY} 倍：{zh}")
    return supported(en, zh)


PLAN = f"kvlab plan {_steps.MODEL} --gpu '{_steps.GPU}' --gpus 8 --tp 8 --max-len {TOKENS} --util 0.9"
CLAIMS = (
    Claim("C13", Text("16 concurrent requests need 20 GB for the cache alone",
                      "并发 16 个请求，仅 KV Cache 就需要 20 GB"), "16 × 1.25 GB = 20 GB",
          _requests, _twenty, studies=("paging",), figure="paging", command=f"{SIZE} --batch {REQUESTS}"),
    Claim("C14", Text("The weights are about 140 GB in FP16", "模型权重约 140 GB（FP16）"), "≈ 140 GB", _weights,
          _about_140, figure="kv_budget", command=SIZE),
    Claim("C15", Text("… so that not even one server of 8 × A100 80 GB carries it easily",
                      "……因此单机 8×A100-80G 都无法轻松承载"), "8 × A100 80 GB", _server, _carries,
          figure="kv_budget", command=PLAN),
)
