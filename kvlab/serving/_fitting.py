"""Whether a model fits: the budget's terms and the pool that they leave, the tp that fit the heads, and why not.

Bytes are of one GPU. `DoesNotFit` is for a fair question whose answer is no; wrong questions are ValueError.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvlab.catalog.gpus import GPUSpec
from kvlab.serving import _budget
from kvlab.serving._budget import Term
from kvlab.serving._settings import Settings, blocks_of
from kvlab.serving._weights import least_weights, weights
from kvlab.serving.block_model import BlockModel
from kvlab.shapes import ModelSpec
from kvlab.units import GiB

MOST_TP = 1024


class DoesNotFit(ValueError):
    """A fair question whose answer is no: the sentence says what is too large, and which tp would be enough."""


def terms_of(spec: ModelSpec, gpu: GPUSpec, settings: Settings, model: BlockModel) -> tuple[tuple[Term, ...], Term]:
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
        taken = [weights(spec, s.tp, s.weights_gib, s.weight_bits)]
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


def fitting_tps(spec: ModelSpec, candidates: Sequence[int], settings: Settings):
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


def dividing(gpus: int) -> list[int]:
    return [n for n in range(1, min(gpus, MOST_TP) + 1) if gpus % n == 0]


def refuse_ranks(gpu: GPUSpec, gpus: int, settings: Settings) -> None:
    """Ranks that this device cannot have, and a pool of several GPUs that does not say over how many ranks it lies."""
    if gpu.vendor == "Apple" and (gpus > 1 or settings.tp not in (None, 1)):
        raise ValueError(f"{gpu.name} is one device, over which no engine splits a model: leave --gpus and --tp out")
    if settings.pool_known and settings.tp is None and gpus > 1:
        raise ValueError("--blocks and --pool-gib are of a replica of one tp, which decides whether weights fit beside "
                         "them: say its --tp, or give --gpus 1")


def too_large(spec: ModelSpec, gpu: GPUSpec, settings: Settings, model: BlockModel, terms: tuple[Term, ...],
               pool: Term) -> str:
    """Why this does not fit, "" if it does."""
    if not settings.pool_known:
        return "" if pool.value >= model.block_bytes else _no_pool_left(spec, gpu, settings, terms)
    if pool.value < model.block_bytes:
        return (f"does not fit: a pool of {pool.value:,} bytes holds not one block of {model.block_bytes:,}; give a "
                "larger --pool-gib or --blocks")
    memory, held = _beside_a_given_pool(spec, gpu, settings)
    if memory is None or held + pool.value <= memory:
        return ""
    weighing = "" if not held else (f" and weights of {'' if terms else 'at least '}{held / GiB:.2f} GiB"
                                    f"{'' if terms else ' (4 bits a parameter)'}")
    head = (f"does not fit: a pool of {pool.value / GiB:.2f} GiB, as given,{weighing} on each of {settings.tp} "
            f"{gpu.name} are more than its {memory / GiB:.2f} GiB")
    if settings.pool_gib is not None and pool.value > memory:
        return f"{head}; --pool-gib is of one GPU, as its log prints it"
    for tried, larger in fitting_tps(spec, range(settings.tp + 1, MOST_TP), settings):
        if _beside_a_given_pool(spec, gpu, tried)[1] + terms_of(spec, gpu, tried, larger)[1].value <= memory:
            return f"{head}; needs at least {tried.tp} GPUs (--tp {tried.tp})"
    return f"{head}; no tp that fits the heads is enough: give fewer --blocks, or a larger GPU"


def _beside_a_given_pool(spec: ModelSpec, gpu: GPUSpec, settings: Settings) -> tuple[int | None, int]:
    """Bytes of one GPU at most (None: not known), and the least that the weights of one rank take of them."""
    if settings.vram_gib is None and gpu.memory_bytes is None:
        return None, 0
    memory = _budget.device_memory(gpu).high if settings.vram_gib is None else round(settings.vram_gib * GiB)
    return memory, least_weights(spec, settings.tp, settings.weights_gib, settings.weight_bits)


def _no_pool_left(spec: ModelSpec, gpu: GPUSpec, settings: Settings, terms: tuple[Term, ...]) -> str:
    head = (f"does not fit: {' + '.join(f'{term.name} {term.value / GiB:.2f}' for term in terms[1:])} GiB on each of "
            f"{settings.tp} {gpu.name} leave no KV pool of util × VRAM = {settings.util:g} × "
            f"{terms[0].value / GiB:.2f} = {settings.util * terms[0].value / GiB:.2f} GiB")
    for tried, model in fitting_tps(spec, range(settings.tp + 1, MOST_TP), settings):
        if terms_of(spec, gpu, tried, model)[1].value >= model.block_bytes:
            return f"{head}; needs at least {tried.tp} GPUs (--tp {tried.tp})"
    return f"{head}; no tp that fits the heads is enough: take smaller weights, fewer sequences or larger GPUs"
