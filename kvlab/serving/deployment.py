"""A model on so many GPUs as the simulator needs it: blocks, replicas, step time, each with its kind and source."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.catalog.gpus import gpu as gpu_named
from kvlab.serving._weights import parameters, weights
from kvlab.serving.capacity import Settings, plan
from kvlab.serving.model_work import ranked
from kvlab.serving.request import Request
from kvlab.serving.step_models import Parts, chosen_rates, parts, rates_of_kernels
from kvlab.shapes import ModelSpec, positive

if TYPE_CHECKING:
    from kvlab.serving.traces import Trace


@dataclass(frozen=True, slots=True)
class Deployment:
    """blocks: of one replica, the null block included. max_num_seqs, max_num_batched_tokens: vLLM's defaults here."""
    step_time: Parts
    replicas: int
    tp: int
    blocks: int
    blocks_kind: str
    blocks_source: str
    max_num_seqs: int
    max_num_batched_tokens: int


def deployment(spec: ModelSpec, gpu: str, gpus: int = 1, *, tp: int | None = None, blocks: int | None = None,
               constants: str | None = None, settings: Settings | None = None) -> Deployment:
    """Blocks by the capacity model unless given, step time by the data sheet and by constants of real runs.

    settings: as for `kvlab plan`; tp and blocks stand above what it says. constants: whose of data/engine_rates.csv.
    Each replica is an engine of its own, with all of a mixture's experts. ValueError: as `plan`, and unknown weights.
    """
    device, settings = gpu_named(gpu), settings or Settings()
    known = replace(settings, tp=settings.tp if tp is None else tp,
                    blocks=settings.blocks if blocks is None else blocks)
    found = plan(spec, device, gpus, known)
    replicas = gpus // found.tp
    spec = replace(spec, params=parameters(spec))
    # Smaller weights are read faster; they are multiplied in 16 bits all the same.
    itemsize = weights(spec, 1, known.weights_gib, known.weight_bits).value / spec.params if spec.params else 2.0
    work = ranked(spec, tp=found.tp, kv_format=found.kv_format, itemsize=itemsize)
    given = known.blocks is not None
    return Deployment(parts(device, work, chosen_rates(device.name, constants, ranks=found.tp)), replicas, found.tp,
                      found.blocks,
                      "quoted" if given else found.pool.kind,
                      "argument" if given else "kvlab plan: " + found.pool.how, found.max_num_seqs,
                      found.max_batched_tokens)


def measured_deployment(spec: ModelSpec, results: Path | str, blocks: int, *, variant: str | None = None,
                        max_num_seqs: int = 8, max_num_batched_tokens: int = 512) -> Deployment:
    """One engine on the machine that a kvlab run measured: its memory's and matrix products' rates, its attention's.

    The pool is not modelled for such a machine: blocks must be given.
    """
    positive(blocks=blocks)
    rates_found, machine, bandwidth, peak, itemsize = rates_of_kernels(results, variant)
    kv_format = {4: "fp32", 2: "bf16"}[itemsize]
    work = ranked(spec, kv_format=kv_format, itemsize=itemsize)
    step = Parts(work, bandwidth, peak, rates_found, machine, rates_found.source)
    return Deployment(step, 1, 1, blocks, "quoted", "argument", max_num_seqs, max_num_batched_tokens)


def requests_of(what: str, count: int | None, rate: float | None, seed: int, bad: str = "refuse"
                ) -> tuple[Iterator[Request], Trace | None]:
    """Requests of a trace's file, and the trace, which counts what it left out as they are taken; or drawn from a
    workload of data/workloads.csv. rate: mean arrivals per second.

    A trace's own times are scaled to the rate, for which it is held in memory. ValueError, KeyError, OSError: neither a
    file nor a workload, or a trace that is refused.
    """
    from itertools import islice

    from kvlab.serving.traces import read_trace
    from kvlab.serving.workloads import synthetic, workloads
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"rate={rate!r} must be above 0 requests per second")
    if count is not None:
        positive(count=count)
    if what in workloads():
        return synthetic(what, count or 1000, rate, seed), None
    if not Path(what).exists():
        raise ValueError(f"{what} is neither a file nor a workload; workloads: {', '.join(workloads())}")
    trace = read_trace(what, bad=bad)
    taken = islice(trace, count)
    return (taken if rate is None else iter(at_rate(list(taken), rate, what))), trace


def at_rate(held: Sequence[Request], rate: float, what: str) -> list[Request]:
    """The requests with their times scaled to so many arrivals per second. ValueError: they all arrive at once."""
    span = held[-1].arrival_s - held[0].arrival_s if held else 0.0
    if not span:
        raise ValueError(f"the requests of {what} all arrive at once; --rate has no gaps to scale")
    factor = (len(held) - 1) / span / rate
    return [replace(one, arrival_s=one.arrival_s * factor) for one in held]
