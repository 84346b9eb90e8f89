"""Where one decode step stands under a GPU's roofline: attention over the KV cache, the weights, and both together.

Bears on the article's claims that decoding is bound by memory traffic, that GQA relieves it and that batching fills the
GPU. Batching moves the weights' point, for they are read once for all sequences; attention stays where its group ratio
and KV format put it, for every sequence reads its own cache. The roof is quoted from a data sheet, the points modelled.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from matplotlib.lines import Line2D

from kvlab.catalog.gpus import GPUSpec, gpu
from kvlab.catalog.models import model
from kvlab.figures._rows import with_rows
from kvlab.figures._style import PALETTE, Look, Style, above, log_axis, sized
from kvlab.kv.sizing import layer_bytes, weight_bytes
from kvlab.shapes import AttentionShape, LayerSpec, Workload
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = None
MODEL = "Qwen/Qwen2-72B-Instruct"                               # the article's; 80 layers of 64 query heads × 128
LOOKS = {"attention": Look(PALETTE[1], "o"), "weights": Look(PALETTE[0], "s"), "step": Look(PALETTE[2], "^")}
X, Y = (0.25, 4096), (1e11, 1e16)                               # fixed: the points walk, the axes stay


@dataclass(frozen=True)
class DecodeStep:
    """One token for each of `batch_size` sequences of `kv_len` tokens, in a model like Qwen2-72B, on one kind of GPU.

    group_ratio: query heads per KV head (the model's own is 8). q, output and arithmetic are 16 bit wide, weights too;
    every parameter is taken to be read once and to multiply once per sequence. Other activations are left out. Tensor
    parallel GPUs share flop and bytes alike, so the points stay. Refused (ValueError): a group ratio that does not
    divide the query heads, a GPU whose bandwidth or dense 16-bit rate is unknown.
    Source: useful_flops and ideal_bytes as the probe roofline has them; Williams, Waterman, Patterson 2009.
    """
    figure: ClassVar[str] = "decode_roofline"
    gpu: str = "H200 SXM 141GB"
    batch_size: int = 16
    kv_len: int = 4096
    group_ratio: int = 8
    kv_format: str = "bf16"

    def __post_init__(self):
        if not self.bandwidth or not self.peak:
            raise ValueError(f"the catalogue gives no memory bandwidth or no dense 16-bit rate of {self.sheet.name}; "
                             "choose another GPU")

    @cached_property
    def sheet(self) -> GPUSpec:
        return gpu(self.gpu)

    @property
    def dtype(self) -> str:
        """The 16-bit type whose dense rate the data sheet gives: bf16, or fp16 where it has no bf16."""
        return "bf16" if self.sheet.flops["bf16"] else "fp16"

    @property
    def peak(self) -> float:
        """Dense flop/s of that type; 0, which is refused, where the data sheet does not give it."""
        return self.sheet.flops[self.dtype] or 0.0

    @property
    def bandwidth(self) -> float:
        """B/s; 0, which is refused, where the data sheet does not give it."""
        return self.sheet.bandwidth or 0.0

    @cached_property
    def workload(self) -> Workload:
        """The attention call of one layer."""
        spec = model(MODEL)
        if self.group_ratio < 1 or spec.num_q_heads % self.group_ratio:
            raise ValueError(f"group_ratio={self.group_ratio} must divide the {spec.num_q_heads} query heads")
        shape = AttentionShape(spec.num_q_heads, spec.num_q_heads // self.group_ratio, spec.head_dim)
        return Workload.decode(shape, batch_size=self.batch_size, kv_len=self.kv_len)

    def parts(self) -> dict[str, tuple[int, int]]:
        """(flop, bytes) of attention in all layers, of the weights, and of the step."""
        spec, shape = model(MODEL), self.workload.shape
        layer = LayerSpec("full", 1, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
        q_and_out = self.batch_size * shape.num_q_heads * (shape.head_dim + shape.v_dim) * 2
        attention = (spec.num_layers * 2 * shape.num_q_heads * (shape.head_dim + shape.v_dim)
                     * self.workload.visible_pairs(),
                     spec.num_layers * (self.batch_size * layer_bytes(layer, self.kv_len, self.kv_format) + q_and_out))
        weights = (2 * (spec.params or 0) * self.batch_size, weight_bytes(spec) or 0)
        return {"attention": attention, "weights": weights,
                "step": (attention[0] + weights[0], attention[1] + weights[1])}

    def rows(self) -> Iterator[dict]:
        """The roof, then flop, bytes, intensity, attainable rate and least time of each part."""
        about = dict(model=MODEL, kv_format=self.kv_format, hardware=self.sheet.name, dtype=self.dtype,
                     case=json.dumps(asdict(self)), **self.workload.columns())
        roof = dict(about, kind="quoted", method="cite:data_sheet", source=self.sheet.source, scope="device")
        yield dict(roof, metric="matmul_ceiling", value=self.peak, unit="flop/s")
        yield dict(roof, metric="read_ceiling", value=self.bandwidth, unit="B/s")
        yield dict(roof, metric="ridge", value=self.peak / self.bandwidth, unit="flop/B")
        for part, (flops, moved) in self.parts().items():
            rate = min(self.peak, flops / moved * self.bandwidth)
            for metric, value, unit, formula in (
                    ("useful_flops", flops, "flop", "2·Hq·(Dk+Dv)·visible pairs; 2·parameters·sequences"),
                    ("ideal_bytes", moved, "B", "q, output and each stored K/V byte once; weights once"),
                    ("intensity", flops / moved, "flop/B", "useful_flops ÷ ideal_bytes"),
                    ("attainable_flops", rate, "flop/s", "min(peak, intensity × bandwidth)"),
                    ("attainable_flops_share", rate / self.peak, "ratio", "min(1, intensity ÷ ridge)"),
                    ("roof_latency", flops / rate, "s", "useful_flops ÷ attainable_flops")):
                yield dict(about, metric=metric, value=value, unit=unit, kind="modelled", method=f"formula:{formula}",
                           scope=part, source="decode_roofline")


def select(table: pd.DataFrame, choice: DecodeStep | None = None) -> pd.DataFrame:
    """The roof and the three points for a choice (default: batch 16 on an H200); nothing is measured."""
    return with_rows(table, list((choice or DecodeStep()).rows()))


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    figure, (ax,) = style.figure(3)
    value = {(row["scope"], row["metric"]): row["value"] for _, row in rows.iterrows()}
    peak, bandwidth, ridge = (value["device", name] for name in ("matmul_ceiling", "read_ceiling", "ridge"))
    x = np.geomspace(*X, 400)
    ax.plot(x, np.minimum(peak, x * bandwidth), color="black", lw=1)
    ax.plot([ridge], [peak], ls="none", **style.marker("quoted"))
    about = rows.iloc[0]
    handles = [Line2D([], [], lw=1, **style.marker("quoted"), label=(
        f"{about['hardware']}: {display(bandwidth, 'B/s')}, {display(peak, 'flop/s')} {about['dtype']}, ridge "
        f"{ridge:.0f} flop/B (data sheet)"))]
    named = {"attention": "attention", "weights": "weights", "step": "the step"}
    for part, look in LOOKS.items():
        mine = {metric: value[part, metric] for scope, metric in value if scope == part}
        at = mine["intensity"], mine["attainable_flops"]
        ax.plot([at[0]] * 2, [Y[0], at[1]], color=look.color, lw=0.8, ls=":")
        handles += ax.plot(*[[v] for v in at], ls="none", ms=7, **style.marker("modelled", look), label=(
            f"{named[part]}: {at[0]:.3g} flop/B, at most {100 * mine['attainable_flops_share']:.3g} % of the peak, "
            f"at least {display(mine['roof_latency'], 's')}"))
    log_axis(ax.xaxis, "count", base=2)
    log_axis(ax.yaxis, "flop/s")
    ax.set(xlim=X, ylim=Y, xlabel="intensity: useful flop per ideal byte (flop/B)", ylabel="attainable rate")
    ax.set_title(f"decode in a model like {about['model'].rpartition('/')[2]}: {about['batch_size']:,} × "
                 f"{about['kv_len']:,} tokens, group ratio {about['group_ratio']}, KV in {about['kv_format']}",
                 loc="left", fontsize=sized(8))
    above(figure, handles, columns=1)
    return figure
