"""One step of the article's model on the article's GPU, by bytes and flop: what claims of section 1 rest on."""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.serving.step_time import Batch, Roofline

MODEL, GPU = "Qwen/Qwen2-72B-Instruct", "A100 SXM4 80GB"
CONTEXT = 2048                  # tokens: the article's example


@cache
def roofline(gpu: str = GPU) -> Roofline:
    """A step in 16 bits at the data sheet's rates, the best that any kernel could do; tensor parallelism cancels out.

    Refused (ValueError): a GPU whose bandwidth or dense 16-bit rate is unknown.
    Source: Work of kvlab.serving.model_work; data/gpus.csv.
    """
    from kvlab.catalog.gpus import gpu as gpu_named
    from kvlab.catalog.models import model
    from kvlab.serving.model_work import ranked
    from kvlab.serving.step_time import Roofline
    sheet, spec = gpu_named(gpu), model(MODEL)
    peak = sheet.flops["bf16"] or sheet.flops["fp16"]
    if not peak or not sheet.bandwidth:
        raise ValueError(f"the catalogue gives no bandwidth or no dense 16-bit rate of {sheet.name}; choose another "
                         "of `kvlab ls gpus`")
    return Roofline(ranked(spec), sheet.bandwidth, peak, sheet.name,
                    f"{spec.name}, {spec.source}; {sheet.name}, {sheet.source}")


def decode(batch_size: int, kv_len: int = CONTEXT) -> Batch:
    """One new token for each of batch_size sequences of kv_len tokens."""
    from kvlab.serving.step_time import Batch
    return Batch(decode_seqs=batch_size, kv_tokens=batch_size * kv_len, sequences=batch_size)


def prefill(tokens: int = CONTEXT) -> Batch:
    """One prompt of so many tokens, all in one step."""
    from kvlab.serving.step_time import Batch
    return Batch(prefill_tokens=tokens, kv_tokens=tokens, prefill_pairs=tokens * (tokens + 1) // 2, sequences=1)


def kv_share(batch: Batch) -> float:
    """K and V among the bytes that the step reads (0 to 1)."""
    work = roofline().work
    return work.kv_bytes(batch) / work.bytes(batch)


def mfu(batch: Batch, gpu: str = GPU) -> float:
    """Share of the peak flop/s that the step reaches at best (0 to 1)."""
    best = roofline(gpu)
    return best.work.flops(batch) / best(batch) / best.flops


def memory_to_compute(batch: Batch) -> float:
    """Time that the step's bytes take over the time that its flop take: above 1 memory is the limit."""
    best = roofline()
    return best.work.bytes(batch) / best.bandwidth / (best.work.flops(batch) / best.flops)


def gain(batch: Batch, compute: float = 2.0) -> float:
    """How many times as fast the step is with `compute` times the flop/s and the same memory."""
    best = roofline()
    return best(batch) / replace(best, flops=compute * best.flops)(batch)


def tokens_at_share(share: float = 0.5) -> int:
    """Cached tokens, over all sequences, from which K and V make more than that share of a decode step's bytes."""
    work = roofline().work
    return int(share / (1 - share) * work.weight_bytes / work.kv_bytes_per_token)
