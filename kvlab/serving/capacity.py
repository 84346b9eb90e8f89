"""How many requests and tokens a deployment holds: budget, pool, blocks, and the same questions the other way round.

`plan(spec, gpu, gpus, settings)`, `gpus_for(spec, need, settings)`, `longest_context(spec, gpu, gpus, need, settings)`;
`Settings`, `Plan`, `GPUOption`; `DoesNotFit` where the answer is no; `check_logs()` says how far the budget is from
start-up logs. The engine is vLLM; what differs in others is said in kvlab/serving/_budget.py.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlab.catalog.gpus import GPUSpec
from kvlab.catalog.gpus import gpu as gpu_named
from kvlab.catalog.gpus import gpus as catalogue
from kvlab.serving._article import Article, article
from kvlab.serving._budget import UTIL, Term, check_logs
from kvlab.serving._fitting import DoesNotFit, dividing, fitting_tps, refuse_ranks, terms_of, too_large
from kvlab.serving._lengths import LengthRow, length_rows
from kvlab.serving._settings import Settings, blocks_of, requests_in, shared_blocks, with_defaults
from kvlab.serving._supported import FormatRow, device_notes, format_rows
from kvlab.serving._weights import weights
from kvlab.serving.block_model import BlockModel
from kvlab.shapes import ModelSpec, positive
from kvlab.units import GiB

__all__ = ["UTIL", "DoesNotFit", "GPUOption", "Plan", "Settings", "check_logs", "gpus_for", "longest_context",
           "longest_option", "plan"]
COUNTS = (1, 2, 4, 8)           # GPUs of one server
LONGEST = 2**24                 # tokens beyond which no context is sought
PAGE = 16                       # vLLM 0.32 v1/attention/backends/flash_attn.py: MultipleOf(16)
STANDARD = Settings()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a deployment holds.

    Bytes are of one GPU; blocks, requests and tokens of one replica unless they say total. terms: VRAM and what is
    taken from it (empty where the pool is given and the weights or the device's budget are unknown); pool: what is
    left, with its interval. concurrency: blocks ÷ blocks of one request of max_len, as vLLM logs it. requests: whole
    requests of max_len that the pool holds without its null block, a prefix shared; least, most: at the ends of the
    pool's interval. live: that, or max_num_seqs if fewer. binds: "pool" or "cap". tokens: as vLLM 0.21 and later log
    the cache's size. starts: whether one request of max_len fits, without which vLLM refuses to start.
    """
    model: str
    gpu: str
    gpus: int
    tp: int
    replicas: int
    util: float
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    max_len: int
    kv_format: str
    prefix_share: float
    terms: tuple[Term, ...]
    pool: Term
    block_bytes: int
    blocks: int
    blocks_per_request: int
    shared_blocks: int
    concurrency: float
    requests: int
    least: int
    most: int
    live: int
    live_total: int
    binds: str
    tokens: int
    tokens_total: int
    starts: bool
    formats: tuple[FormatRow, ...]
    article: Article | None
    lengths: tuple[LengthRow, ...]
    notes: tuple[str, ...]


def plan(spec: ModelSpec, gpu: GPUSpec | str, gpus: int = 1, settings: Settings = STANDARD,
         lengths: Sequence[tuple[int, int]] = ()) -> Plan:
    """Budget, pool, blocks and requests of a model on `gpus` GPUs: replicas of tp GPUs each.

    lengths: (prompt, output) tokens of the requests of a trace: concurrency at their lengths is added.
    DoesNotFit: weights, or weights and a pool that is given, that no GPU holds, with the GPUs that it needs at least.
    ValueError: unknown weights or memory, gpus that tp does not divide, a tp that does not fit the heads, a block size
    that splits scale groups, a pool given for several GPUs without its tp; KeyError: an unknown name.
    Source: vLLM's budget: util × memory − weights − activations − graphs − what torch does not hold (_budget.py).
    """
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    positive(gpus=gpus)
    refuse_ranks(gpu, gpus, settings)
    whole_context = settings.max_len is None
    settings, notes = with_defaults(spec, gpu, settings), []
    if settings.tp is None:
        asked = settings
        settings, why = _least_tp(spec, gpu, gpus, asked)
        best = _best(spec, gpu, gpus, 1, asked)
        if whole_context:
            why += f", for requests of the model's whole context, {settings.max_len:,} tokens (see --max-len)"
        notes.append(why if best is None or best.tp == settings.tp else
                     f"{why}; --tp {best.tp} holds most, {best.live:,} requests at once in all")
    tp, seqs, batched, share = (settings.tp, settings.max_num_seqs, settings.max_batched_tokens,
                                settings.prefix_share)
    if tp is None or seqs is None or batched is None:
        raise RuntimeError(f"{settings} are not complete: a bug in kvlab")
    if gpus % tp:
        raise ValueError(f"{gpus} GPUs are no multiple of tp={tp}, and a replica takes tp of them; give --gpus "
                         f"{max(1, gpus // tp) * tp} or another --tp")
    model = blocks_of(spec, settings)
    terms, pool = terms_of(spec, gpu, settings, model)
    if no := too_large(spec, gpu, settings, model, terms, pool):
        raise DoesNotFit(no)
    blocks = model.blocks(pool.value)
    least, whole, most = (requests_in(model, size, share) for size in (pool.low, pool.value, pool.high))
    live, replicas, tokens = min(whole, seqs), gpus // tp, model.tokens(blocks)
    notes += device_notes(gpu, settings) + _notes(spec, settings, model, blocks, whole, least, lengths)
    return Plan(
        model=spec.name, gpu=gpu.name, gpus=gpus, tp=tp, replicas=replicas, util=settings.util,
        max_num_seqs=seqs, max_batched_tokens=batched, block_size=model.block_size,
        max_len=model.max_len, kv_format=settings.kv_format, prefix_share=share, terms=terms, pool=pool,
        block_bytes=model.block_bytes, blocks=blocks, blocks_per_request=model.blocks_per_request(),
        shared_blocks=shared_blocks(model, model.max_len, share), concurrency=model.concurrency(blocks), requests=whole,
        least=least, most=most, live=live, live_total=live * replicas,
        binds="cap" if whole > seqs else "pool", tokens=tokens, tokens_total=tokens * replicas,
        starts=whole > 0, formats=format_rows(spec, gpu, settings, pool.value),
        article=article(spec, settings, model, terms, blocks) if terms else None,
        lengths=length_rows(model, blocks, share, lengths), notes=tuple(notes))


def _notes(spec: ModelSpec, settings: Settings, model: BlockModel, blocks: int, whole: int, least: int,
           lengths: Sequence[tuple[int, int]]) -> list[str]:
    notes = [f"approximate: {model.note}"] if model.note else []
    if spec.context and model.max_len > spec.context:
        notes.append(f"max_len {model.max_len:,} is beyond the model's context of {spec.context:,} tokens")
    if whole == 0:
        notes.append(f"does not start: one request of {model.max_len:,} tokens takes {model.blocks_per_request():,} "
                     f"blocks, and the pool has {max(0, blocks - 1):,} beside its null block; see --longest")
    elif least == 0:
        notes.append("at the lower end of the pool's interval not one request of this length fits")
    if settings.block_size % PAGE:
        notes.append(f"block size {settings.block_size:,}: engines' attention kernels take multiples of {PAGE}")
    if model.block_size != settings.block_size:
        notes.append(f"blocks hold {model.block_size:,} tokens, so that a page of attention holds a recurrent state")
    longer = [sum(one) for one in lengths if sum(one) > model.max_len]
    if longer:
        notes.append(f"{len(longer):,} of {len(lengths):,} requests are longer than max_len {model.max_len:,} and left "
                     f"out (the longest: {max(longer):,} tokens)")
    return notes


def _least_tp(spec: ModelSpec, gpu: GPUSpec, gpus: int, settings: Settings) -> tuple[Settings, str]:
    """The least tp dividing gpus with room for one request of max_len; failing that, for the weights alone."""
    enough, refused = None, ValueError(f"no tp that divides {gpus} GPUs fits the heads of {spec.name}")
    for tried, model in fitting_tps(spec, dividing(gpus), settings):
        terms, pool = terms_of(spec, gpu, tried, model)
        if no := too_large(spec, gpu, tried, model, terms, pool):
            refused = DoesNotFit(no)
        elif requests_in(model, pool.value, settings.prefix_share):
            return tried, f"tp {tried.tp} is the least that fits"
        else:
            enough = enough or tried
    if enough is None:
        raise refused
    return enough, f"tp {enough.tp} is the least that holds the weights; no tp has room for one request of max_len"


@dataclass(frozen=True, slots=True)
class GPUOption:
    """The fewest GPUs of one kind that hold a load, with the tp that holds most.

    live: requests of max_len at once in all; least: at the lower end of the pool's interval. notes: of the device.
    """
    gpu: str
    gpus: int
    tp: int
    replicas: int
    live: int
    least: int
    binds: str
    memory_gib: float
    kind: str = "modelled"
    notes: tuple[str, ...] = ()


def gpus_for(spec: ModelSpec, need: int, settings: Settings = STANDARD, counts: Sequence[int] = COUNTS
             ) -> list[GPUOption]:
    """For every GPU of the catalogue (NVIDIA, AMD), the fewest of `counts` that hold `need` live requests of max_len.

    Fewest GPUs first, then least memory; a GPU of which no count is enough is left out. Refuses unknown weights, and a
    pool that is given: it belongs to one GPU. Source: plan() of every count.
    """
    positive(need=need)
    if settings.pool_known or settings.vram_gib is not None:
        raise ValueError("a pool or VRAM that is given belongs to one GPU: leave --pool-gib, --blocks and --vram-gib "
                         "out, or name the --gpu")
    weights(spec, 1, settings.weights_gib, settings.weight_bits)    # what is wrong with the question is said once
    found = []
    for gpu in catalogue().values():
        if gpu.compute_capability and gpu.memory_bytes:
            options = (_best(spec, gpu, count, need, settings) for count in counts)
            found.append(next(filter(None, options), None))
    return sorted(filter(None, found), key=lambda option: (option.gpus, option.memory_gib, option.gpu))


def _best(spec: ModelSpec, gpu: GPUSpec, gpus: int, need: int, settings: Settings) -> GPUOption | None:
    """The tp among those dividing gpus with most live requests, of two the smaller; None where those are too few."""
    options = []
    settings = with_defaults(spec, gpu, settings)
    for tried, model in fitting_tps(spec, [n for n in dividing(gpus) if settings.tp in (None, n)], settings):
        terms, pool = terms_of(spec, gpu, tried, model)
        if settings.pool_known and too_large(spec, gpu, tried, model, terms, pool):
            continue
        least, whole = (requests_in(model, size, tried.prefix_share) for size in (pool.low, pool.value))
        cap, replicas = tried.max_num_seqs, gpus // tried.tp
        if min(whole, cap) * replicas >= need:
            options.append(GPUOption(gpu.name, gpus, tried.tp, replicas, min(whole, cap) * replicas,
                                     min(least, cap) * replicas, "cap" if whole > cap else "pool",
                                     gpus * terms[0].value / GiB if terms else 0.0,
                                     notes=tuple(device_notes(gpu, settings))))
    return max(options, key=lambda option: (option.live, -option.tp), default=None)


def longest_context(spec: ModelSpec, gpu: GPUSpec | str, gpus: int = 1, need: int = 1,
                    settings: Settings = STANDARD) -> int:
    """The largest max_len at which `need` requests of that length fit at once, over all replicas; 0 if none does.

    Source: longest_option.
    """
    return longest_option(spec, gpu, gpus, need, settings)[0]


def longest_option(spec: ModelSpec, gpu: GPUSpec | str, gpus: int = 1, need: int = 1, settings: Settings = STANDARD
                   ) -> tuple[int, GPUOption | None]:
    """The longest context, and the tp and replicas that reach it; (0, None) where none does.

    At most the model's context where it is known. settings.max_len is ignored; a tp that is not set is the one which
    reaches furthest. Source: bisection, since a request's blocks never get fewer with its length (with a prefix shared,
    exact to a block).
    """
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    positive(gpus=gpus, need=need)
    refuse_ranks(gpu, gpus, settings)
    low, high, reached = 0, spec.context or LONGEST, None
    while low < high:
        middle = (low + high + 1) // 2
        found = _best(spec, gpu, gpus, need, replace(settings, max_len=middle))
        low, high, reached = (middle, high, found) if found else (low, middle - 1, reached)
    return low, reached
