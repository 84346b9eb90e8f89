"""What each KV format costs in quality: KL to the fp32 cache, and the change of perplexity beside the article's claims.

Bears on the claims that FP8 loses less than 0.1 % and INT8 0.1 to 0.3 %. KL tells formats apart with a thousand tokens,
perplexity hardly any. A claim is supported where a whole 90 % interval lies inside its band; FP8's has no lower end,
for a gain is no loss.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

from kvlab.figures._formats import FAMILIES, STUDY, family, handles, quality, short, told
from kvlab.figures._rows import with_rows
from kvlab.figures._style import GREY, PALETTE, Style, above, log_axis, sized
from kvlab.record.quality import TEXTS, comparable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
CLAIMS = {"fp8": (None, 0.001, "less than 0.1 %", PALETTE[0]), "int8": (0.001, 0.003, "0.1 to 0.3 %", PALETTE[1])}


def select(table: pd.DataFrame) -> pd.DataFrame:
    """KL and the 90 % interval of perplexity of every format on the same windows, and the article's claims."""
    rows = comparable(quality(table, "kv_quant", TEXTS, "kl", "perplexity_delta_90"))
    rows = rows[(rows["kind"] == "measured") & (rows["kv_format"] != "fp32")]
    claims = [dict(metric="perplexity_delta_90", value=high, low=low, high=high, unit="ratio", kind="quoted",
                   kv_format=name, study=STUDY, method="cite:article", hardware="unspecified GPU",
                   source=f"the article: “{name.upper()} KV loses {said}”")
              for name, (low, high, said, _) in CLAIMS.items()]
    return with_rows(rows, claims)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    own, quoted = rows[rows["kind"] != "quoted"], rows[rows["kind"] == "quoted"]
    kl, change = (own[own["metric"] == metric].drop_duplicates("kv_format").set_index("kv_format")
                  for metric in ("kl", "perplexity_delta_90"))
    names = list(kl.sort_values("value", ascending=False).index)
    lines = [*map(short, names), *(f"the article: {name.upper()}" for name in quoted["kv_format"])]
    figure, (left, right) = style.figure(0.75 + 0.185 * len(lines), columns=2, full=True, sharey=True,
                                        width_ratios=(1, 1.1))
    for place, name in enumerate(names):
        for ax, of in ((left, kl), (right, change)):
            if name in of.index:
                _point(ax, of.loc[name], place, FAMILIES[family(name)], style)
    least = min(-0.01, 1.1 * change["low"].min())
    for place, (_, row) in enumerate(quoted.iterrows(), len(names)):
        low, color = least if np.isnan(float(row["low"])) else row["low"], CLAIMS[row["kv_format"]][3]
        right.axvspan(low, row["high"], color=color, alpha=0.25, lw=0, zorder=0)
        right.plot([low, row["high"]], [place, place], color=color, lw=1.2)
        right.plot([row["low"], row["high"]], [place, place], ls="none", **style.marker("quoted"))
    right.axvline(0, color=GREY, lw=0.8, zorder=1)
    right.set_xlim(left=least)
    right.set_xscale("symlog", linthresh=0.01, linscale=1.6)
    right.xaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=0.01, subs=[1]))
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+g} %" if value else "0"))
    left.set_yticks(range(len(lines)), lines)
    left.set_ylim(-0.6, len(lines) - 0.4)
    log_axis(left.xaxis, "count")
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-")))
    left.set(xlabel="KL to the fp32 cache (nat per token, log)\nbar: 95 % interval")
    right.set(xlabel="change of perplexity (linear within ±1 %)\nbar: 90 % interval, of the equivalence test")
    right.tick_params(axis="y", length=0)
    bands = [Patch(color=color, alpha=0.25, lw=0, label=f"the article: {name.upper()} loses {said}")
             for name, (_, _, said, color) in CLAIMS.items()]
    above(figure, [*handles(names, style), *bands], columns=4)
    left.set_title(told(own), fontsize=sized(6.5), color=GREY, loc="left")
    return figure


def _point(ax, row, place, look, style) -> None:
    low, high = (row["value"] if np.isnan(float(row[end])) else row[end] for end in ("low", "high"))
    ax.errorbar([row["value"]], [place], xerr=[[max(0, row["value"] - low)], [max(0, high - row["value"])]],
                capsize=1.5, elinewidth=0.8, **style.marker("measured", look))
