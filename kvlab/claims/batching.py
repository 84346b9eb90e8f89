"""Claims of section 6: continuous batching, its settings, who goes first, and how many at a time."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, refuted, supported
from kvlab.claims._results import Results, catalogue, given
from kvlab.claims._serving import by_release, less, row, times
from kvlab.lang import Text

SECTION = 6
CALM, FLOODED = 0.25, 1.5       # arrivals as a share of what the engine serves: hardly any queue, far too many
BUSY = 0.5                      # a GPU that reaches less than half of its peak is not highly utilised
SEQS, GPU = 16, "A100 SXM4 80GB"
RULE = 0.8                      # the article: of what memory bears
FLAT = 0.02                     # a change of throughput below this is none
AZURE, SHAREGPT = "workload:azure_2023_conv", "workload:sharegpt_300"
MORE_SEEDS = Text("kvlab run batching --size large: 5,000 requests in place of 600",
                  "kvlab run batching --size large：5000 个请求，而不是 600 个")


def _static(results: Results) -> Iterator[Evidence]:
    yield row(results, "batching", "static", "tokens_per_s_ratio", "tokens_flooded", Text(
        f"tokens/s, continuous ÷ static, at {FLOODED:g} × what the engine serves",
        f"到达率为可服务量 {FLOODED:g} 倍时，吞吐：连续 ÷ 静态"),
        label="continuous", x=FLOODED)
    yield row(results, "batching", "static", "tokens_per_s_ratio", "tokens_calm", Text(
        f"tokens/s, continuous ÷ static, at {CALM:g} × what the engine serves",
        f"到达率为可服务量 {CALM:g} 倍时，吞吐：连续 ÷ 静态"),
        label="continuous", x=CALM)
    yield row(results, "batching", "static", "ttft_mean_s_ratio", "ttft_calm", Text(
        f"mean TTFT, continuous ÷ static, at {CALM:g} ×", f"到达率 {CALM:g} 倍时，平均 TTFT：连续 ÷ 静态"),
        label="continuous", x=CALM)


def _refills(found: Found) -> Verdict:
    tokens, wait = found["tokens_flooded"], found["ttft_calm"]
    en = (f"{times(tokens)} the tokens/s of static batches under overload, {times(wait)} their mean TTFT when calm "
          "(simulated)")
    zh = f"过载时吞吐为静态批处理的 {times(tokens)}，轻载时平均 TTFT 为其 {times(wait)}（仿真）"
    if tokens.above(1) is None:
        return inconclusive(en, zh, MORE_SEEDS)
    if tokens.above(1):
        return supported(en, zh) if wait.below(1) else conditional(en, zh)
    return refuted(en, zh)


def _utilised(results: Results) -> Iterator[Evidence]:
    from kvlab.catalog.gpus import gpu
    card = gpu(GPU)
    ridge = given(card.ridge("bf16"), "a ridge point")
    yield catalogue("decode_compute", Text(f"share of {GPU}'s peak that {SEQS} decoding sequences can use at most",
                    f"{SEQS} 条序列的解码步最多能用到 {GPU} 峰值算力的比例"), min(1.0, SEQS / ridge), "share",
                    f"{card.source}: weights in bf16 give {SEQS} flop/B, the ridge is {ridge:.0f}")
    yield from list(_static(results))[:2]
    calm, full = (row(results, "batching", "static", "tokens_per_s", f"at_{x:g}", Text("tokens/s", "吞吐"),
                      label="continuous", x=x) for x in (CALM, FLOODED))
    about = Text(f"tokens/s at {CALM:g} × ÷ tokens/s under overload, continuous",
                 f"连续批处理：{CALM:g} 倍到达率的吞吐 ÷ 过载吞吐")
    if calm.value is None or full.value is None:
        yield results.lacking("batching", "calm_share", about)
    else:
        low, high = ((None if a is None or b is None else a / b)
                     for a, b in ((calm.low, full.high), (calm.high, full.low)))
        yield Evidence("calm_share", about, calm.value / full.value, "share", "simulated", low, high, calm.n,
                       calm.source)


def _busy(found: Found) -> Verdict:
    gain, calm, compute = found["tokens_flooded"], found["calm_share"], found["decode_compute"]
    en = (f"where requests queue it gives {times(gain)} the tokens/s of static batches; at {CALM:g} × load it gives "
          f"{calm.value:.0%} of that (simulated), and {SEQS} decoding sequences use {compute.value:.0%} of the peak at "
          "most")
    zh = (f"有排队时吞吐为静态的 {times(gain)}；负载 {CALM:g} 倍时只有过载吞吐的 {calm.value:.0%}（仿真），"
          f"而 {SEQS} 条序列解码最多用到峰值算力的 {compute.value:.0%}")
    if gain.above(1) is None:
        return inconclusive(en, zh, MORE_SEEDS)
    if not gain.above(1):
        return refuted(en, zh)
    return supported(en, zh) if calm.above(BUSY) and compute.value >= BUSY else conditional(en, zh)


def _short_first(results: Results) -> Iterator[Evidence]:
    for metric, name, data, en, zh in (
            ("ttft_mean_s_ratio", "mean_azure", AZURE, "mean TTFT", "平均 TTFT"),
            ("ttft_mean_s_ratio", "mean_sharegpt", SHAREGPT, "mean TTFT", "平均 TTFT"),
            ("ttft_long_mean_s_ratio", "long_azure", AZURE, "mean TTFT of prompts from 512 tokens on",
             "512 token 及以上提示的平均 TTFT"),
            ("ttft_long_mean_s_ratio", "long_sharegpt", SHAREGPT, "mean TTFT of prompts from 512 tokens on",
             "512 token 及以上提示的平均 TTFT")):
        load = data.removeprefix("workload:")
        yield row(results, "batching", "policy", metric, name, Text(
            f"{en}, short first ÷ fcfs, {load}", f"{zh}：短请求优先 ÷ fcfs，{load}"), label="short first", data=data)
    yield row(results, "batching", "starvation", "ttft_long_max_s_ratio", "longest_wait", Text(
        "longest wait of a long prompt while short ones keep coming, short first ÷ fcfs",
        "短请求不断到来时，长提示的最长等待：短请求优先 ÷ fcfs"), label="short first")
    yield from by_release("keys", "kwarg", ("short_threshold", "short_weight"), Text(
        "the keys short_threshold and short_weight", "键 short_threshold 与 short_weight"))


def _trade(found: Found) -> Verdict:
    means, longs = ([found[f"{name}_{load}"] for load in ("azure", "sharegpt")] for name in ("mean", "long"))
    worst = found["longest_wait"]
    mean, long = (" / ".join(times(one) for one in some) for some in (means, longs))
    en = (f"mean TTFT is {mean} that of fcfs on two workloads; that of long prompts {long}, their longest wait "
          f"{times(worst)} (simulated)")
    zh = f"两种负载下平均 TTFT 为 fcfs 的 {mean}；长提示为 {long}，其最长等待为 {times(worst)}（仿真）"
    falls = [one.below(1) for one in means]
    if None in falls:
        return inconclusive(en, zh, MORE_SEEDS)
    if not any(falls):
        return refuted(en, zh)
    paid = [one.above(1) for one in (*longs, worst)]
    if any(paid) or not all(falls):
        return conditional(en, zh)
    return inconclusive(en, zh, MORE_SEEDS) if None in paid else supported(en, zh)


def _eighty(results: Results) -> Iterator[Evidence]:
    for metric, name, share, en, zh in (
            ("tokens_per_s_ratio", "tokens_80", RULE,
             "tokens/s at 80 % ÷ at 100 % of the requests of mean length that fit",
             "吞吐：按平均长度可容纳请求数的 80% ÷ 100%"),
            ("preemption_ratio", "preempted_80", RULE, "preemptions per request at 80 %", "80% 时每请求抢占次数"),
            ("preemption_ratio", "preempted_100", 1.0, "preemptions per request at 100 %", "100% 时每请求抢占次数")):
        yield row(results, "batching", "max_num_seqs", metric, name, Text(en, zh), x=share,
                  unit="ratio" if share == RULE and "tokens" in metric else "share")
    yield _bounds(results)


def _bounds(results: Results) -> Evidence:
    """How far apart the two meanings of “what memory bears” are, for the engine that the study simulates."""
    from kvlab.catalog import rows
    from kvlab.record.asked import asked
    about = Text("requests that memory bears at their mean length ÷ at max_model_len",
                 "显存可承受的请求数：按平均长度 ÷ 按 max_model_len")
    table = results.rows("batching")
    whole = table if table is None else asked(table, "max_num_seqs")
    whole = whole if whole is None or whole.empty else whole[whole["x"] == 1.0]
    log = next((one for one in rows("server_logs.csv") if one["id"] == "58"), None)
    if whole is None or whole.empty or log is None:
        return results.lacking("batching", "bounds", about)
    by_length = float(log["kv_tokens"]) / float(log["max_model_len"])
    return catalogue("bounds", about, float(whole["max_num_seqs"].iloc[0]) / by_length, "ratio",
                     f"{log['source']}: {log['kv_tokens']} tokens, max_model_len {log['max_model_len']}; batching")


def _rule(found: Found) -> Verdict:
    tokens, bounds = found["tokens_80"], found["bounds"]
    at_80, at_100 = found["preempted_80"], found["preempted_100"]
    en = (f"80 % of the mean-length bound: {times(tokens, 3)} the tokens/s of 100 %, {at_80.value:.1%} preemptions "
          f"a request in place of {at_100.value:.1%} (simulated); which bound is meant matters more: max_model_len "
          f"gives one {bounds.value:.0f} × lower")
    zh = (f"取平均长度上限的 80%：吞吐为 100% 时的 {times(tokens, 3)}，每请求抢占由 {at_100.value:.1%} 降到 "
          f"{at_80.value:.1%}（仿真）；更要紧的是指哪个上限：按 max_model_len 算要低 {bounds.value:.0f} 倍")
    relieves, costs = less(at_80, at_100), tokens.below(1 - FLAT)
    if None in (relieves, costs):
        return inconclusive(en, zh, MORE_SEEDS)
    if costs and not relieves:
        return refuted(en, zh)
    return supported(en, zh) if relieves and not costs and bounds.below(1 / RULE) else conditional(en, zh)


CLAIMS = (
    Claim("C51", Text("Static batches wait for their last request; continuous ones refill as requests end",
                      "静态批处理要等整批完成，连续批处理在有请求完成时立即填入新请求"), "continuous > static",
          _static, _refills, ("batching",), "batching"),
    Claim("C52", Text("Continuous batching keeps the GPU highly utilised", "连续批处理使 GPU 利用率保持高位"),
          "high utilisation", _utilised, _busy, ("batching",), "batching"),
    Claim("C57", Text("Short requests first (threshold 512, weight 2.0): long ones then block nobody",
                      "短请求优先（阈值 512，权重 2.0），避免长请求阻塞"), "512, 2.0", _short_first, _trade,
          ("batching",), "batching_policies"),
    Claim("C58", Text("max_num_seqs belongs at 80% of what memory bears, as a buffer for bursts",
                      "max_num_seqs 设为显存可承受上限的 80%，为突发流量留余量"), "80 %", _eighty, _rule,
          ("batching",), "batching_limits"),
)
