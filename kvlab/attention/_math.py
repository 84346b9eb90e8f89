"""What torch's unfused attention moves: the math back end, and a CPU's answer where K and V differ in width."""
from __future__ import annotations

from kvlab.attention._oracle import not_found, score_matrix_bytes
from kvlab.attention._variant import Cost


def falls_back(trial) -> bool:
    """Whether torch has no fused kernel for this on a CPU: there K and V must be of one width."""
    shape = trial.workload.shape
    return not trial.device.startswith("cuda") and shape.head_dim != shape.v_dim


def math_cost(cost: Cost, trial, cache_bytes: int, repeated: bool = False) -> Cost:
    """That cost and what torch's unfused operators add, which run one after the other over whole arrays.

    K (scaled) is written anew, and read by the product, which writes the scores; a mask of floats is added in place;
    the softmax writes a second matrix; a third leaves out rows that saw nothing (scores compared, a byte each). V
    meets the third. repeated: torch copies K and V to each query head first. Under a mask folded queries make a call
    per head of the group. A latent is K, and at the end V again. 16-bit K and V are copied to fp32 first; what torch
    turns back into 16 bits is not in it. Source: `_scaled_dot_product_attention_math` of torch 2.13, as profiled.
    """
    w, s, size = trial.workload, trial.workload.shape, max(4, trial.itemsize)
    for b in (range(1) if w.uniform else range(w.batch_size)):
        q_len, kv_len, batch = w.q_lens[b], w.kv_lens[b], w.batch_size if w.uniform else 1
        tokens, prompt, grouped = kv_len - w.first_visible(b), q_len > 1, s.group_ratio > 1
        copied = grouped and (repeated or (prompt and trial.device.startswith("cuda")))
        calls = s.group_ratio if prompt and not copied else 1
        stored_k, stored_v = (batch * s.num_kv_heads * tokens * n * size for n in (s.head_dim, s.v_dim))
        read = write = 0
        if trial.itemsize < size:
            write += stored_k + stored_v
            read += not_found(stored_k + stored_v, (stored_k + stored_v) // 2, cache_bytes)
        k, v = stored_k, stored_v
        if copied:                                            # K's copies, then V's, then both are used
            k, v = k * s.group_ratio, v * s.group_ratio
            heads = [tokens * n * size for n in (s.head_dim, s.v_dim)]
            read += sum((s.group_ratio - 1) * side for side, head in zip((stored_k, stored_v), heads)
                        if 2 * head > cache_bytes)
            read += k + v if k + v > cache_bytes else 0
            write += k + v
        cells = batch * s.num_q_heads * q_len * tokens // calls
        scores, queries = cells * size, batch * s.num_q_heads * q_len * s.head_dim * size // calls
        one_read, one_write = not_found(k, k, cache_bytes), k + queries           # the scaled copies
        one_read += queries if queries + 2 * k > cache_bytes else 0
        if prompt:                                            # q in order, a mask of booleans (causal: made), of floats
            causal = q_len == kv_len and (s.window is None or s.window >= kv_len)
            mask = q_len * tokens
            made = mask * (2 if causal else 0)
            each = mask * size + mask * size > cache_bytes
            one_read += mask + not_found(made, 0, cache_bytes) + mask * size * (
                cells // mask if each else int(mask * size + 2 * k + scores > cache_bytes))
            one_read += not_found(queries, queries, cache_bytes) + not_found(scores, k, cache_bytes)
            one_write += made + mask * size + queries + not_found(scores, k, cache_bytes)
        one_read += not_found(scores, scores if prompt else max(scores, k), cache_bytes)      # by the softmax
        one_read += not_found(scores, scores, cache_bytes) + not_found(cells, scores, cache_bytes)
        one_read += not_found(scores, scores + cells, cache_bytes) + not_found(scores, max(scores, v), cache_bytes)
        one_write += 2 * scores + cells + scores
        stays = 2 * k + v + 3 * scores <= cache_bytes
        if s.v_in_k and not copied and not stays:
            one_read += v
        between = 0 if stays else (calls - 1) * (k + (0 if s.v_in_k else v))
        out = batch * q_len * s.num_q_heads * s.v_dim * size * (0 if not prompt else 2 if calls > 1 else 1)
        cost = cost.plus(read=read + calls * one_read + between + not_found(out, v, cache_bytes),
                         write=write + calls * one_write + out)
    flops = 2 * (s.head_dim + s.v_dim) * score_matrix_bytes(trial) // trial.itemsize       # the masked half is too
    return cost._replace(executed_flops=flops)
