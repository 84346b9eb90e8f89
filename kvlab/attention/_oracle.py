"""The fp64 oracle by which every variant is judged, and what any algorithm must move and compute at the least.

Legend: B = sequence, T = query token, S = kv token, Q = query head, K = kv head, G = query heads per kv head,
D = head_dim, E = v_head_dim.
"""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlab.attention._decoding import arrays_written
from kvlab.attention._variant import Cost
from kvlab.kv.formats import KVFormat
from kvlab.shapes import Workload

if TYPE_CHECKING:
    from torch import Tensor

    from kvlab.attention._base import Trial


def reference(workload: Workload, q_BTQD: list[Tensor], k: list[Tensor], v: list[Tensor],
              rows: list[Tensor] | None = None, dtype=None) -> Tensor:
    """Causal softmax attention in fp64, written for reading: the oracle for every variant and format.

    q [T, Q, D], k [S, K, D], v [S, K, E] per sequence; v may be None where it is a view of k. rows: which query
    tokens of each sequence to compute (default all). dtype: that of the arithmetic; a lower one than fp64 gives the
    plain attention whose error sets the tolerance. Returns [rows, Q, E], sequence after sequence.
    """
    import torch
    dtype = dtype or torch.float64
    shape, out = workload.shape, []
    for b, (q_TQD, k_SKD) in enumerate(zip(q_BTQD, k)):
        T, S, K, G = q_TQD.shape[0], k_SKD.shape[0], shape.num_kv_heads, shape.group_ratio
        row_T = torch.arange(T, device=q_TQD.device) if rows is None else rows[b]
        k_SKD = k_SKD.to(dtype)
        v_SKE = k_SKD[..., :shape.v_dim] if shape.v_in_k else v[b].to(dtype)
        q_TKGD = q_TQD[row_T].to(dtype).reshape(len(row_T), K, G, shape.head_dim)
        score_KGTS = torch.einsum("tkgd,skd->kgts", q_TKGD, k_SKD) / shape.head_dim**0.5
        if shape.softcap is not None:
            score_KGTS = shape.softcap * torch.tanh(score_KGTS / shape.softcap)
        position_T1 = (S - T + row_T)[:, None]                       # where each query token itself stands
        token_S = torch.arange(S, device=q_TQD.device)
        hidden_TS = token_S > position_T1
        if shape.window is not None:
            hidden_TS |= token_S <= position_T1 - shape.window
        weight_KGTS = score_KGTS.masked_fill(hidden_TS, float("-inf")).softmax(-1)
        out.append(torch.einsum("kgts,ske->tkge", weight_KGTS, v_SKE).reshape(len(row_T), K * G, shape.v_dim))
    return torch.cat(out)


def useful_flops(workload: Workload) -> int:
    """2 · query heads · (head_dim + v_head_dim) · visible (query, token) pairs: no algorithm can do with less."""
    s = workload.shape
    return 2 * s.num_q_heads * (s.head_dim + s.v_dim) * workload.visible_pairs()


def ideal_traffic(workload: Workload, fmt: KVFormat, itemsize: int) -> Cost:
    """Read q and each unique stored K/V byte that some query may see once, write the output once.

    Independent of variant and layout: a shared prefix counts once, scales count, tokens outside the window do not.
    """
    s = workload.shape
    tokens = sum(workload.q_lens)
    # only whole groups are shared: one that holds a sequence's own tokens has its own scale, and so its own codes
    tails = any(codec.residual for codec, _ in fmt.sides(s))        # of each sequence its own: nothing is shared
    prefix = 0 if tails else workload.shared_prefix - workload.shared_prefix % fmt.token_group(s)
    firsts = [workload.first_visible(b) for b in range(workload.batch_size)]
    kv = sum(fmt.nbytes(n, s, first=min(n, max(first, prefix))) for n, first in zip(workload.kv_lens, firsts))
    if prefix > min(firsts):
        kv += fmt.nbytes(prefix, s, first=min(firsts))
    return Cost(tokens * s.num_q_heads * s.head_dim * itemsize + kv,
                tokens * s.num_q_heads * s.v_dim * itemsize, useful_flops(workload))


def least_cost(trial: Trial, cache_bytes: int = 0) -> Cost:
    """The cost that all variants share: ideal traffic, a layout that stores a shared prefix per sequence, decoding.

    Decoding is torch's, operator by operator; of arrays that fit the cache some are found that wait longer than that.
    """
    w, s, fmt = trial.workload, trial.workload.shape, trial.format
    cost = ideal_traffic(w, fmt, trial.itemsize)
    if w.shared_prefix and not trial.layout.share_prefix:
        cost = ideal_traffic(replace(w, shared_prefix=0), fmt, trial.itemsize)
    if trial.format_path == "decoded":
        visible = sum(n - w.first_visible(b) for b, n in enumerate(w.kv_lens))
        width = s.head_dim + (0 if s.v_in_k else s.v_dim)
        decoded = visible * s.num_kv_heads * width * trial.itemsize
        stored = sum(fmt.nbytes(n, s, first=w.first_visible(b)) for b, n in enumerate(w.kv_lens))
        cost = cost.plus(read=not_found(decoded, stored, cache_bytes), write=decoded)
        for codec, side in fmt.sides(s):                              # what is written on the way, and read once
            arrays = [n * visible * s.num_kv_heads * side
                      for n in arrays_written(codec, trial.itemsize, not trial.device.startswith("cuda"))]
            for nbytes, following in zip(arrays, arrays[1:]):
                cost = cost.plus(read=not_found(nbytes, following, cache_bytes), write=nbytes)
    return cost


def not_found(nbytes: int, passed: int, cache_bytes: int) -> int:
    """Bytes of an array that a second walk in the same order no longer finds in a cache of that size.

    passed: bytes of other data that go by evenly, once, during the first walk (or the second). The cache forgets what
    was used longest ago (LRU): a byte is found if the array and what passed between its two uses fit. Of an array
    that fits by itself the part stays behind (or before) which little else passed.
    """
    if nbytes > cache_bytes:
        return nbytes
    return nbytes * max(0, nbytes + passed - cache_bytes) // passed if passed else 0


def read_again(trial: Trial, times: int, cache_bytes: int) -> Cost:
    """least_cost where K and V are walked `times` times more, head by head, unless one head's stay in the cache."""
    w, s, cost = trial.workload, trial.workload.shape, least_cost(trial, cache_bytes)
    width = (s.head_dim + (0 if s.v_in_k else s.v_dim)) * trial.itemsize
    visible = [n - w.first_visible(b) for b, n in enumerate(w.kv_lens)]
    if max(visible) * width > cache_bytes:
        cost = cost.plus(read=times * sum(visible) * s.num_kv_heads * width)
    return cost


def contiguous_only(trial: Trial) -> str | None:
    """Why a variant that walks K and V as one array cannot read this trial's cache."""
    if trial.layout.block_size is not None:
        return "reads contiguous caches only; use the variant paged, or a layout without block_size"
    return None


def score_matrix_bytes(trial: Trial) -> int:
    """Bytes of one score matrix in the trial's dtype: query heads x query tokens x the tokens that some query sees."""
    w = trial.workload
    cells = sum(q_len * (kv_len - w.first_visible(b)) for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens)))
    return w.shape.num_q_heads * cells * trial.itemsize
