"""llama.cpp and what runs on it (Ollama, koboldcpp, LM Studio): the KV buffer against cells × ggml rows.

kv_tokens are cells (n_ctx, or those of the window pool where the line names it); the buffer is over all devices, each
printed in MiB to two places. Slots and ubatch are not in a table: the defaults of the version count, others explain.
Source: kvlab.serving.ggml; latents by ggml-org/llama.cpp PR 12801 (April 2025) and PR 19067 (January 2026); default
slots by PR 16736 (four, late 2025).
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from kvlab.serving._log_case import Case, Finding, GiB, part
from kvlab.serving.ggml import TYPES, cache_bytes, cell_bytes, padded, window_cells
from kvlab.shapes import ModelSpec

_PRINTED = 0.005 / 1024         # GiB: half of MiB's second place
_WHOLE = "windows stored whole (--swa-full, and every version before May 2025)"
SLOTS, UBATCHES = (1, 2, 3, 4, 6, 8, 16), (256, 1024, 2048, 4096)
_CONVERTED = 1e-3               # of whole MiB told in GiB with few digits ("4.25"): converted, and not rounded to them


def cache_types(cell: str) -> tuple[str, str] | None:
    """(K, V) of "K q8_0 V q4_0", "q8_0", "f16", "q8_0/q4_0" or "" (f16); None where a type is not ggml's."""
    low = re.sub(r"\b(fp|float)(16|32)\b", r"f\2", cell.lower())
    low = re.sub(r"\b(bfloat16)\b", "bf16", low)
    kinds = [kind for kind in re.findall(r"\b(?:bf16|f16|f32|i?q\d_\w+)\b", low)]
    if not kinds:
        return ("f16", "f16") if low in ("", "auto", "default") else None
    if any(kind not in TYPES for kind in kinds[:2]):
        return None
    named = dict(re.findall(r"\b([kv])[\s:=(]+(bf16|f16|f32|i?q\d_\w+)\b", low))
    if len(named) == 1:
        named.setdefault("k" if "v" in named else "v", kinds[0])
    return (named.get("k", kinds[0]), named.get("v", kinds[-1]))


def latents(case: Case) -> tuple[str, ...]:
    """How this version stores an MLA latent, likeliest first; all where neither version nor date says."""
    month = case.engine.month
    if month is None or "ik_llama" in case.engine.cell:     # the fork chooses by -mla
        return ("once", "twice", "expanded")
    if month[1] == 0:
        return {True: ("once",), False: ("twice", "expanded")}[month[0] >= 2026]
    return ("once",) if month >= (2026, 2) else ("twice", "once") if month == (2026, 1) else (
        ("twice",) if month >= (2025, 5) else ("expanded", "twice") if month == (2025, 4) else ("expanded",))


def candidates(case: Case, k: str, v: str) -> Iterator[tuple[float, str, str]]:
    """(bytes, how, why it is not as printed): the defaults first."""
    spec, cells = case.spec, int(case.tokens.value if case.tokens else case.max_len)
    rounds = cells in (case.max_len, padded(cells))         # a length that was asked for; cells are printed as they are
    window = next((layer.window for layer in spec.layers if layer.window), None)
    named = part(case.words) if window else ""
    if named in ("sliding", "full") and (only := _part(spec, named == "sliding")).layers:
        for held in dict.fromkeys((cells, padded(cells) if rounds else cells)):
            yield (cache_bytes(only, held, k, v, swa_full=True) // padded(held) * held,
                   f"{only.num_layers} {'window' if named == 'sliding' else 'full'} layers x {held:,} cells", "")
        return
    if window is None:
        ways = latents(case) if "mla" in case.kinds else ("once",)
        for way in ways:
            because = "" if way == ways[0] else f"the latent is stored {way}: the version is not printed"
            latent = f", the latent stored {way}" if "mla" in case.kinds else ""
            for held in dict.fromkeys((padded(cells) if rounds else cells, cells)):     # older versions pad to 32
                size = sum(layer.count * held * cell_bytes(layer, k, v, way) for layer in spec.layers)
                yield size, f"{held:,} cells{latent}", because
        return
    if not rounds:                                          # no whole blocks of 256: from before windows had a pool
        yield (sum(layer.count * cells * cell_bytes(layer, k, v) for layer in spec.layers),
               f"{cells:,} cells in every layer", _WHOLE)
        return
    four = case.engine.month is None or case.engine.month >= (2025, 11) or case.engine.month == (2025, 0)
    defaults = [(1, 512, True)] + [(4, 512, True), (4, 512, False)] * four
    for slots, ubatch, unified in defaults:
        yield _windowed(case, cells, k, v, slots, ubatch, unified, window, "")
    full = _part(spec, False)
    yield cache_bytes(full, cells, k, v), f"{full.num_layers} full layers x {padded(cells):,} cells", (
        "the full layers' buffer alone: llama.cpp prints that of the windows in a line of its own")
    yield cache_bytes(spec, cells, k, v, swa_full=True), f"{padded(cells):,} cells in every layer", _WHOLE
    others = [(slots, 512, unified) for slots in SLOTS for unified in (True, False)]
    others += [(slots, ubatch, unified) for slots, _, unified in defaults for ubatch in UBATCHES]
    for slots, ubatch, unified in others:
        if (slots, ubatch, unified) not in defaults:
            yield _windowed(case, cells, k, v, slots, ubatch, unified, window,
                            f"{slots} slots and a ubatch of {ubatch} instead of the defaults")


def _windowed(case: Case, cells: int, k: str, v: str, slots: int, ubatch: int, unified: bool, window: int, why: str):
    held = window_cells(cells, window, slots, ubatch, unified)
    how = f"{padded(cells):,} cells in full layers, {held:,} in window layers ({slots} slot{'s' * (slots > 1)})"
    return cache_bytes(case.spec, cells, k, v, slots=slots, ubatch=ubatch, unified=unified), how, why


def _part(spec: ModelSpec, windows: bool) -> ModelSpec:
    return replace(spec, layers=tuple(layer for layer in spec.layers if bool(layer.window) == windows))


def check_llama(case: Case) -> Finding:
    """The printed buffer against the cells' bytes."""
    if case.pool is None or case.tokens is None and case.max_len is None:
        return Finding("unmatched", note="only a buffer or only its cells are printed: nothing to compare with")
    kinds = cache_types(case.kv_dtype)
    if kinds is None:
        return Finding("unmatched", note=f"the cache type {case.kv_dtype!r:.60} is not one of ggml's; known: "
                       f"{', '.join(TYPES)}")
    half = case.pool.half
    if (case.pool.value * 1024).is_integer():
        half = min(half, abs(case.pool.value) * _CONVERTED)
    half = max(half, _PRINTED * max(2, case.ranks))         # K and V, or each device, are rounded apart
    first = None
    try:
        for size, how, because in candidates(case, *kinds):
            first = first or (size / GiB, how)
            if abs(size / GiB - case.pool.value) <= half:
                note = f"K {kinds[0]}, V {kinds[1]}, {how}: {size / 2**20:,.2f} MiB"
                return Finding("explained" if because else "agreed", "kv_cache_gib", case.pool.value,
                               float(f"{size / GiB:.7g}"), "; ".join(filter(None, (because, note))))
    except ValueError as error:
        return Finding("unmatched", note=f"{case.spec.name}: {error}")
    return Finding("unexplained", "kv_cache_gib", case.pool.value, float(f"{first[0]:.7g}"),
                   f"K {kinds[0]}, V {kinds[1]}, {first[1]}: {first[0] * 1024:,.2f} MiB, and "
                   f"{case.pool.value * 1024:,.2f} are printed")
