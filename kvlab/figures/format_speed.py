"""What a smaller KV format saves in time beside what it saves in bytes, and what that can give a whole decode step.

Bears on the article's claims of “+8 %” of speed for FP8 KV and “+5 %” for INT8 KV. Left: time and bytes of one call in
the dtype's own format over those in the smaller one; points measured, dashed lines modelled; a point below its line
pays for decoding. Right: a step also reads the weights W, so a format of half the bytes gives (W + K) ÷ (W + K/2) where
memory is the limit: the article's numbers are single points of that surface, at the batches that the diamonds mark.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kvlab.figures._formats import FAMILIES, family
from kvlab.figures._kernels import STUDY, lacking, looks, question
from kvlab.figures._rows import usable
from kvlab.figures._style import GREY, Style, above, log_axis, sized, ticks_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
CALL = ("format_speedup", "format_bytes_ratio")
STEP = ("step_speedup", "batch_to_quoted")


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Time and bytes saved by a call in each format over context; what a step can gain, and the article's numbers."""
    rows = usable(table)
    asked = question(rows)
    shown = rows[((asked == "formats") & rows["metric"].isin(CALL)) | ((asked == "step") & rows["metric"].isin(STEP))]
    if not (shown["metric"] == "format_speedup").any():
        raise lacking("format_speed", "format_speedup of a variant over context")
    return shown.reset_index(drop=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    steps = rows[(rows["metric"] == "step_speedup") & (rows["kind"] == "modelled")]
    figure, axes = style.figure(3.3, 2 if len(steps) else 1, width_ratios=[1, 1][:1 + bool(len(steps))])
    handles = _calls(axes[0], rows, style)
    if len(steps):
        handles += _steps(axes[1], rows, steps, style)
    above(figure, handles, columns=3)
    return figure


def _calls(ax, rows, style) -> list[Line2D]:
    """Speed-up and bytes ratio over context, by format."""
    timed = rows[rows["metric"] == "format_speedup"]
    several = timed["variant"].nunique() > 1
    label = timed["kv_format"] + (", " + timed["variant"] if several else "")
    names = dict(zip(label, timed["kv_format"]))
    looked = looks(names) if several else {name: FAMILIES[family(kind)] for name, kind in names.items()}
    for i, (name, look) in enumerate(looked.items()):
        mine = timed[label == name].sort_values("kv_len")
        style.bars(ax, mine["kv_len"], mine, look, zorder=3)
        fewer = rows[(rows["metric"] == "format_bytes_ratio") & (rows["kv_format"] == names[name])]
        fewer = fewer.drop_duplicates("kv_len").sort_values("kv_len")
        ax.plot(fewer["kv_len"].astype(float), fewer["value"], color=look.color, lw=1, zorder=2,
                ls=(4 * (i % 2), (4, 4)))                        # formats that save as much share a line
    ax.axhline(1, color="black", lw=0.9, zorder=1)
    ax.set_xscale("log", base=2)
    lengths = sorted(timed["kv_len"].unique())
    ticks_at(ax.xaxis, lengths, [f"{n // 1024}K" if n % 1024 == 0 else f"{n}" for n in lengths])
    log_axis(ax.yaxis, "count", base=2)
    low, high = ax.get_ylim()
    case = timed.iloc[0]
    batch = f", batch {case['batch_size']}" if case["batch_size"] > 1 else ""
    ax.set(ylim=(min(0.5, low), max(2, high)), ylabel=f"{case['dtype']} ÷ this format",
           xlabel=f"context (tokens){batch}")
    ax.set_title(f"one call of {' and '.join(timed['variant'].unique())}", fontsize=sized(8))
    by_torch = set(timed.loc[timed["format_path"] == "decoded", "kv_format"])
    return [Line2D([], [], label=f"{name}: time saved" + " (torch decodes)" * (name in by_torch),
                   **style.marker("measured", look)) for name, look in looked.items()] + [
            Line2D([], [], color=GREY, ls="--", lw=0.9, label="same colour: bytes saved (modelled)")]


def _steps(ax, rows, steps, style) -> list[Line2D]:
    """(W + K) ÷ (W + K') − 1 over batch, a line per context; a diamond where it is what the article states."""
    first = steps["kv_format"].iloc[0]
    lengths = sorted(steps["kv_len"].unique())
    for kv_len in lengths:
        mine = steps[(steps["kv_len"] == kv_len) & (steps["kv_format"] == first)].sort_values("batch_size")
        ax.plot(mine["batch_size"].astype(float), mine["value"] - 1, color=GREY, lw=0.9, ms=3, zorder=2, marker="o",
                markerfacecolor="white", markeredgecolor=GREY)
        end = mine.iloc[-1]
        ax.annotate(f"{kv_len // 1024}K" if kv_len % 1024 == 0 else f"{kv_len}", (end["batch_size"], end["value"] - 1),
                    (5, 0), textcoords="offset points", va="center", fontsize=sized(6.5), color=GREY)
    quoted, handles = rows[(rows["metric"] == "step_speedup") & (rows["kind"] == "quoted")], []
    for _, claim in quoted.iterrows():
        look = FAMILIES[family(claim["kv_format"])]
        meet = rows[(rows["metric"] == "batch_to_quoted") & (rows["kv_format"] == claim["kv_format"])]
        ax.axhline(claim["value"] - 1, color=look.color, lw=0.8, ls=":", zorder=1)
        ax.plot(meet["value"], [claim["value"] - 1] * len(meet), ls="none", ms=4, zorder=4,
                **style.marker("quoted", look))
        handles.append(Line2D([], [], ls=":", lw=0.8, ms=4, **style.marker("quoted", look),
                              label=f"the article: {claim['kv_format'].partition('_')[0].partition('/')[0].upper()} "
                                    f"+{100 * (claim['value'] - 1):.0f} %; at these batches"))
    batches = sorted(steps["batch_size"].unique())
    ax.set_xscale("log", base=2)
    ticks_at(ax.xaxis, batches, [f"{n}" for n in batches])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+.0f} %" if value else "0"))
    model = steps["model"].iloc[0].rpartition("/")[2]
    ax.set(xlim=(batches[0] / 1.3, batches[-1] * 2.2), ylim=(0, None),
           xlabel="batch (sequences); by line: context\nW: bytes of weights, K: of the KV cache",
           ylabel=f"step in bf16 ÷ in {first}, − 1")
    ax.set_title(f"a step of {model}, by bytes", fontsize=sized(8))
    return [Line2D([], [], color=GREY, lw=0.9, ms=3, marker="o", markerfacecolor="white",
                   label=f"(W + K) ÷ (W + K in {first}) (modelled)"), *handles]
