"""What runs inside a transformers model while kvlab is attached to it: storing, attending, and what each call took.

Knows tensors and kvlab only; what knows transformers is in kvlab.model.transformers.
Legend: B = sequence, T = query token, S = kv token, Q = query head, K = kv head, D = head_dim, E = v_head_dim.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from kvlab.attention import Inputs, Trial, VariantRef, ideal_traffic, reference
from kvlab.attention._base import digest
from kvlab.kv.cache import KVCache, Layout, block_tables
from kvlab.kv.formats import KVFormat, kv_format
from kvlab.model._asked import layer_of
from kvlab.model.cache import DTYPES
from kvlab.shapes import AttentionShape, Workload

CHECKED_ROWS = 256              # query tokens of a long prompt that are held against the fp64 oracle, ends included
MASK_CELLS = 2**22              # of a mask that are looked at at once


@dataclass(eq=False)
class Attached:
    """kvlab's side of an attached model; `rows` says what the attention calls took."""
    model: str
    variant: VariantRef
    formats: tuple[KVFormat, ...]
    layout: Layout
    errors: bool = False
    open: bool = False
    calls: list[Call] = field(default_factory=list)
    modules: set[int] = field(default_factory=set)                  # ids of the model's parts
    pending: tuple[Tensor, Store] | None = None                     # K on its way from the cache to the attention
    observed: dict[int, list[tuple[Tensor, Tensor]]] | None = None  # K, V per layer, where a calibration runs

    def rows(self) -> list[dict]:
        """Rows of the result table: per layer and kind of call (batch, new tokens), the median over its calls.

        latency_s (of the attention call alone, in the model's own order: no cold caches, no interleaving), ideal_bytes,
        kv_bytes (of the whole batch after the last call) and, with errors=True, kernel_error and format_error over all
        outputs together. Both errors are the layer's own: K and V are those of the attached model. `note` names the
        layer. `kvlab.record.reading.table(attached.rows())` makes a table of them.
        """
        kinds: dict[tuple, list[Call]] = {}
        for call in self.calls:
            w = call.trial.workload
            kinds.setdefault((call.layer, w.shape, w.q_lens, call.note, call.trial.dtype), []).append(call)
        return [row for _, calls in sorted(kinds.items(), key=lambda k: (k[0][0], -k[0][2][0], len(k[0][2])))
                for row in self._rows_of(calls)]

    def _rows_of(self, calls: list[Call]) -> Iterator[dict]:
        last, stored = calls[-1], self.formats[calls[-1].layer]
        t, w = last.trial, last.trial.workload
        lens = sorted(c.trial.workload.kv_lens[0] for c in calls)
        lengths = f"; kv_len {lens[0]} … {lens[-1]}" if lens[0] < lens[-1] else ""
        context = {**t.columns(), "study": "attach", "model": self.model, "data": "activations of the model",
                   "case": "", "kv_format": stored.name, "format_path": t.format_path, "source": "attach",
                   "case_id": digest(dict(model=self.model, layer=last.layer, stored=stored.name, **asdict(t))),
                   "n": len(calls), "scope": "call", "status": "ok",
                   "note": f"layer {last.layer}{lengths}{last.note}",
                   "hardware": torch.cuda.get_device_name(t.device) if t.device.startswith("cuda") else ""}
        seconds = [c.took() for c in calls]
        low, high = _median_interval(seconds)
        yield dict(context, metric="latency_s", value=median(seconds), unit="s", kind="measured", method=last.clock,
                   low=low, high=high, cache_state="in situ: as the model's own calls leave it")
        ideal = [ideal_traffic(c.trial.workload, c.trial.format, t.itemsize) for c in calls]
        yield dict(context, metric="ideal_bytes", value=median(i.read_bytes + i.write_bytes for i in ideal), unit="B",
                   kind="modelled", method="formula:q + unique visible K/V + output, once")
        held = [stored.nbytes(n, w.shape, first=max(0, n - (w.shape.window or n))) for n in w.kv_lens]
        yield dict(context, metric="kv_bytes", value=sum(held), unit="B", kind="modelled", n=1,
                   method="formula:KVFormat.nbytes", note=f"layer {last.layer}; the whole batch, after the last call")
        for metric, of in (("kernel_error", "the K, V that the variant read"), ("format_error", "the original K, V")):
            if self.errors:
                off, norm = map(sum, zip(*(c.errors[metric] for c in calls)))
                yield dict(context, metric=metric, value=(off / norm)**0.5, unit="ratio", kind="measured",
                           method="derived", denominator=f"L2 norm of fp64 attention on {of} of this layer, all calls")

    def attend(self, module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, scaling: float | None = None,
               dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, **more):
        """The attention function that transformers calls: query [B, Q, T, D] in, ([B, T, Q, E], None) out."""
        pending, self.pending = self.pending, None
        layer = self._layer(module, dropout, query, more)
        B, Q, T, D = query.shape
        store = pending[1] if pending else Store(self, layer)
        if pending and (pending[0] is not key or store.layer != layer):
            raise ValueError(f"layer {layer} changes K between its cache and its attention; attach cannot store that")
        E, kv_len = value.shape[-1], store.kv_len + key.shape[2]
        if not isinstance(attention_mask, Visible) or (attention_mask.q_len, attention_mask.kv_len) != (T, kv_len):
            raise ValueError(f"layer {layer} does not attend to {T} new of {kv_len} tokens under a causal mask of "
                             "transformers' own making (cross attention, a 4D mask, K and V of another layer); attach "
                             "takes none of these")
        window, shown = sliding_window or getattr(module, "sliding_window", None), attention_mask.window or kv_len
        if window and min(window, kv_len) != shown:
            raise ValueError(f"layer {layer} says that its window is {window}, and its mask shows the newest token "
                             f"{shown} of {kv_len} tokens")
        shape = AttentionShape(Q, key.shape[1], D, None if E == D else E, window=window or attention_mask.window,
                               softcap=softcap)
        if scaling is not None and abs(scaling * D**0.5 - 1) > 1e-9:
            query = query * (scaling * D**0.5)                      # variants divide by sqrt(D) themselves
        if self.observed is not None:
            self.observed.setdefault(layer, []).append((key, value))
        q_TQD = query.transpose(1, 2).reshape(B * T, Q, D)
        return self._call(store, Workload(shape, (T,) * B, (kv_len,) * B), q_TQD, key, value).view(B, T, Q, E), None

    def _layer(self, module, dropout: float, query: Tensor, more: dict) -> int:
        """The layer's number, or a sentence on what it asks for that no variant computes."""
        if id(module) not in self.modules:
            raise ValueError("another model that shares the attached model's config was called; give each its own")
        layer = layer_of(module, dropout, more, "attach")
        if query.requires_grad:
            raise ValueError(f"layer {layer}: attach computes no gradients; leave out torch.enable_grad()")
        if query.dtype not in DTYPES:
            raise ValueError(f"layer {layer} computes in {query.dtype}; allowed: {', '.join(map(str, DTYPES))}")
        return layer

    def _call(self, store: Store, workload: Workload, q_TQD: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the new tokens, then attend over what is stored, or over full precision where the docs say so."""
        shape, T, layer = workload.shape, workload.q_lens[0], store.layer
        fmt, dtype = store.format, DTYPES[q_TQD.dtype]
        trial = Trial(self.variant, workload, fmt.name, self.layout, dtype, device=str(q_TQD.device),
                      threads=torch.get_num_threads())
        _refuse(trial, layer)
        note, read = "", store
        if T > 1 and fmt.depends_on_later(shape):
            trial = replace(trial, kv_format=dtype)
            _refuse(trial, layer)
            note, read = f"; own tokens attended in {dtype}, then kept in {fmt.name}", Store(self, layer, dtype)
            read.append(shape, *(torch.cat(pair, 2) for pair in zip(store.decoded(shape, key), (key, value))))
        store.append(shape, key, value)
        done = Call(layer, trial, note)
        out = done.run(trial.prepare([read.inputs(q_TQD, T)])[0])
        self.calls.append(done)
        if self.errors:
            done.compare(out, q_TQD, kernel_error=read.decoded(shape, key.double()), format_error=store.originals)
        return out


def _refuse(trial: Trial, layer: int) -> None:
    if why := trial.why_not():
        raise ValueError(f"layer {layer}: {trial.variant.label} on {trial.kv_format}: {why}")


@dataclass(frozen=True)
class Visible:
    """What a mask shows: q_len new of kv_len tokens, causal, of at most the last `window` (None: all so far)."""
    q_len: int
    kv_len: int
    window: int | None


def examine(*, batch_size: int, mask_function, kv_length: int, kv_offset: int = 0, q_length: int | None = None,
            q_offset: int = 0, cache_position: Tensor | None = None, attention_mask: Tensor | None = None,
            use_vmap: bool = False, **unused) -> Visible:
    """The mask builder that transformers calls once per forward and kind of layer: looks at every cell, builds none.

    transformers 5.0 gives cache_position where later ones give q_length and q_offset. use_vmap: the model mixes in a
    function of its own.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("the attention mask has zeros (a padded batch): attach takes sequences of equal length; run "
                         "prompts of one length together and the others apart")
    if cache_position is not None:
        q_length, q_offset = len(cache_position), int(cache_position[0])
    plain = not use_vmap and not kv_offset and q_offset + q_length == kv_length
    batch_B, token_S, window = torch.arange(batch_size), torch.arange(kv_length), None
    step = max(1, MASK_CELLS // (kv_length * batch_size))
    for end in range(q_length, 0, -step) if plain else ():          # from the newest token on, which shows the window
        position_T1 = torch.arange(max(0, end - step), end)[:, None] + q_offset
        seen = mask_function(batch_B[:, None, None, None], torch.zeros(1, 1, 1, 1, dtype=torch.long),
                             position_T1[None, None], token_S[None, None, None])
        seen_BTS = torch.as_tensor(seen).cpu().broadcast_to(batch_size, 1, len(position_T1), kv_length)[:, 0]
        if end == q_length:
            newest = int(seen_BTS[0, -1].sum())
            window = newest if newest < kv_length else None
        expected_TS = token_S <= position_T1
        if window is not None:
            expected_TS &= token_S > position_T1 - window
        plain = plain and bool((seen_BTS == expected_TS).all())
    if not plain:
        raise ValueError("this mask is neither causal nor a plain window (chunks, packed sequences, parts that look "
                         "ahead, a mask of the model's own); kvlab's variants compute nothing else")
    return Visible(q_length, kv_length, window)


class Store:
    """K and V of one layer for a batch of sequences of one length, in a KVCache that grows; every token is kept."""

    def __init__(self, attached: Attached, layer: int, full: str | None = None):
        """full: keep tokens in this dtype instead of the layer's format."""
        self.attached, self.layer, self.format = attached, layer, kv_format(full) if full else attached.formats[layer]
        self.clear()

    def clear(self) -> None:
        self.cache, self.tables, self.kv_len, self.room, self.originals = None, [], 0, 0, None

    def append(self, shape: AttentionShape, k_BKTD: Tensor, v_BKTE: Tensor) -> None:
        """Store new tokens of every sequence behind those that are there."""
        B, _, T, _ = k_BKTD.shape
        if self.cache is not None and len(self.tables) != B:
            raise ValueError(f"layer {self.layer} holds {len(self.tables)} sequences and gets {B}; give each batch a "
                             "cache of its own")
        if self.kv_len + T > self.room:
            self._grow(shape, B, self.kv_len + T, str(k_BKTD.device))
        for b, table in enumerate(self.tables):
            try:
                self.cache.append(k_BKTD[b].transpose(0, 1), v_BKTE[b].transpose(0, 1), table, self.kv_len, b)
            except ValueError as error:
                raise ValueError(f"layer {self.layer}: {error}") from None
        self.kv_len += T
        if self.attached.errors:
            old = self.originals or (k_BKTD[:, :, :0], v_BKTE[:, :, :0])
            self.originals = tuple(torch.cat(pair, 2) for pair in zip(old, (k_BKTD, v_BKTE)))

    def _grow(self, shape: AttentionShape, B: int, tokens: int, device: str) -> None:
        """Move the codes, as they are, to a cache with room for `tokens`, and for twice as many as before."""
        layout, group = self.attached.layout, self.format.token_group(shape)
        room = -(-max(tokens, 2 * self.room) // group) * group
        tables, num_blocks = block_tables(Workload(shape, (1,) * B, (room,) * B), layout, seed=0)
        grown = KVCache(shape, self.format, num_blocks, layout.block_size or room, order=layout.order, device=device,
                        sequences=B)
        for b, table in enumerate(self.tables):
            grown.write(self.cache.gather(table, self.kv_len, b), tables[b], b)
        self.cache, self.tables, self.room = grown, tables, room

    def decoded(self, shape: AttentionShape, like: Tensor) -> tuple[Tensor, Tensor]:
        """(k [B, K, S, D], v [B, K, S, E]) as stored, in the dtype of `like`; no tokens where nothing is stored."""
        if self.cache is None:
            return like[:, :, :0], like.new_empty(*like.shape[:2], 0, shape.v_dim)
        sides = [self.format.decode(self.cache.gather(table, self.kv_len, b), shape, like.dtype)
                 for b, table in enumerate(self.tables)]
        return tuple(torch.stack(side).transpose(1, 2) for side in zip(*sides))

    def inputs(self, q_TQD: Tensor, q_len: int) -> Inputs:
        used, B = -(-self.kv_len // self.cache.block_size), len(self.tables)
        table = torch.tensor([t[:used] for t in self.tables], device=q_TQD.device)
        return Inputs(q_TQD, (q_len,) * B, (self.kv_len,) * B, self.cache, table, seed=0)


@dataclass(eq=False)
class Call:
    """One attention call of one layer: what ran, its time, and its squared errors and norms."""
    layer: int
    trial: Trial
    note: str
    clock: str = ""
    seconds: float | list = 0.0                        # or the two CUDA events around it
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)

    def run(self, call) -> Tensor:
        if self.trial.device.startswith("cuda"):
            self.clock, self.seconds = "timer:cuda_events", [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.seconds[0].record()
            out = call()
            self.seconds[1].record()
            return out
        alone = self.trial.threads == 1 and sys.platform != "win32"  # then other programs do not enter the time
        self.clock, now = ("timer:thread_cpu", time.thread_time) if alone else ("timer:wall", time.perf_counter)
        began = now()
        out = call()
        self.seconds = now() - began
        return out

    def took(self) -> float:
        if isinstance(self.seconds, list):
            start, end = self.seconds
            end.synchronize()
            self.seconds = start.elapsed_time(end) / 1e3
        return self.seconds

    def compare(self, out_XQE: Tensor, q_XQD: Tensor, **sides: tuple[Tensor, Tensor]) -> None:
        """Against fp64 attention on each (k [B, K, S, D], v [B, K, S, E]); X = query token of the batch."""
        w, T = self.trial.workload, self.trial.workload.q_lens[0]
        row_T = torch.linspace(0, T - 1, min(T, CHECKED_ROWS), dtype=torch.float64).round().long().to(q_XQD.device)
        got = out_XQE.view(w.batch_size, T, *out_XQE.shape[1:])[:, row_T].flatten(0, 1).double()
        for metric, (k, v) in sides.items():
            exact = reference(w, list(q_XQD.split(w.q_lens)), list(k.transpose(1, 2)), list(v.transpose(1, 2)),
                              [row_T] * w.batch_size)
            self.errors[metric] = float((got - exact).square().sum()), float(exact.square().sum())


def _median_interval(seconds: list[float]) -> tuple[float | None, float | None]:
    """95 % interval of the median from the order statistics; none below six samples."""
    if len(seconds) < 6:
        return None, None
    from scipy.stats import quantile_test
    interval = quantile_test(seconds, p=0.5).confidence_interval(0.95)
    return float(interval.low), float(interval.high)
