"""Who ships which group ratio at which context: every model of the catalogue, and by name those at 16 and above.

Bears on the article's claims that group_ratio must not exceed 16 and that 8 is safer beyond 8K tokens: not whether it
hurts, but what model builders do; and the catalogue is a choice of models, not all there are. The ratio is that of the
layers that keep every token. MLA has no ratio: its one latent serves all query heads, so those models stand apart.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from kvlab.catalog.models import models
from kvlab.figures._rows import with_rows
from kvlab.figures._style import GREY, PALETTE, Look, Style, above, sized, ticks_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvlab.shapes import ModelSpec

STUDY = None
LIMIT, SAFE, LONG = 16, 8, 8192
KINDS = {"every layer keeps all tokens": Look(PALETTE[0], "o"),
         "some layers keep a window or chunk": Look(PALETTE[1], "s"),
         "some layers are linear (hybrid)": Look(PALETTE[2], "v"),
         "MLA (no ratio)": Look(PALETTE[4], "^")}
APART = 512                                             # where MLA stands on the ratio's axis
CONTEXTS = tuple(2**i for i in range(10, 25, 2))


def select(table: pd.DataFrame) -> pd.DataFrame:
    """One row per model of the catalogue: its group ratio, missing with the reason for MLA; kv_len is its context."""
    rows = []
    for spec in models().values():
        if spec.context is None:
            continue
        kind, ratio, heads = _kind(spec)
        row = dict(metric="shipped_group_ratio", value=ratio, unit="ratio", kind="modelled", model=spec.name, data=kind,
                   method="formula:num_q_heads ÷ num_kv_heads", source=spec.source, hardware="none",
                   kv_len=spec.context, **heads)
        if ratio is None:
            row |= dict(kind="missing", note="MLA: one latent serves all query heads, and there are no KV heads")
        rows.append(row)
    return with_rows(table, rows)


def _kind(spec: ModelSpec) -> tuple[str, int | None, dict]:
    """(kind, group ratio, heads) by the layers that remember the most."""
    kept = [layer for layer in spec.layers if layer.shape is not None]
    names = list(KINDS)
    if any(layer.kind == "mla" for layer in kept):
        return names[3], None, {}
    full = [layer for layer in kept if layer.kind == "full"] or kept
    most = max(full, key=lambda layer: layer.heads.group_ratio)
    heads = dict(num_q_heads=most.num_q_heads, num_kv_heads=most.num_kv_heads, head_dim=most.head_dim)
    linear = any(layer.kind == "linear" for layer in spec.layers)
    cut = any(layer.kind in ("sliding", "chunked") for layer in spec.layers)
    return names[2 if linear else 1 if cut else 0], most.heads.group_ratio, heads


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    if style.wide:
        figure, (ax, listing) = style.figure(4.6, 2, full=True, width_ratios=[3, 2])
    else:
        figure, axes = style.grid(6.0, 2, 1, height_ratios=[2.6, 3.4])
        ax, listing = axes[:, 0]
    figure.squeezed = False                                      # the listing needs its lines
    shown = rows.assign(ratio=rows["value"].fillna(APART).astype(float), context=rows["kv_len"].astype(float))
    for (context, ratio), spot in shown.groupby(["context", "ratio"]):
        kinds = [kind for kind in KINDS if (spot["data"] == kind).any()]
        for i, kind in enumerate(kinds):                        # side by side where several kinds share a spot
            look, count = KINDS[kind], int((spot["data"] == kind).sum())
            at = context * 2 ** (0.5 * (i - (len(kinds) - 1) / 2))
            ax.plot([at], [ratio], ls="none", ms=4, zorder=3, **style.marker("modelled", look))
            if count > 1:
                ax.annotate(str(count), (at, ratio), (2, 2), textcoords="offset points", fontsize=sized(5.5),
                            color=look.color, zorder=4)
    ratios = [2**i for i in range(8)]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ticks_at(ax.xaxis, CONTEXTS, [_tokens(n) for n in CONTEXTS])
    ticks_at(ax.yaxis, [*ratios, APART], [*map(str, ratios), "MLA"])
    ax.axhline(LIMIT, color="black", ls="--", lw=0.9, zorder=1)
    ax.axhline(SAFE, color="black", ls=":", lw=0.9, zorder=1)
    ax.axvline(LONG, color=GREY, ls=":", lw=0.9, zorder=1)
    ax.axhline(256, color=GREY, lw=0.6, zorder=1)
    ax.set(xlabel="context that the model is shipped with (tokens);\n"
                  "a number: so many models on one spot, kinds side by side",
           ylabel="group ratio (query heads per KV head)")
    _listing(listing, shown)
    used = [kind for kind in KINDS if kind in set(shown["data"])]
    above(figure, [*(Line2D([], [], ls="none", label=kind, **style.marker("modelled", KINDS[kind])) for kind in used),
                   Line2D([], [], color="black", ls="--", lw=0.9, label=f"the article's limit, {LIMIT}"),
                   Line2D([], [], color="black", ls=":", lw=0.9, label=f"the article's “safer beyond 8K”, {SAFE}"),
                   Line2D([], [], color=GREY, ls=":", lw=0.9, label="8K tokens")],
          columns=2)
    return figure


def _listing(ax, shown) -> None:
    """How many keep to the article's limits beyond 8K tokens, the names at 16 and above, and those that stand apart."""
    long = shown[(shown["ratio"] < APART) & (shown["context"] > LONG)]
    high = long[long["ratio"] >= LIMIT].sort_values(["ratio", "context"], ascending=False)
    apart = shown[shown["ratio"] == APART].sort_values("context", ascending=False)
    counts = {f"above {LIMIT}": long["ratio"] > LIMIT, f"exactly {LIMIT}": long["ratio"] == LIMIT,
              f"above {SAFE}": long["ratio"] > SAFE}
    lines = [(f"Of the catalogue's {len(long)} models beyond {LONG // 1024}K,", "black"),
             (", ".join(f"{int(hit.sum())} {what}" for what, hit in counts.items()), "black"),
             (f"have that ratio; {LIMIT} and above:", "black")]
    lines += [(f"{row.ratio:.0f}   {_short(row)}", KINDS[row.data].color) for row in high.itertuples()]
    lines += [("", "black"), (f"Apart, MLA ({len(apart)} models):", "black")]
    lines += [(_short(row), KINDS[row.data].color) for row in apart.itertuples()]
    ax.set_axis_off()
    for i, (text, color) in enumerate(lines):
        ax.text(0, 1 - i / len(lines), text, transform=ax.transAxes, fontsize=sized(6.3), color=color, va="top")


def _short(row) -> str:
    """A model's name without owner and the parts that all of a family share, with its context."""
    name = row.model.rpartition("/")[2].removeprefix("NVIDIA-").removeprefix("Meta-")
    for tail in ("-BF16", "-FP8", "-2507", "-Instruct"):
        name = name.removesuffix(tail)
    return f"{name}, {_tokens(row.context)}"


def _tokens(n: float) -> str:
    return f"{n / 1024:,.0f}K" if n < 2**20 else f"{n / 2**20:,.0f}M"
