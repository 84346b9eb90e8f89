"""The cells on which a variant must agree with the oracle: shapes, lengths, formats, layouts, all small."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.attention._base import Comparison, trial
from kvlab.attention._variant import VariantRef
from kvlab.kv.cache import Layout
from kvlab.shapes import AttentionShape, Workload

WORKLOADS = {
    "decode, MHA": Workload.decode(AttentionShape(4, 4, 32), kv_len=100),
    "decode, GQA, batch": Workload.decode(AttentionShape(8, 2, 64), batch_size=3, kv_len=129),
    "decode, MQA, one token": Workload.decode(AttentionShape(8, 1, 32), kv_len=1),
    "decode, ragged": Workload(AttentionShape(8, 2, 32), (1, 1, 1), (7, 64, 200)),
    "decode, ratio 32": Workload.decode(AttentionShape(32, 1, 64), kv_len=300),
    "decode, window": Workload(AttentionShape(8, 2, 32, window=50), (1, 1), (30, 333)),
    "decode, K wider than V": Workload.decode(AttentionShape(4, 2, 48, v_head_dim=32), kv_len=77),
    "decode, absorbed MLA": Workload.decode(AttentionShape(16, 1, 72, v_head_dim=64, v_in_k=True), kv_len=90),
    "prefill, MHA": Workload.prefill(AttentionShape(4, 4, 32), q_len=64),
    "prefill, GQA, longer than a tile": Workload.prefill(AttentionShape(4, 1, 32), q_len=600),
    "prefill after a cache": Workload.prefill(AttentionShape(8, 2, 32), q_len=20, kv_len=100),
    "prefill, window": Workload.prefill(AttentionShape(8, 2, 32, window=30), batch_size=2, q_len=80),
    "mixed batch": Workload(AttentionShape(8, 2, 32), (1, 17, 40), (90, 33, 40)),
    "shared prefix": Workload.decode(AttentionShape(8, 2, 32), batch_size=3, kv_len=100, shared_prefix=64),
    "soft-cap": Workload.prefill(AttentionShape(4, 2, 32, softcap=20.0), q_len=40),
}
FORMATS = ("fp32", "fp16", "bf16", "int8/token", "int8/block16")
# static scales, packed codes, K and V apart, a tail outside the blocks: where lengths, windows and batches differ
MORE_FORMATS = ("int8/head", "fp8_e4m3", "k8v4", "kivi4/g16/r32")
WITH_MORE_FORMATS = ("decode, GQA, batch", "decode, ragged", "decode, window", "decode, absorbed MLA",
                     "prefill after a cache")
LAYOUTS = (Layout(), Layout(order="token"), Layout(16), Layout(16, "random"), Layout(48, "random", "token"),
           Layout(16, "random", share_prefix=True))


def cells(ref: VariantRef, *, device: str = "cpu",
          dtypes: tuple[str, ...] = ("fp32",)) -> Iterator[tuple[str, Comparison]]:
    """(what the cell is about, a comparison of one trial) for every workload, format, layout and dtype."""
    for name, workload in WORKLOADS.items():
        for layout in LAYOUTS:
            if layout.share_prefix and not workload.shared_prefix:
                continue
            for fmt in FORMATS + (MORE_FORMATS if name in WITH_MORE_FORMATS else ()):
                for dtype in dtypes:
                    one = trial(ref, workload, kv_format=fmt, layout=layout, device=device, dtype=dtype, threads=1)
                    yield name, Comparison((one,))
