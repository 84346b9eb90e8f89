"""KV cache of one sequence against its length, for models that cache in different ways, and where KV = weights.

Bears on the article's claims that 4096 tokens of Qwen2-72B take 1.25 GB and that KV far exceeds the weights. Exact
arithmetic on the catalogue's layer kinds: solid up to the model's own context length, dotted beyond it.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from kvlab.catalog.models import model
from kvlab.figures._rows import with_rows
from kvlab.figures._style import PALETTE, Look, Style, above, log_axis, ticks_at
from kvlab.kv.sizing import crossover_tokens, kv_bytes, state_bytes, weight_bytes
from kvlab.units import GiB, display

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = None
FORMAT = "bf16"
MODELS = {"Qwen/Qwen-72B": "MHA", "Qwen/Qwen2-72B-Instruct": "GQA",
          "google/gemma-3-27b-it": "GQA, 5 of 6 layers sliding",
          "deepseek-ai/DeepSeek-V3": "MLA", "moonshotai/Kimi-K3": "hybrid MLA + linear", "tiiuae/falcon-7b": "MQA"}
WEIGHED = "Qwen/Qwen2-72B-Instruct"                             # the article's model, by the id of its architecture
LENGTHS = tuple(2**i for i in range(10, 21))
ARTICLE_GIB, ARTICLE_TOKENS = 1.25, 4096


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Bytes of every model at every length, constant state, own context, weights and crossover: nothing is measured."""
    rows = []
    for name in MODELS:
        spec = model(name)

        def row(metric, value, unit="B", kind="modelled", spec=spec, **more):
            rows.append(dict(model=spec.name, batch_size=1, kv_format=FORMAT, metric=metric, value=value, unit=unit,
                             kind=kind, hardware="none", **{"source": "kv.sizing", "note": spec.approximate, **more}))
        for kv_len in sorted({*LENGTHS, spec.context}):
            row("kv_bytes", kv_bytes(spec, kv_len, FORMAT), kv_len=kv_len, method="formula:layer_bytes")
        row("state_bytes", state_bytes(spec), method="formula:count × LayerSpec.state_bytes")
        row("context_length", spec.context, "count", "quoted", source=spec.source, method="cite:config")
        if name == WEIGHED:
            row("weight_bytes", weight_bytes(spec), method="formula:parameters · 2 bytes")
            row("crossover_tokens", crossover_tokens(spec, FORMAT), "count",
                method="formula:largest n with kv_bytes(n) ≤ weight_bytes")
            row("kv_bytes", ARTICLE_GIB * GiB, kind="quoted", kv_len=ARTICLE_TOKENS, method="cite:article",
                source="the article: “1,342,177,280 bytes ≈ 1.25 GB” (that is GiB)")
    return with_rows(table, rows)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    figure, (ax,) = style.figure(3.6)
    looks = {name: Look(PALETTE[i], marker) for i, (name, marker) in enumerate(zip(MODELS, "osv^Ph"))}
    handles = [_line(ax, rows[rows["model"] == name], what, looks[name], style) for name, what in MODELS.items()]
    quoted = rows[(rows["metric"] == "kv_bytes") & (rows["kind"] == "quoted")].iloc[0]
    handles += ax.plot([quoted["kv_len"]], [quoted["value"] / GiB], ls="none", zorder=4, **style.marker("quoted"),
                       label=f"the article: {ARTICLE_GIB} GiB at {ARTICLE_TOKENS:,} tokens")
    handles.append(_crossover(ax, rows, style))
    ax.set_xscale("log", base=2)
    ticks_at(ax.xaxis, LENGTHS, [f"{n // 1024}K" if n < 2**20 else "1M" for n in LENGTHS])
    log_axis(ax.yaxis, "count")
    ax.set(xlabel="context of one sequence (tokens); dotted: beyond the model's own",
           ylabel=f"KV cache of one sequence, {FORMAT} (GiB)")
    above(figure, handles, columns=2)
    return figure


def _line(ax, mine, what, look, style):
    """One model, its constant state added; hollow marker where its own context ends."""
    def value(metric):
        return mine[mine["metric"] == metric]["value"].iloc[0]
    state, context = value("state_bytes"), value("context_length")
    line = mine[(mine["metric"] == "kv_bytes") & (mine["kind"] == "modelled")].sort_values("kv_len")
    for inside, dashes in ((line["kv_len"] <= context, "-"), (line["kv_len"] >= context, ":")):
        some = line[inside]
        ax.plot(some["kv_len"].astype(float), (some["value"] + state) / GiB, color=look.color, ls=dashes)
    end = line[line["kv_len"] == context]["value"].iloc[0] + state
    ax.plot([context], [end / GiB], ls="none", **style.marker("modelled", look))
    name = mine["model"].iloc[0].rpartition("/")[2].removesuffix("-Instruct")
    added = f", with {display(state, 'B')} constant state" if state else ""
    return Line2D([], [], label=f"{name}: {what}{added}", **style.marker("modelled", look))


def _crossover(ax, rows, style) -> Line2D:
    at = rows[rows["metric"] == "crossover_tokens"]["value"].iloc[0]
    weights = rows[rows["metric"] == "weight_bytes"]["value"].iloc[0]
    ax.axhline(weights / GiB, color="black", lw=0.8, ls="--", zorder=1)
    ax.plot([at], [weights / GiB], ls="none", zorder=4, **style.marker("modelled"))
    return Line2D([], [], lw=0.8, ls="--", **style.marker("modelled"),
                  label=f"weights of Qwen2-72B, {display(weights, 'B')}: KV equals them at {at:,.0f} tokens")
