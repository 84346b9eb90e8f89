"""Rows of runs of the studies batching, monitoring and capacity whose every number is known. Tests only."""
import json
from dataclasses import asdict

from kvlab.record.reading import Reading, missing, table

RUN = "20261130T081500Z-5e4e15"
CONV, SHARE = "workload:azure_2023_conv", "workload:sharegpt_300"


def row(question, metric, value, ends=(None, None), unit="ratio", kind="simulated", data=CONV, why="", **shown):
    """One reading; value None = missing, with why."""
    about = dict(source="serving.simulator", hardware="simulated RTX 4090")
    reading = (missing(metric, unit, why, **about) if value is None else
               Reading(metric, value, unit, kind, low=ends[0], high=ends[1], n=5, method="said", **about))
    case = json.dumps(dict(question=question, **shown), sort_keys=True)
    return {"run_id": RUN, "study": "made", "device": "none", "data": data, "comparison_id": case, "case_id": case,
            "case": case, "scope": "comparison", **asdict(reading)}


def near(value):
    """An interval of 2 % around a value."""
    return 0.98 * value, 1.02 * value


def policy(label, mean, tail, data=CONV, ends=near, long=1.1, preempted=0.14):
    return [row("policy", "ttft_mean_s_ratio", mean, ends(mean), data=data, label=label),
            row("policy", "ttft_p99_s_ratio", tail, ends(tail), data=data, label=label),
            row("policy", "ttft_long_mean_s_ratio", long, ends(long), data=data, label=label),
            row("policy", "tokens_per_s_ratio", 1.0, ends(1.0), data=data, label=label),
            row("policy", "preemption_ratio", preempted, ends(preempted), data=data, label=label)]


def static(rate=1.9, ends=near):
    rows = []
    for x in (0.25, 1.5):
        for label, tokens, first, used in (("continuous", 400 * x, 0.2, 0.5), ("static", 200 * x, 9.0, 0.7)):
            rows += [row("static", "tokens_per_s", tokens, near(tokens), "token/s", label=label, x=x),
                     row("static", "ttft_mean_s", first, near(first), "s", label=label, x=x),
                     row("static", "kv_usage_mean", used, near(used), label=label, x=x)]
        rows += [row("static", "tokens_per_s_ratio", rate, ends(rate), label="continuous", x=x),
                 row("static", "ttft_mean_s_ratio", 0.03, near(0.03), label="continuous", x=x)]
    return rows


def starvation(strict=(50.0, 2.5), aged=(25.0, 0.5), ends=near):
    rows = []
    for label, (wait, ratio) in {"fcfs": (20.0, 1.0), "short first": strict, "short first, aging 10 s": aged}.items():
        rows += [row("starvation", "ttft_long_max_s", wait, near(wait), "s", label=label),
                 row("starvation", "ttft_long_max_s_ratio", ratio, ends(ratio), label=label),
                 row("starvation", "ttft_short_mean_s", 1.0, near(1.0), "s", label=label)]
    return rows


def budget():
    rows = []
    for size, gap in ((512, 0.06), (65536, 0.3)):
        rows += [row("budget", "itl_p99_s", gap, near(gap), "s", label=f"{size:,}", x=size),
                 row("budget", "tpot_mean_s", 0.03, near(0.03), "s", label=f"{size:,}", x=size)]
        rows += [row("budget", f"{metric}_ratio", value, near(value), label=f"{size:,}", x=size)
                 for metric, value in (("itl_p99_s", gap / 0.06), ("tokens_per_s", 1.0), ("ttft_mean_s", 1.5))]
    return rows


def seqs(eighty=0.95, onset=1.0, ends=near):
    rows = []
    for share, tokens in ((0.4, 480), (0.8, 680), (1.0, 710), (2.0, 700)):
        preempted = 0.12 if share >= onset else 0.0
        ratio = eighty if share == 0.8 else tokens / 710
        rows += [row("max_num_seqs", "tokens_per_s", tokens, near(tokens), "token/s", label=f"{share:.0%}", x=share),
                 row("max_num_seqs", "tokens_per_s_ratio", ratio, ends(ratio), label=f"{share:.0%}", x=share),
                 row("max_num_seqs", "preemption_ratio", preempted, (preempted, preempted), label=f"{share:.0%}",
                     x=share)]
    return rows


def levers():
    rows = []
    for label, preempted, tokens, cut, refused in (("as it is", 0.13, 700, 0, 0), ("25 % more blocks", 0.1, 750, 0, 0),
                                                   ("max_model_len 2,048", 0.03, 830, 0.016, 0.141)):
        rows += [row("lever", "preemption_ratio", preempted, near(preempted), label=label),
                 row("lever", "tokens_per_s", tokens, near(tokens), "token/s", label=label),
                 row("lever", "cut_share", cut, (cut, cut), label=label),
                 row("lever", "rejected_share", refused, (refused, refused), label=label)]
        if label != "as it is":
            rows += [row("lever", "tokens_per_s_ratio", tokens / 700, near(tokens / 700), label=label),
                     row("lever", "e2e_p99_s_ratio", 0.9, near(0.9), label=label)]
    return rows


def preempted(same=1.0, complete=1.0):
    rows = [row("preempted", metric, value, ends, unit, "measured", "pydoc:types", num_blocks=23)
            for metric, value, ends, unit in (("preemptions", 7, (None, None), "count"),
                                              ("same_answer_share", same, (0.79, 1.0), "ratio"),
                                              ("complete_share", complete, (0.79, 1.0), "ratio"))]
    return [{**one, "n": 16, "model": "smollm2-135m", "hardware": "a CPU"} for one in rows]


def spans():
    rows = []
    for label, what in (("fcfs", "preempted"), ("short first", "decode")):
        for request, began in (("0", 0.0), ("1", 1.0)):
            rows += [row("gantt", "span_s", 2.0, unit="s", label=label, request=request, what="queued", began_s=began,
                         num_blocks=11),
                     row("gantt", "span_s", 3.0, unit="s", label=label, request=request, what=what, began_s=began + 2,
                         num_blocks=11)]
        rows += [row("gantt_blocks", "blocks_used", used, unit="count", label=label, t=t, num_blocks=11)
                 for t, used in ((1.0, 4), (5.0, 9))]
    return rows


def batching():
    return table([*static(), *policy("fcfs", 1.0, 1.0), *policy("short first", 0.7, 1.0),
                  *policy("shortest prefill", 0.3, 2.4), *policy("short first", 0.87, 0.99, SHARE), *starvation(),
                  *budget(), *seqs(), *levers(), *preempted(), *spans()])


def alarm(name, false=0.0, soon=60.0, clear=300.0):
    about = dict(calm_s=900.0, burst_s=180.0, alarm=name)
    return [row("alarm", "false_share", false, near(false), **about),
            row("alarm", "detected_after_s", soon, (None, None), "s", why="it did not fire in 2 of 5 seeds", **about),
            row("alarm", "cleared_after_s", clear, (None, None), "s", why="it was still on at the end in 5 of 5 seeds",
                **about)]


def monitoring():
    about = dict(calm_s=900.0, burst_s=180.0)
    rows = [*alarm("KV usage"), *alarm("evictions > 0", 1.0, 0.0, None)]
    for i in range(8):
        t = 300.0 * i
        burst = t == 1200.0
        for metric, value, unit in (("running", 20 if burst else 5, "count"), ("waiting", 50 if burst else 0, "count"),
                                    ("kv_usage", 0.97 if burst else 0.4, "ratio"),
                                    ("cache_evictions", 3000.0 * i, "count")):
            rows.append(row("curve", metric, value, unit=unit, t=t, **about))
        rows += [row("strip", "firing", float(burst), t=t, alarm="KV usage", **about),
                 row("strip", "firing", 1.0, t=t, alarm="evictions > 0", **about)]
    return table(rows)


def log(name, verdict, ratio):
    return row("log", "predicted_to_logged", ratio, kind="modelled", why="nothing to compare", data="", id=name,
               verdict=verdict, what="kv_tokens")


def server(name, logged, modelled, factor, fitted=False, inside=True):
    about = dict(data="", id=name, engine="vLLM", fitted=fitted, inside=inside, vram_gib=24.0, weights_gib=15.0)
    return [row("budget", "pool_gib", logged, unit="GiB", kind="quoted", **about),
            row("budget", "pool_gib", modelled, near(modelled), "GiB", "modelled", **about),
            row("budget", "safety_factor", factor, kind="quoted", why="no factor serves", **about)]


def capacity():
    return table([log("a", "agreed", 1.0), log("b", "agreed", 1.0), log("c", "explained", 1.1),
                  log("d", "unexplained", 2.0), log("e", "unmatched", None), *server("one", 5.0, 5.24, 1.8),
                  *server("two", 6.0, 6.48, 1.4, inside=False), *server("three", 7.0, 7.0, 1.29, fitted=True),
                  *server("four", -1.0, -1.2, None)])
