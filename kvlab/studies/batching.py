"""What does continuous batching buy, and what do its policies, its limits and its memory decide?

Tests the article's claims about batching: that static batches waste the GPU, that short requests should go first
(threshold 512, weight 2.0), that 65,536 tokens is a budget to set, that max_num_seqs belongs at 80 % of what memory
bears, and that preemptions call for more memory or a shorter max_model_len. All but one case is simulated: the
scheduler steps as vLLM's does, over real blocks, and each step takes the time of a model that was fitted to one real
engine. Whether preempted requests are cut short is measured on a small real model.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvlab.studies import _batching_preempted, _batching_spans, _serving
from kvlab.studies._batching_findings import findings
from kvlab.studies._batching_preempted import Preempted
from kvlab.studies._batching_spans import Spans
from kvlab.studies._run import Case
from kvlab.studies._serving import BLOCKS, Load, Serving, capacity_of

__all__ = ["METRICS", "SIZES", "cases", "findings", "run"]
SIZES = ("smoke", "small", "large")
METRICS = {**_serving.METRICS, **_batching_spans.METRICS, **_batching_preempted.METRICS}
WORKLOAD, RECORDED = "azure_2023_conv", "sharegpt_300"          # the second: what the recorded engine was sent
# arrivals as a share of what the engine can serve: some queue, and far too many
RATES = (0.25, 0.5, 0.75, 0.9, 1.1, 1.5)
BUSY, FLOODED, SUSTAINED = 0.9, 1.5, 1.2
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384, 65536)
# max_num_seqs as a share of the requests of mean length that the blocks bear
SEQS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0)
STRICT = (("policy", "short_first"),)
POLICIES = {
    "fcfs": (), "short first": STRICT, "short first, aging 30 s": (*STRICT, ("aging_s", 30.0)),
    "short first, prompt + output": (*STRICT, ("short_by", "most")),
    "shortest prefill": (("policy", "shortest_prefill"),),
    "shortest prefill, aging 30 s": (("policy", "shortest_prefill"), ("aging_s", 30.0)),
    "fcfs, first chunk admits": (("admission", "first_chunk"),),
    "fcfs, worst case set aside": (("admission", "worst_case"),),
}
ON_RECORDED = ("fcfs", "short first", "short first, aging 30 s", "shortest prefill")
AGING = ("aging_s", 10.0)
STARVING = {"fcfs": (), "short first": STRICT, "short first, aging 10 s": (*STRICT, AGING),
            "shortest prefill": POLICIES["shortest prefill"],
            "shortest prefill, aging 10 s": (*POLICIES["shortest prefill"], AGING)}     # the baseline: without the last
FEW = dict(requests=3, prompt_tokens=8, longer=2, new_tokens=6, block_size=4, num_blocks=11)
LEVERS = {"25 % more blocks": dict(num_blocks=BLOCKS * 5 // 4), "max_num_seqs 80 %": dict(seqs=0.8),
          "max_model_len 2,048": dict(max_model_len=2048), "watermark 5 %": dict(watermark=0.05),
          "worst case set aside": dict(admission="worst_case")}


def cases(size: str, *, device: str = "cpu", variants=None, model: str | None = None) -> Iterator[Case]:
    """Static or continuous, policies, starvation, budgets, max_num_seqs, what relieves memory, preempted answers."""
    if variants or model:
        raise ValueError("batching simulates one recorded engine: it takes neither --variants nor --model; "
                         "`kvlab simulate MODEL --gpu …` serves any other")
    count = {"smoke": 100, "small": 600, "large": 5000}[size]
    seeds = (0, 1, 2) if size == "smoke" else (0, 1, 2, 3, 4)
    load = Load(WORKLOAD, count)
    served, borne = capacity_of(load)

    def case(question, label, rate, config=(), **more):
        arriving = replace(load, rate=round(rate * served, 4))
        return Serving(question, label, arriving, tuple(config), seeds=seeds, **more)
    for rate in RATES[1::3] if size == "smoke" else RATES:
        yield case("static", "continuous", rate, x=rate, baseline=(("batching", "static"),))
        yield case("static", "static", rate, (("batching", "static"),), x=rate)
    for label, config in POLICIES.items():
        yield case("policy", label, FLOODED, config, baseline=())
    recorded = Load(RECORDED, min(count, 300))
    for label in ON_RECORDED:
        yield Serving("policy", label, recorded, POLICIES[label], seeds=seeds, baseline=())
    shorts = Load(WORKLOAD, 2 * count, rate=1.0, long_every=10)
    shorts = replace(shorts, rate=round(SUSTAINED * capacity_of(shorts)[0], 4))
    for label, config in STARVING.items():
        yield Serving("starvation", label, shorts, config, seeds=seeds, baseline=config[:-1])
    for budget in BUDGETS[::3] if size == "smoke" else BUDGETS:
        yield case("budget", f"{budget:,}", BUSY, (("max_num_batched_tokens", budget),), x=float(budget),
                   baseline=(("max_num_batched_tokens", BUDGETS[0]),))
    for share in SEQS[::4] if size == "smoke" else SEQS:
        yield case("max_num_seqs", f"{share:.0%}", FLOODED, (("max_num_seqs", max(1, round(share * borne))),), x=share,
                   baseline=(("max_num_seqs", round(borne)),))
    yield case("lever", "as it is", FLOODED)
    for label, change in LEVERS.items():
        config = [(name, value) for name, value in change.items() if name not in ("num_blocks", "seqs")]
        config += [("max_num_seqs", round(change["seqs"] * borne))] if "seqs" in change else []
        yield case("lever", label, FLOODED, config, num_blocks=change.get("num_blocks", BLOCKS), baseline=())
    for label in ("fcfs", "short first", "fcfs, worst case set aside"):
        yield Spans(label, POLICIES[label])
    yield Preempted(**FEW) if size == "smoke" else Preempted()


def run(case: Serving | Spans | Preempted, *, artifacts=None, watch=None) -> list[dict]:
    """Simulate the case, for each of its seeds; a small real model answers the preempted requests."""
    return case.rows()
