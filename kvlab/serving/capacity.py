"""How many requests and tokens a deployment holds: budget, pool, blocks, and the same questions the other way round.

`plan(spec, gpu, gpus, settings)`, `gpus_for(spec, need, settings)`, `longest_context(spec, gpu, gpus, need, settings)`;
`Settings`, `Plan`, `GPUOption`; `check_logs()` says how far the budget is from start-up logs. The engine is vLLM; what
differs in others is said in kvlab/serving/_budget.py.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlab.catalog.gpus import GPUSpec
from kvlab.catalog.gpus import gpu as gpu_named
from kvlab.catalog.gpus import gpus as catalogue
from kvlab.serving import _budget
from kvlab.serving._article import Article, article
from kvlab.serving._budget import UTIL, Term, check_logs
from kvlab.serving._lengths import LengthRow, length_rows
from kvlab.serving._settings import Settings, blocks_of, requests_in, shared_blocks, with_defaults
from kvlab.serving._supported import FormatRow, format_rows
from kvlab.serving.block_model import BlockModel
from kvlab.shapes import ModelSpec, positive
from kvlab.units import GiB

__all__ = ["UTIL", "GPUOption", "Plan", "Settings", "check_logs", "gpus_for", "longest_context", "plan"]
COUNTS = (1, 2, 4, 8)           # GPUs of one server
LONGEST = 2**24                 # tokens beyond which no context is sought
MOST_TP = 1024
STANDARD = Settings()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a deployment holds. Bytes are of one GPU; blocks, requests and tokens of one replica unless they say total.

    terms: VRAM and what is taken from it (empty where the pool is given and the weights or the device's budget are
    unknown); pool: what is left, with its interval. concurrency: blocks ÷ blocks of one request of max_len, as vLLM
    logs it. requests: whole requests of max_len that the pool holds without its null block, a prefix shared; least,
    most: at the ends of the pool's interval. live: that, or max_num_seqs if fewer. binds: "pool" or "cap". tokens: as
    vLLM 0.21 and later log the cache's size. starts: whether one request of max_len fits, without which vLLM refuses
    to start.
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
    ValueError: unknown weights or memory, gpus that tp does not divide, a tp that does not fit the heads, a block size
    that splits scale groups, weights that do not fit, with the GPUs that it needs at least; KeyError: an unknown name.
    """
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    positive(gpus=gpus)
    settings, notes = with_defaults(spec, gpu, settings), []
    if settings.tp is None:
        asked = settings
        settings, why = _least_tp(spec, gpu, gpus, asked)
        best = _best(spec, gpu, gpus, 1, asked)
        notes.append(why if best is None or best.tp == settings.tp else
                     f"{why}; --tp {best.tp} holds most, {best.live:,} requests at once in all")
    tp, share = settings.tp, settings.prefix_share
    if gpus % tp:
        raise ValueError(f"{gpus} GPUs are no multiple of tp={tp}, and a replica takes tp of them; give --gpus "
                         f"{max(1, gpus // tp) * tp} or another --tp")
    model = blocks_of(spec, settings)
    terms, pool = _terms(spec, gpu, settings, model)
    if pool.value < model.block_bytes:
        raise ValueError(_does_not_fit(spec, gpu, settings, terms, pool))
    blocks = model.blocks(pool.value)
    least, whole, most = (requests_in(model, size, share) for size in (pool.low, pool.value, pool.high))
    live, replicas, tokens = min(whole, settings.max_num_seqs), gpus // tp, model.tokens(blocks)
    notes += _notes(spec, settings, model, blocks, whole, least, lengths)
    return Plan(
        model=spec.name, gpu=gpu.name, gpus=gpus, tp=tp, replicas=replicas, util=settings.util,
        max_num_seqs=settings.max_num_seqs, max_batched_tokens=settings.max_batched_tokens, block_size=model.block_size,
        max_len=model.max_len, kv_format=settings.kv_format, prefix_share=share, terms=terms, pool=pool,
        block_bytes=model.block_bytes, blocks=blocks, blocks_per_request=model.blocks_per_request(),
        shared_blocks=shared_blocks(model, model.max_len, share), concurrency=model.concurrency(blocks), requests=whole,
        least=least, most=most, live=live, live_total=live * replicas,
        binds="cap" if whole > settings.max_num_seqs else "pool", tokens=tokens, tokens_total=tokens * replicas,
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
    if model.block_size != settings.block_size:
        notes.append(f"blocks hold {model.block_size:,} tokens, so that a page of attention holds a recurrent state")
    longer = [sum(one) for one in lengths if sum(one) > model.max_len]
    if longer:
        notes.append(f"{len(longer):,} of {len(lengths):,} requests are longer than max_len {model.max_len:,} and left "
                     f"out (the longest: {max(longer):,} tokens)")
    return notes


def _terms(spec: ModelSpec, gpu: GPUSpec, settings: Settings, model: BlockModel) -> tuple[tuple[Term, ...], Term]:
    """VRAM and what is taken from it, and the pool. A pool that is known replaces the sum, and asks for no weights.

    Refuses a device that is no GPU of NVIDIA or AMD unless its pool is known.
    """
    s = settings
    if s.blocks is not None:
        size = s.blocks * model.block_bytes
        known = Term("KV pool", size, size, size, "quoted", f"{s.blocks:,} blocks, given", "the user")
    else:
        known = None if s.pool_gib is None else _budget.given("KV pool", s.pool_gib)
    if not gpu.compute_capability:                          # no GPU of NVIDIA or AMD: the terms below are theirs
        if known is None:
            raise ValueError(f"the budget is modelled for NVIDIA's and AMD's GPUs, and {gpu.name} is none: give "
                             "--pool-gib (vLLM on a CPU takes VLLM_CPU_KVCACHE_SPACE, in --block-size 128) or --blocks")
        return (), known
    try:
        taken = [_budget.weights(spec, s.tp, s.weights_gib)]
    except ValueError:
        if known is None:
            raise
        return (), known
    vram = _budget.device_memory(gpu) if s.vram_gib is None else _budget.given("VRAM", s.vram_gib)
    taken += [_budget.non_torch(s.tp) if s.non_torch_gib is None else _budget.given("non-torch", s.non_torch_gib),
              _budget.activation(_budget.widths(spec), _budget.Load(s.tp, s.max_num_seqs, s.max_batched_tokens))
              if s.activation_gib is None else _budget.given("activation peak", s.activation_gib),
              _budget.graphs() if s.graphs_gib is None else _budget.given("CUDA graphs", s.graphs_gib)]
    return (vram, *taken), known or _budget.pool(s.util, vram, taken)


def _fitting_tps(spec: ModelSpec, candidates: Sequence[int], settings: Settings):
    """(settings with that tp, its blocks) for every candidate that fits the heads."""
    for tp in candidates:
        tried = replace(settings, tp=tp)
        try:
            model = blocks_of(spec, tried)
        except ValueError as error:
            if "does not fit the heads" not in str(error):
                raise
            continue
        yield tried, model


def _dividing(gpus: int) -> list[int]:
    return [n for n in range(1, gpus + 1) if gpus % n == 0]


def _least_tp(spec: ModelSpec, gpu: GPUSpec, gpus: int, settings: Settings) -> tuple[Settings, str]:
    """The least tp dividing gpus with room for one request of max_len; failing that, for the weights alone."""
    enough, refused = None, f"no tp that divides {gpus} GPUs fits the heads of {spec.name}"
    for tried, model in _fitting_tps(spec, _dividing(gpus), settings):
        terms, pool = _terms(spec, gpu, tried, model)
        if requests_in(model, pool.value, settings.prefix_share):
            return tried, f"tp {tried.tp} is the least that fits"
        if pool.value >= model.block_bytes:
            enough = enough or tried
        else:
            refused = _does_not_fit(spec, gpu, tried, terms, pool)
    if enough is None:
        raise ValueError(refused)
    return enough, f"tp {enough.tp} is the least that holds the weights; no tp has room for one request of max_len"


def _does_not_fit(spec: ModelSpec, gpu: GPUSpec, settings: Settings, terms: tuple[Term, ...], pool: Term) -> str:
    if settings.pool_known:
        return f"does not fit: a pool of {pool.value:,} bytes holds not one block; give a larger --pool-gib or --blocks"
    head = (f"does not fit: {' + '.join(f'{term.name} {term.value / GiB:.2f}' for term in terms[1:])} GiB on each of "
            f"{settings.tp} {gpu.name} leave no KV pool of util × VRAM = {settings.util:g} × "
            f"{terms[0].value / GiB:.2f} = {settings.util * terms[0].value / GiB:.2f} GiB")
    for tried, model in _fitting_tps(spec, range(settings.tp + 1, MOST_TP), settings):
        if _terms(spec, gpu, tried, model)[1].value >= model.block_bytes:
            return f"{head}; needs at least {tried.tp} GPUs (--tp {tried.tp})"
    return f"{head}; no tp that fits the heads is enough: take smaller weights, fewer sequences or larger GPUs"


@dataclass(frozen=True, slots=True)
class GPUOption:
    """The fewest GPUs of one kind that hold a load, with the tp that holds most.

    live: requests of max_len at once in all; least: at the lower end of the pool's interval.
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


def gpus_for(spec: ModelSpec, need: int, settings: Settings = STANDARD, counts: Sequence[int] = COUNTS
             ) -> list[GPUOption]:
    """For every GPU of the catalogue (NVIDIA, AMD), the fewest of `counts` that hold `need` live requests of max_len.

    Fewest GPUs first, then least memory; a GPU of which no count is enough is left out. Refuses unknown weights, and a
    pool that is given: it belongs to one GPU.
    """
    positive(need=need)
    if settings.pool_known or settings.vram_gib is not None:
        raise ValueError("a pool or VRAM that is given belongs to one GPU: leave --pool-gib, --blocks and --vram-gib "
                         "out, or name the --gpu")
    _budget.weights(spec, 1, settings.weights_gib)              # what is wrong with the question is said once
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
    for tried, model in _fitting_tps(spec, [n for n in _dividing(gpus) if settings.tp in (None, n)], settings):
        terms, pool = _terms(spec, gpu, tried, model)
        least, whole = (requests_in(model, size, tried.prefix_share) for size in (pool.low, pool.value))
        cap, replicas = tried.max_num_seqs, gpus // tried.tp
        if min(whole, cap) * replicas >= need:
            options.append(GPUOption(gpu.name, gpus, tried.tp, replicas, min(whole, cap) * replicas,
                                     min(least, cap) * replicas, "cap" if whole > cap else "pool",
                                     gpus * terms[0].value / GiB if terms else 0.0))
    return max(options, key=lambda option: (option.live, -option.tp), default=None)


def longest_context(spec: ModelSpec, gpu: GPUSpec | str, gpus: int = 1, need: int = 1,
                    settings: Settings = STANDARD) -> int:
    """The largest max_len at which `need` requests of that length fit at once, over all replicas; 0 if none does.

    At most the model's context where it is known. settings.max_len is ignored; a tp that is not set is the one which
    reaches furthest. Source: bisection, since a request's blocks never get fewer with its length (with a prefix shared,
    exact to a block).
    """
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    positive(gpus=gpus, need=need)
    low, high = 0, spec.context or LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        fits = _best(spec, gpu, gpus, need, replace(settings, max_len=middle)) is not None
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
