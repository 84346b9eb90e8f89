"""Claims of section 4 on paged KV caches: what pages waste, what reservations waste, what a shared prefix saves."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, refuted, supported
from kvlab.claims._results import Results
from kvlab.lang import Text

SECTION = 4
NEAR_NOTHING = 0.04             # of the tokens: the most that the PagedAttention paper (arXiv 2309.06180) says of pages
WASTEFUL = 0.5                  # where less than half of the reserved room holds tokens, much of it is wasted
SAID_BLOCK = 16                 # tokens in a block, in the article's settings
SAID_LOW, SAID_HIGH = 0.3, 0.5  # the article: of the memory that a shared system prompt saves in chats
YES = 0.5                       # between the no and the yes of a fact


def _more(study: str) -> Text:
    """What would narrow an interval that reaches over a bound."""
    run = f"kvlab run {study} --size large"
    return Text(f"more seeds: {run}", f"需要更多随机种子：{run}")


def _waste(results: Results, name: str, about: Text, metric: str, *, block_size: int | None = None,
           reserved: str = "", unit: str = "share") -> Evidence:
    """One reading of the study paging about a block size, or about one way to reserve a contiguous piece."""
    from kvlab.record.asked import asked
    table = results.rows("paging")
    rows = None if table is None else asked(table, "waste")
    if rows is None or rows.empty:
        return results.lacking("paging", name, about)
    mine = rows["block_size"] == block_size if block_size else rows["reserved"] == reserved
    chosen = rows[mine.fillna(False) & (rows["metric"] == metric) & (rows["kind"] != "modelled")]
    return results.reading("paging", name, about, chosen, unit=unit)


def _fragments(results: Results) -> Iterator[Evidence]:
    yield _waste(results, "pages", Text("room left unused in blocks of 16, of the tokens held",
                                        "16 token 的 block 中空置部分，占已存 token"), "waste_of_tokens", block_size=16)
    yield _waste(results, "reserved", Text("room left unused by one piece of max_model_len per sequence, of the tokens",
                                           "每条序列预留 max_model_len 时空置部分，占已存 token"),
                 "waste_of_tokens", reserved="max_model_len", unit="ratio")
    yield _waste(results, "held", Text("sequences that one pool holds in blocks of 16",
                                       "同一个池以 16 token 分块能容纳的序列"),
                 "sequences_held", block_size=16, unit="count")
    yield _waste(results, "held_reserved", Text("sequences that it holds in pieces of max_model_len",
                                                "同一个池按 max_model_len 预留能容纳的序列"),
                 "sequences_held", reserved="max_model_len", unit="count")
    yield results.quoted("c32_named_by_vllm")


def _solves_fragments(found: Found) -> Verdict:
    pages, reserved = found["pages"], found["reserved"]
    en = (f"in a simulated trace unused room is {pages.value:.2%} of the tokens held with pages, and "
          f"{reserved.value:.1f} × the tokens with one piece of the longest length per sequence")
    zh = f"仿真请求中，分页的空置量是已存 token 的 {pages.value:.2%}，按最大长度预留则是 {reserved.value:.1f} 倍"
    held, before = found.get("held"), found.get("held_reserved")
    if held and before:
        en += f"; a pool holds {held.value:.0f} sequences in place of {before.value:.0f}"
        zh += f"；同一个池容纳 {held.value:.0f} 条序列，而不是 {before.value:.0f} 条"
    if pages.above(reserved.value):
        return refuted(en, zh)
    near = pages.below(NEAR_NOTHING)
    if near is None:
        return inconclusive(en, zh, _more("paging"))
    return supported(en, zh) if near else conditional(f"less, but not near nothing: {en}",
                                                      f"减少了，但并非近乎为零：{zh}")


def _reservations(results: Results) -> Iterator[Evidence]:
    for name, kind, en, zh in (
            ("used", "max_model_len", "one piece of max_model_len per sequence", "每条序列预留 max_model_len"),
            ("power", "next power of two", "pieces of the next power of two", "预留到下一个 2 的幂"),
            ("exact", "true length", "pieces of the length that it will reach", "按最终长度预留")):
        yield _waste(results, name, Text(f"share of the reserved room that holds tokens: {en}",
                                         f"预留空间中存有 token 的比例：{zh}"), "used_share", reserved=kind)
    yield results.quoted("c33_static_preallocates", name="static")
    yield results.quoted("c33_dynamic_grows", name="grows")


def _reserving_wastes(found: Found) -> Verdict:
    used, reserves = found["used"], found["static"]
    if not reserves.above(YES):
        return refuted("no cache that was looked at reserves ahead", "所查的缓存都不预留")
    en = f"of a piece of max_model_len per sequence {used.value:.1%} holds tokens in a simulated trace"
    zh = f"每条序列预留 max_model_len 时，仿真请求中只有 {used.value:.1%} 存有 token"
    if exact := found.get("exact"):
        en += f" ({exact.value:.0%} if the length were known)"
        zh += f"（若事先知道长度则为 {exact.value:.0%}）"
    wasteful = used.below(WASTEFUL)
    if wasteful is None:
        return inconclusive(en, zh, _more("paging"))
    if not wasteful:
        return refuted(en, zh)
    grows = found.get("grows")
    if grows and grows.above(YES):
        return conditional(f"{en}; not every cache without pages reserves: transformers' StaticCache does, its "
                           "DynamicCache grows by copying",
                           f"{zh}；但不分页的缓存未必预留：transformers 的 StaticCache 预留，DynamicCache 则靠复制增长")
    return supported(en, zh)


def _blocks(results: Results) -> Iterator[Evidence]:
    yield results.quoted("c34_default_block", name="default")
    yield _waste(results, "waste", Text("room left unused in blocks of 16, of the tokens held",
                                        "16 token 的 block 中空置部分，占已存 token"), "waste_of_tokens", block_size=16)
    yield results.finding("paging", "half a block", Text("waste against the rule of half a block: largest difference",
                                                         "空置与“半个 block”规则的最大偏差"), name="rule", unit="share")
    yield _waste(results, "waste_256", Text("the same in blocks of 256", "同上，256 token 的 block"), "waste_of_tokens",
                 block_size=256)
    yield results.finding("paging", "pages:paged", Text(
        "time of a decode call on blocks in random order ÷ on a contiguous cache",
        "block 乱序时 decode 耗时 ÷ 连续缓存"), name="time")
    yield results.quoted("c34_flashmla_block", name="flashmla")


def _sixteen(found: Found) -> Verdict:
    default, waste = found["default"], found["waste"]
    en = (f"vLLM's default is {default.value:.0f} tokens; with blocks of {SAID_BLOCK} unused room is {waste.value:.2%} "
          "of the tokens held (simulated trace)")
    zh = (f"vLLM 默认 {default.value:.0f} token；{SAID_BLOCK} token 的 block 空置量是已存 token 的 {waste.value:.2%}"
          "（仿真请求）")
    if default.value != SAID_BLOCK:
        return conditional(f"a choice, not the default: {en}", f"可以这样设，但不是默认值：{zh}")
    other = found.get("flashmla")
    if other and other.value != SAID_BLOCK:
        en += f"; some backends take others (FlashMLA {other.value:.0f})"
        zh += f"；个别后端要求其他大小（FlashMLA 为 {other.value:.0f}）"
    small = waste.below(NEAR_NOTHING)
    if small is None:
        return inconclusive(en, zh, _more("paging"))
    return supported(en, zh) if small else conditional(f"the default, but it wastes much: {en}",
                                                       f"是默认值，但空置不少：{zh}")


def _prefixes(results: Results) -> Iterator[Evidence]:
    from kvlab.record.asked import asked
    table = results.rows("prefix_sharing")
    rows = None if table is None else asked(table, "engine")
    if rows is not None and len(rows):
        rows = rows[(rows["metric"] == "live_memory_saved") & (rows["kind"] != "missing")].sort_values("rate")
    for name, en, zh, place in (("few", "at the lowest rate", "最低到达率", 0),
                                ("many", "at the highest rate", "最高到达率", -1)):
        about = Text(f"memory saved per running request in a simulated engine, {en}",
                     f"模拟引擎中每个运行请求省下的显存，{zh}")
        if rows is None or rows.empty:
            yield results.lacking("prefix_sharing", name, about)
            continue
        row = rows.iloc[[place]]
        rate = f"{row['rate'].iloc[0]:g}"
        yield results.reading("prefix_sharing", name, Text(f"{about.en} ({rate}/s)", f"{about.zh}（{rate}/s）"), row,
                              unit="share")
    yield results.finding("prefix_sharing", "formula", Text(
        "saving counted in the block pool against f(R − 1)/R: largest difference",
        "block 池中数出的节省与 f(R − 1)/R 的最大偏差"), name="formula", unit="share")
    yield results.finding("prefix_sharing", "prefill: 0.5", Text(
        "time saved on a prompt half of which is cached (smollm2-135m)",
        "prompt 一半命中缓存时省下的时间（smollm2-135m）"), name="time", unit="share")
    yield results.quoted("c39_pool_at_start", name="pool")


def _saves_30_to_50(found: Found) -> Verdict:
    few, many = found["few"], found["many"]
    en = f"{few.value:.0%} where few requests share, {many.value:.0%} where many do, in one simulated workload"
    zh = f"同一仿真负载下，并发共享少时 {few.value:.0%}，多时 {many.value:.0%}"
    if few.above(SAID_HIGH) or many.below(SAID_LOW):
        return refuted(en, zh)
    under, over = few.below(SAID_LOW), many.above(SAID_HIGH)
    if under or over:
        return conditional(f"{en}: it is f(R − 1)/R for R live sharers of a share f, no constant",
                           f"{zh}：节省为 f(R − 1)/R（R 个并存请求共享比例 f），不是常数")
    if under is None or over is None:
        return inconclusive(en, zh, _more("prefix_sharing"))
    return supported(en, zh)


CLAIMS = (
    Claim("C32", Text("Paged Attention, vLLM's core idea, does away with fragmented KV memory",
                      "Paged Attention 是 vLLM 的核心创新，解决了 KV 显存碎片化"), "no fragmentation",
          _fragments, _solves_fragments, ("paging",), "paging"),
    Claim("C33", Text("Earlier systems reserve the longest length in one piece per request and waste much of it",
                      "传统方案为每个请求预留最大长度的连续显存，浪费严重"), "max seq_len reserved",
          _reservations, _reserving_wastes, ("paging",), "paging"),
    Claim("C34", Text("Blocks of 16 tokens are the setting for a paged cache", "分页缓存的 block 设为 16 个 token"),
          "block_size=16", _blocks, _sixteen, ("paging",), "paging"),
    Claim("C39", Text("A shared system prompt saves 30 to 50 % of the memory in chats",
                      "对话场景下共享 system prompt 可省 30%–50% 显存"), "30%–50%",
          _prefixes, _saves_30_to_50, ("prefix_sharing",), "prefix_sharing"),
)
