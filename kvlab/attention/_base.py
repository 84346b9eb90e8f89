"""A trial is one cell of an experiment as pure data; a comparison is the trials that are measured together.

Legend: B = sequence, T = query token, S = kv token, Q = query head, K = kv head, D = head_dim, E = v_head_dim.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.attention import _captured
from kvlab.attention._captured_file import CALIBRATION_TOKENS
from kvlab.attention._variant import VariantRef
from kvlab.kv.cache import KVCache, Layout, block_tables
from kvlab.kv.formats import KVFormat, kv_format
from kvlab.shapes import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DTYPES = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}


@dataclass(frozen=True)
class Trial:
    """One cell of an experiment, as pure data: any row can be run again from it.

    dtype is that of q, of the arithmetic's inputs and of the output. data: "gaussian", "outlier" (two channels of K
    fifteen times as large, as real models have), or "file:<sha256>": what a model computed, as kvlab.capture writes
    it; `why_not` says where the file is missed. replica tells the two halves of an A/A pair apart.
    """
    variant: VariantRef
    workload: Workload
    kv_format: str = "fp32"
    layout: Layout = field(default_factory=Layout)
    dtype: str = "fp32"
    data: str = "gaussian"
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    replica: int = 0

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}; allowed: {', '.join(DTYPES)}")
        kv_format(self.kv_format)                                    # raises for an unknown format, by name
        if self.data not in _captured.DRAWN and not _captured.is_file(self.data):
            raise ValueError(f"data={self.data!r}; allowed: {_captured.ALLOWED}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r}; allowed: cpu, cuda, cuda:0, cuda:1, …")
        if type(self.threads) is not int or self.threads < 1:
            raise ValueError(f"threads={self.threads!r} must be a whole number of at least 1")

    @property
    def format(self) -> KVFormat:
        return kv_format(self.kv_format)

    @property
    def torch_dtype(self):
        import torch
        return getattr(torch, DTYPES[self.dtype][0])

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @cached_property
    def case_id(self) -> str:
        return digest(asdict(self))

    def why_not(self) -> str | None:
        """Why this trial cannot run here, in one sentence: the device's, the layout's, the data's, the variant's."""
        if why := no_device(self.device):
            return why
        if self.threads > (os.cpu_count() or 1):
            return f"threads={self.threads}, and this machine has {os.cpu_count()} logical cores"
        return (self.format.why_not(self.workload.shape) or self.layout.why_not(self.workload, self.format)
                or _captured.why_not(self) or self.variant.load().why_not(self))

    def prepare(self, inputs: list[Inputs]) -> list[Callable[[], Tensor]]:
        """One call per input copy, planned outside the clock; the copies share one workspace."""
        variant, scratch = self.variant.load(), {}
        return [variant.prepare(self, replace(one, scratch=scratch)) for one in inputs]

    @property
    def format_path(self) -> str:
        """native: the cache is read as it lies; decoded: it is turned into floats first; gathered: copied first."""
        own = getattr(self.variant.load(), "format_path", None)          # a kernel that decodes in registers says so
        return own(self) if own else "native" if self.kv_format == self.dtype else "decoded"

    @property
    def ran(self) -> str:
        """Which of its ways a variant takes here, in words, where it has several; its rows say so."""
        own = getattr(self.variant.load(), "ran", None)
        return own(self) if own else ""

    def columns(self) -> dict:
        """The result table's columns about this trial."""
        return dict(variant=self.variant.label, device=self.device, dtype=self.dtype, kv_format=self.kv_format,
                    block_size=self.layout.block_size, page_order=self.layout.page_order, data=self.data,
                    threads=self.threads, seed=self.seed, replica=self.replica, **self.workload.columns(),
                    case=json.dumps(asdict(self), sort_keys=True))


def no_device(device: str) -> str | None:
    """Why torch cannot run on that device here, in one sentence."""
    import torch
    if not device.startswith("cuda"):
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; use device cpu, or install a CUDA build of torch beside a driver"
    if int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        return f"there is no {device}; torch sees {torch.cuda.device_count()} CUDA devices"
    return None


def trial(variant, workload: Workload, *, kv_format: str | None = None, layout: Layout | None = None,
          dtype: str | None = None, device: str = "cpu", data: str | Path = "gaussian", **rest) -> Trial:
    """A trial with the usual defaults: fp32 on a CPU, bf16 on CUDA, K/V in that dtype, the variant's own layout.

    data: as in a Trial, or the path of a safetensors file of captured tensors.
    """
    ref = VariantRef.of(variant)
    dtype = dtype or ("bf16" if device.startswith("cuda") else "fp32")
    if layout is None:
        layout = ref.default_layout
    return Trial(ref, workload, kv_format or dtype, layout, dtype, _captured.named(data), device, **rest)


@dataclass(eq=False)
class Inputs:
    """One copy of a trial's tensors: q of the whole batch [sum of q_lens, Q, D], the encoded cache, its block table.

    k, v: the originals before encoding, one [S, K, D] and [S, K, E] per sequence; kept for copy 0 only.
    block_table: [B, most blocks of a sequence], filled up with block 0. scratch: what `workspace` made.
    """
    q_TQD: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    cache: KVCache
    block_table: Tensor
    seed: int
    k: list[Tensor] | None = None
    v: list[Tensor] | None = None
    scratch: dict[tuple, Any] = field(default_factory=dict)

    def workspace(self, name: str, *size: int, dtype) -> Tensor:
        """Memory that a trial keeps between its calls, one for all input copies, as an engine has one for all layers.

        Its content does not outlive a call.
        """
        import torch
        key = name, size, dtype                          # a decoder's calls of one step differ in size
        if key not in self.scratch:
            self.scratch[key] = torch.empty(size, dtype=dtype, device=self.q_TQD.device)
        return self.scratch[key]

    @property
    def q_BTQD(self) -> list[Tensor]:
        """q of each sequence, as views."""
        return list(self.q_TQD.split(self.q_lens))

    def stored(self, sequence: int):
        """One contiguous sequence's arrays of K and of V, as [K, R, W] views of its only block."""
        cache = self.cache
        return cache.with_tails(*(tuple(a[sequence] for a in cache.by_head(side))
                                  for side in (cache.k_arrays, cache.v_arrays)), sequence)

    def all_stored(self):
        """A contiguous batch's arrays of K and of V, as [B, K, R, W] views."""
        cache = self.cache
        return cache.with_tails(cache.by_head(cache.k_arrays), cache.by_head(cache.v_arrays), slice(None))

    def decode(self, arrays_k, arrays_v, kv_len: int, first: int = 0, base: int = 0) -> tuple[Tensor, Tensor]:
        """(k, v) as floats of q's dtype, tokens first … kv_len, from arrays that begin at token `base`.

        A view where they are stored in that dtype.
        """
        cache = self.cache
        return cache.format.decode_heads(arrays_k, arrays_v, kv_len, cache.shape, self.q_TQD.dtype, first, base)


@dataclass(frozen=True)
class Comparison:
    """Trials of one workload that differ only in variant, format or layout, measured interleaved on one device."""
    trials: tuple[Trial, ...]

    def __post_init__(self):
        if not self.trials:
            raise ValueError("a comparison needs at least one trial")
        if len(set(self.trials)) != len(self.trials):
            raise ValueError("a comparison's trials must differ; give an A/A pair different replicas")
        common = {(t.workload, t.dtype, t.data, t.device, t.threads, t.seed) for t in self.trials}
        if len(common) != 1:
            raise ValueError("trials of a comparison may differ only in variant, kv_format, layout and replica")

    @property
    def workload(self) -> Workload:
        return self.trials[0].workload

    @property
    def device(self) -> str:
        return self.trials[0].device

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        """Columns of a row about the whole comparison: those in which all trials agree, and no variant."""
        all_of = [t.columns() for t in self.trials]
        same = {k: v for k, v in all_of[0].items() if all(c[k] == v for c in all_of)}
        return {**same, "variant": "", "case": json.dumps(asdict(self), sort_keys=True)}

    def cache_bytes(self) -> dict[tuple[str, Layout], int]:
        """Bytes of one copy's K/V in each (kv_format, layout), the sequences' own."""
        w = self.workload
        return {(t.kv_format, t.layout): sum(t.format.nbytes(n, w.shape) for n in w.kv_lens) for t in self.trials}

    def touched_bytes(self) -> dict[tuple[str, Layout], int]:
        """Bytes of one copy's K/V that a call may read: a window hides tokens, a shared prefix lies there once."""
        w, s = self.workload, self.workload.shape
        touched = {}
        for name, layout in self.cache_bytes():
            fmt, shared = kv_format(name), self.workload.shared_prefix if layout.share_prefix else 0
            own = [fmt.nbytes(n, s, first=min(n, max(w.first_visible(b), shared))) for b, n in enumerate(w.kv_lens)]
            first = min(w.first_visible(b) for b in range(w.batch_size))
            touched[name, layout] = sum(own) + (fmt.nbytes(shared, s, first=first) if shared > first else 0)
        return touched

    def nbytes(self, copies: int) -> int:
        """Bytes that inputs(copies) will allocate, with the originals of copy 0 and what the oracle needs in fp64."""
        w, s, stored = self.workload, self.workload.shape, 0
        for name, layout in self.cache_bytes():
            fmt = kv_format(name)
            block_size = layout.block_size or longest_block(w, fmt)
            blocks = sum(-(-n // block_size) for n in w.kv_lens) + (layout.block_size is not None)      # the null block
            stored += fmt.allocated(blocks, block_size, w.batch_size, s)
        q = sum(w.q_lens) * s.num_q_heads * s.head_dim * self.trials[0].itemsize
        fp32 = 4 * sum(w.kv_lens) * s.num_kv_heads * (s.head_dim + s.v_dim)
        scores = 3 * 8 * s.num_q_heads * min(sum(w.q_lens), 256) * max(w.kv_lens)       # of the oracle, in fp64
        return copies * (stored + q) + 4 * fp32 + scores

    def inputs(self, copies: int = 1) -> dict[tuple[str, Layout], list[Inputs]]:
        """The tensors of every (kv_format, layout), built once and shared by the variants; copy i has seed + i."""
        made: dict[tuple[str, Layout], list[Inputs]] = {(t.kv_format, t.layout): [] for t in self.trials}
        formats = {name: calibrated(self.trials[0], kv_format(name)) for name in {t.kv_format for t in self.trials}}
        for i in range(copies):
            q_TQD, k, v = originals(self.trials[0], self.trials[0].seed + i)
            for (fmt, layout), copies_so_far in made.items():
                one = _encode(self.trials[0], formats[fmt], layout, q_TQD, k, v, self.trials[0].seed + i)
                if i == 0:
                    one.k, one.v = k, v
                copies_so_far.append(one)
        return made


def originals(trial: Trial, seed: int) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """q of the batch, and k, v of each sequence before encoding, in the trial's dtype; v is None if a view of k."""
    if _captured.is_file(trial.data):
        return _captured.originals(trial, seed)
    import torch
    w, s = trial.workload, trial.workload.shape
    generator = torch.Generator(trial.device).manual_seed(seed)

    def gaussian(*size):
        return torch.randn(*size, generator=generator, device=trial.device).to(trial.torch_dtype)

    q_TQD = gaussian(sum(w.q_lens), s.num_q_heads, s.head_dim)
    k = [gaussian(n, s.num_kv_heads, s.head_dim) for n in w.kv_lens]
    v = [None if s.v_in_k else gaussian(n, s.num_kv_heads, s.v_dim) for n in w.kv_lens]
    if trial.data == "outlier":
        for k_SKD in k:
            k_SKD[..., :2] *= 15
    for b in range(1, w.batch_size):
        k[b][:w.shared_prefix] = k[0][:w.shared_prefix]
        if not s.v_in_k:
            v[b][:w.shared_prefix] = v[0][:w.shared_prefix]
    return q_TQD, k, v


CALIBRATION_SEED = 2**31                                # the seed lies far from those of the input copies


def calibrated(trial: Trial, fmt: KVFormat) -> KVFormat:
    """The format with its static scales, if it has any, from a calibration pass over tokens that no input holds."""
    if not fmt.static:
        return fmt
    if _captured.is_file(trial.data):
        return fmt.calibrate(*_captured.calibration(trial))
    tokens = Workload(trial.workload.shape, (1,), (CALIBRATION_TOKENS,))
    _, (k_SKD,), (v_SKE,) = originals(replace(trial, workload=tokens), trial.seed + CALIBRATION_SEED)
    return fmt.calibrate(k_SKD, v_SKE)


def longest_block(workload: Workload, fmt: KVFormat) -> int:
    """Slots of the one block that a contiguous layout gives each sequence: room for the longest, in whole groups."""
    group = fmt.token_group(workload.shape)
    return -(-max(workload.kv_lens) // group) * group


def _encode(trial: Trial, fmt: KVFormat, layout: Layout, q_TQD, k, v, seed: int) -> Inputs:
    import torch
    w = trial.workload
    tables, num_blocks = block_tables(w, layout, seed)
    block_size = layout.block_size or longest_block(w, fmt)
    cache = KVCache(w.shape, fmt, num_blocks, block_size, order=layout.order, device=trial.device,
                    sequences=w.batch_size)
    for b, (table, k_SKD, v_SKD) in enumerate(zip(tables, k, v)):
        cache.write(fmt.encode(k_SKD, v_SKD), table, b)
    longest = max(map(len, tables))
    block_table = torch.tensor([t + [0] * (longest - len(t)) for t in tables], device=trial.device)
    return Inputs(q_TQD, w.q_lens, w.kv_lens, cache, block_table, seed)


def digest(data: dict) -> str:
    """Twelve hex digits that name this data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
