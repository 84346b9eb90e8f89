"""What the variants on torch's scaled_dot_product_attention share."""
from __future__ import annotations

import warnings
from functools import cache

from kvlab.attention._oracle import contiguous_only, not_found
from kvlab.attention._variant import Cost
from kvlab.kernels.folded_sdpa import folded_sdpa, visible_mask, visible_rule

NO_SOFTCAP = "torch's scaled_dot_product_attention has no soft-capping; use naive or flash"


def sdpa_why_not(trial) -> str | None:
    """Why torch's scaled_dot_product_attention cannot compute this trial."""
    return contiguous_only(trial) or (NO_SOFTCAP if trial.workload.shape.softcap is not None else None)


def per_sequence(trial, inputs, attend):
    """A call that runs attend(q_BTQD, k_BKSD, v_BKSE, rule) once if all lengths agree, else per sequence."""
    import torch
    w, window = trial.workload, trial.workload.shape.window
    T, S, first = w.q_lens[0], w.kv_lens[0], w.first_visible(0)
    rules = [visible_rule(q_len, kv_len, window, trial.device, w.first_visible(b))
             for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens))]

    def together():
        k, v = inputs.decode(*inputs.all_stored(), S, first)
        q_BTQD = inputs.q_TQD.view(w.batch_size, T, *inputs.q_TQD.shape[1:])
        return attend(q_BTQD, k, v, rules[0]).flatten(0, 1)

    def one_by_one():
        out = []
        for b, q_TQD in enumerate(inputs.q_BTQD):
            k, v = inputs.decode(*inputs.stored(b), w.kv_lens[b], w.first_visible(b))
            out.append(attend(q_TQD[None], k[None], v[None], rules[b])[0])
        return torch.cat(out)
    return together if w.uniform else one_by_one


def under_a_mask(cost: Cost, trial, cache_bytes: int, calls: int = 1) -> Cost:
    """That cost and what a prompt's mask adds on a CPU, where torch is called `calls` times, each for all KV heads.

    Every call turns the mask of booleans into floats, reads those again for each head unless they and one head's K and
    V fit, and walks all of K and V, again unless they and the floats fit; several calls' outputs are stacked, and put
    in order, by a copy each. torch's own tiles of query tokens, each of which walks a head's K and V, are not in it.
    """
    w, s, size = trial.workload, trial.workload.shape, trial.itemsize
    if trial.device.startswith("cuda"):
        return cost
    for b in (range(1) if w.uniform else range(w.batch_size)):
        q_len, kv_len, batch = w.q_lens[b], w.kv_lens[b], w.batch_size if w.uniform else 1
        if q_len == 1:
            continue
        tokens, heads = kv_len - w.first_visible(b), batch * s.num_kv_heads * s.group_ratio // calls
        causal = q_len == kv_len and (s.window is None or s.window >= kv_len)
        cells = 0 if causal else q_len * tokens
        floats, head = cells * size, tokens * (s.head_dim + (0 if s.v_in_k else s.v_dim)) * size
        whole, out = batch * s.num_kv_heads * head, batch * q_len * s.num_q_heads * s.v_dim * size
        read = cells + not_found(floats, head, cache_bytes)
        read += (heads - 1) * floats if floats + head > cache_bytes else 0
        again = (calls - 1) * whole if whole + floats > cache_bytes else 0
        copied = 2 if calls > 1 else 1 if s.num_q_heads > 1 else 0
        cost = cost.plus(read=calls * read + again + copied * not_found(out, whole, cache_bytes),
                         write=calls * floats + copied * out)
    return cost


def on_backend(backend: str, call):
    """The call with torch held to one back end (a name of SDPBackend): it may not choose another without a word.

    Entering and leaving takes some 10 µs of each call.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backends = [getattr(SDPBackend, backend)]

    def held():
        with sdpa_kernel(backends):
            return call()
    return held


def backend_why_not(trial, backend: str) -> str | None:
    """Why torch cannot run this trial on that back end, in torch's words: small calls of the same kinds are tried."""
    w, s = trial.workload, trial.workload.shape
    kinds = {"causal" if q_len == kv_len > 1 and (s.window or kv_len) >= kv_len else "all" if q_len == 1 else "mask"
             for q_len, kv_len in zip(w.q_lens, w.kv_lens)}
    tried = (_tried(backend, kind, trial.device, trial.torch_dtype, s.num_q_heads, s.num_kv_heads, s.head_dim, s.v_dim)
             for kind in sorted(kinds))
    return next((why for why in tried if why), None)


@cache
def _tried(backend: str, kind: str, device: str, dtype, q_heads: int, kv_heads: int, head_dim: int,
           v_dim: int) -> str | None:
    import torch
    T, S = {"causal": (16, 16), "all": (1, 64), "mask": (16, 64)}[kind]
    q, k, v = (torch.zeros(size, dtype=dtype, device=device) for size in (
        (1, T, q_heads, head_dim), (1, kv_heads, S, head_dim), (1, kv_heads, S, v_dim)))
    rule = {"causal": dict(is_causal=True), "all": {}, "mask": dict(attn_mask=visible_mask(T, S, None, device))}[kind]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            on_backend(backend, lambda: folded_sdpa(q, k, v, rule))()
        except RuntimeError as error:
            reasons = [str(w.message).partition(" (Triggered")[0].strip() for w in said]
            reasons = [r for r in reasons if r and "not used because" not in r and "runtime disabled" not in r]
            why = "; ".join(reasons) or str(error).partition(". ")[0]
            return f"torch cannot run its {backend.lower().replace('_', ' ')} back end on {device}: {why}"
    return None
