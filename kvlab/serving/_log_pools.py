"""Engines that print a pool and its tokens: SGLang, TensorRT-LLM, LMDeploy, transformers; and any that is not known.

pool = tokens × bytes of a token on one rank, within the printed rounding. What each means by its words:
SGLang: "GB" are GiB; K and V are printed apart (two roundings), a latent once; each pool has one page more than the
tokens it offers; window layers have a pool of their own. TensorRT-LLM: "Allocated … GiB for max tokens in paged KV
cache (N)". LMDeploy's TurboMind: block_size is in MB (MiB), 64 tokens each (128 in 2023), int8 and int4 with a scale
and a zero point of 16 bits per token and head. transformers' continuous batching: blocks × block_size tokens.

Source: SGLang 0.5.23 mem_cache/memory_pool.py; TensorRT-LLM cpp batch_manager/kvCacheManager.cpp; LMDeploy
src/turbomind/models/llama/BlockManager.cc and SequenceManager.cc; transformers generation/continuous_batching/cache.py.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvlab.serving._log_case import Case, Finding, GiB, kv_format, part
from kvlab.serving._log_rules import FP8_BY_ITSELF
from kvlab.serving.block_model import token_bytes

TURBOMIND_TOKENS = (64, 128, 32, 256)           # of a block, likeliest first
MiB = 2**20


@dataclass(frozen=True, slots=True)
class Store:
    """Bytes of one token on one rank. because: what is not as printed, "" = nothing."""
    bytes_per_token: float
    of: str
    because: str = ""


def stores(case: Case) -> Iterator[Store]:
    """What a token may take: first as printed, then with what the table does not print, said in `because`."""
    name, tp = _format(case), case.tp or case.ranks
    if name is None:
        return
    stages = case.n_gpus // tp if case.n_gpus and case.n_gpus > tp and case.n_gpus % tp == 0 else 1
    for held, of in _parts(case):
        for share in dict.fromkeys((1, stages)):
            layers = f"{of}, 1 of {share} stages" if share > 1 else of
            yield Store(_bytes(held, name, tp, case) / share, layers)
    for held, of in _parts(case):
        if case.kv_dtype in ("", "auto") and name == "bf16":
            yield Store(_bytes(held, "fp8_e4m3", tp, case), of, FP8_BY_ITSELF)
        if "mla" not in case.kinds:
            for width in (n for n in range(1, tp) if tp % n == 0):
                yield Store(_bytes(held, name, width, case), of, f"attention split over {width} of {tp} ranks only "
                            "(data-parallel attention): heads of the others are not shared out")


def _format(case: Case) -> str | None:
    policy = re.search(r"^(?:quant[ _-]?policy)?\W*([048])\b|\bint([48])\b|quant[ _-]?policy\W*([048])\b",
                       case.kv_dtype) if case.engine.name == "lmdeploy" else None
    bits = policy and (policy[1] or policy[2] or policy[3])
    return {"4": "int4", "8": "int8", "0": "bf16"}[bits] if bits else kv_format(case)


def _bytes(spec, name: str, tp: int, case: Case) -> float:
    if case.engine.name == "lmdeploy" and name in ("int8", "int4"):
        heads = sum(layer.count * max(1, layer.num_kv_heads // tp) for layer in spec.layers if layer.kind != "linear")
        numbers = token_bytes(spec, "bf16", tp) / 2
        return numbers * (1 if name == "int8" else 0.5) + heads * 2 * 4          # scale and zero point of K and of V
    return token_bytes(spec, name, tp)


def _parts(case: Case) -> Iterator[tuple]:
    """The layers that the printed pool may hold: all, or those that the line names, or one of a hybrid's two pools."""
    spec = case.spec
    sliding = replace(spec, layers=tuple(layer for layer in spec.layers if layer.window))
    full = replace(spec, layers=tuple(layer for layer in spec.layers if not layer.window))
    named = part(case.words) if case.windows and full.layers else "total"
    if named == "total":
        yield spec, "all layers"
    elif named == "sliding":
        yield sliding, "window layers"
    elif named == "full":
        yield full, "full layers"
    else:
        yield spec, "all layers"
        yield full, "full layers"
        yield sliding, "window layers"


def check_pool(case: Case) -> Finding:
    """Tokens against the pool, or blocks against tokens where no pool is printed."""
    if case.engine.name == "lmdeploy":
        return _turbomind(case)
    per_block = case.block_size.value if case.block_size else None
    if case.tokens is None and case.blocks is not None and per_block:
        case = replace(case, tokens=replace(case.block_size, value=case.blocks * per_block, half=0.0))
    if case.pool is None or case.tokens is None:
        return _blocks_only(case)
    if case.blocks and (contradicted := _blocks_only(case)).verdict == "unexplained":
        return contradicted
    pages = per_block if case.engine.name == "sglang" and per_block else 0
    roundings = 2 if case.engine.name == "sglang" and "mla" not in case.kinds else 1
    first = None
    for store in stores(case):
        least, most = (tokens * store.bytes_per_token / GiB for tokens in (case.tokens.low, case.tokens.high + pages))
        half = case.pool.half * roundings
        first = first or (store, least)
        if least <= case.pool.value + half and most >= case.pool.value - half:
            note = (f"{case.tokens.value:,.0f} tokens x {store.bytes_per_token:,.10g} B ({store.of}) = {least:.4f} GiB"
                    + (f", {most:.4f} with the page of padding" if pages else ""))
            shown = min(max(case.pool.value, least), most)
            verdict = "explained" if store.because else "agreed"
            return Finding(verdict, "kv_cache_gib", case.pool.value, _rounded(shown), "; ".join(
                filter(None, (store.because, note))))
    if first is None:
        return Finding("unmatched", note=f"the KV format {case.kv_dtype!r} is not known here")
    return Finding("unexplained", "kv_cache_gib", case.pool.value, _rounded(first[1]),
                   f"{case.tokens.value:,.0f} tokens x {first[0].bytes_per_token:,.10g} B ({first[0].of}) = "
                   f"{first[1]:.4f} GiB, and {case.pool.value:g} are printed")


def _rounded(gib: float) -> float:
    return float(f"{gib:.7g}")


def _blocks_only(case: Case) -> Finding:
    if case.tokens is not None and case.blocks and not case.block_size and not case.tokens.half and (
            case.tokens.value % case.blocks):
        per = max(1, round(case.tokens.value / case.blocks))
        return Finding("unexplained", "kv_tokens", int(case.tokens.value), case.blocks * per,
                       f"{case.blocks:,} blocks of one size cannot hold exactly so many tokens")
    if case.tokens is not None and case.blocks is not None and case.block_size:
        predicted = int(case.blocks * case.block_size.value)
        verdict = "agreed" if case.tokens.low <= predicted <= case.tokens.high else "unexplained"
        return Finding(verdict, "kv_tokens", int(case.tokens.value), predicted,
                       f"{case.blocks:,} blocks of {case.block_size.value:g} tokens; no pool is printed")
    cells = {"kv_cache_gib": case.pool, "kv_tokens": case.tokens, "gpu_blocks": case.blocks}
    printed = " and ".join(name for name, cell in cells.items() if cell is not None) or "nothing"
    return Finding("unmatched", note=f"only {printed} printed: there is nothing to compare with")


def _turbomind(case: Case) -> Finding:
    """Blocks, their size (tokens or MB) and the pool; a block holds 64 tokens unless told otherwise."""
    if case.blocks is None or case.block_size is None:
        return check_pool(replace(case, engine=replace(case.engine, name="")))
    if (tried := _turbomind_blocks(case)) is None:
        return Finding("unmatched", note=f"the KV format {case.kv_dtype!r} is not known here")
    fits, store, tokens = tried
    block = tokens * store.bytes_per_token / MiB
    pool = case.blocks * block / 1024
    if case.pool is not None:
        what, logged, predicted = "kv_cache_gib", case.pool.value, _rounded(pool)
    else:
        what, logged, predicted = "block_size", case.block_size.value, _rounded(block)
    note = (f"{case.blocks:,} blocks of {tokens} tokens x {store.bytes_per_token:,.10g} B = {block:.3f} MiB each"
            + ("" if case.pool or case.tokens else "; how many there are is not tested: no pool, no tokens"))
    verdict = "unexplained" if not fits else "explained" if store.because else "agreed"
    return Finding(verdict, what, logged, predicted, "; ".join(filter(None, (store.because if fits else "", note))))


def _turbomind_blocks(case: Case) -> tuple[bool, Store, int] | None:
    """Whether some store and tokens per block fit, and which; of none that fits the likeliest. None: no format."""
    size, likeliest = case.block_size, None
    rounding = size.half if size.half < 0.5 else 0.5 if case.pool is None else 0.0      # "block_size = 8 MB" is cut
    for store in stores(case):
        for tokens in dict.fromkeys((*(int(size.value),) * (size.value in TURBOMIND_TOKENS), *TURBOMIND_TOKENS)):
            likeliest = likeliest or (store, tokens)
            block = tokens * store.bytes_per_token / MiB
            in_mib = abs(size.value - block) <= max(rounding, 5e-4)
            in_tokens = size.value == tokens and case.pool is not None
            held = case.blocks * block / 1024
            if (in_mib or in_tokens) and (
                    case.pool is None or abs(held - case.pool.value) <= max(case.pool.half, case.blocks * 5e-4 / 1024)
            ) and (case.tokens is None or case.tokens.low <= case.blocks * tokens <= case.tokens.high):
                return True, store, tokens
    return likeliest and (False, *likeliest)
