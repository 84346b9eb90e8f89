"""What the variants on torch's scaled_dot_product_attention share."""
from __future__ import annotations

from kvlab.attention._oracle import contiguous_only
from kvlab.kernels.folded_sdpa import visible_rule

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
        cache = inputs.cache
        k, v = inputs.decode(cache.by_head(cache.k_arrays), cache.by_head(cache.v_arrays), S, first)
        q_BTQD = inputs.q_TQD.view(w.batch_size, T, *inputs.q_TQD.shape[1:])
        return attend(q_BTQD, k, v, rules[0]).flatten(0, 1)

    def one_by_one():
        out = []
        for b, q_TQD in enumerate(inputs.q_BTQD):
            k, v = inputs.decode(*inputs.stored(b), w.kv_lens[b], w.first_visible(b))
            out.append(attend(q_TQD[None], k[None], v[None], rules[b])[0])
        return torch.cat(out)
    return together if w.uniform else one_by_one
