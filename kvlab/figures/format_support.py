"""Which kinds of codes each generation of hardware multiplies as they are stored, and which it must convert first.

Bears on the article's claim that GPUs from Ampere on compute FP8 natively: the matrix units take FP8 from compute
capability 8.9 (Ada) on; before, an FP8 cache saves bytes and pays for the conversion. The words are about a product of
two operands of the kind. A kernel whose q stays in 16 bits, as all of kvlab's own, converts K and V in any case.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from kvlab.catalog.gpus import WORDS, format_kinds, format_support, format_target, gpus
from kvlab.figures._rows import with_rows
from kvlab.figures._style import GREY, PALETTE, Style, above, sized, ticks_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = None
FACES = {"native": PALETTE[9], "storage-only": "#f7dfb5", "unsupported": "#d9d9d9", "unknown": "white"}
SHORT = {"native": "native", "storage-only": "stored", "unsupported": "none", "unknown": "?"}
LETTERS = {"native": "n", "storage-only": "s", "unsupported": "–", "unknown": "?"}                # in a narrow column
MEANS = {"native": "native: multiplied as it is stored", "storage-only": "stored: storage-only, converted in registers",
         "unsupported": "none: unsupported, refused by software too", "unknown": "?: unknown, no source"}
CPUS = {"x86": "x86 with AVX2", "SPR + AMX": "Sapphire Rapids (AMX)", "Zen 4": "Zen 4 (AVX-512)"}


def select(table: pd.DataFrame) -> pd.DataFrame:
    """One quoted row per target and kind: native 2, storage-only 1, unsupported 0 with why; unknown is missing."""
    rows = []
    for target, label in _targets().items():
        for kind in _kinds():
            found = format_support(target, kind)
            known = found.word != "unknown"
            rows.append(dict(metric="format_support", unit="count", value=float(2 - WORDS.index(found.word)) if known
                             else None, kind="quoted" if known else "missing", method="cite:table", hardware="none",
                             model=label, kv_format=kind, scope="device", source=found.source,
                             note=": ".join(filter(None, (found.word, found.product, found.why)))))
    return with_rows(table, rows)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    targets, kinds = list(dict.fromkeys(rows["model"])), list(dict.fromkeys(rows["kv_format"]))
    figure, (ax,) = style.figure(0.75 + 0.17 * len(targets), full=True)
    short = SHORT if style.wide else LETTERS
    for _, row in rows.iterrows():
        word = row["note"].partition(":")[0]
        at = kinds.index(row["kv_format"]), targets.index(row["model"])
        ax.add_patch(Rectangle(at, 1, 1, facecolor=FACES[word], edgecolor="white", lw=1))
        ax.annotate(short[word], (at[0] + 0.5, at[1] + 0.5), ha="center", va="center", fontsize=sized(6.5),
                    color="black" if word != "unknown" else GREY)
    ax.set(xlim=(0, len(kinds)), ylim=(len(targets), 0))
    ticks_at(ax.xaxis, [i + 0.5 for i in range(len(kinds))],
             [kind.replace("_", "\n") if style.wide else kind for kind in kinds])
    ticks_at(ax.yaxis, [i + 0.5 for i in range(len(targets))], targets)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.set_xlabel("for a product of two operands of the kind; numbers: NVIDIA's compute capability")
    for side in ax.spines.values():
        side.set_visible(False)
    quoted = Line2D([], [], ls="none", label="every word is quoted: the CSV beside this figure names the sources",
                    **style.marker("quoted"))
    above(figure, [*(Patch(facecolor=FACES[word], edgecolor=GREY, lw=0.5, label=_means(word, short)) for word in WORDS),
                   quoted], columns=2)
    return figure


def _means(word: str, short: dict[str, str]) -> str:
    """What the mark in a field says."""
    return MEANS[word] if MEANS[word].startswith(f"{short[word]}:") else f"{short[word]}: {MEANS[word]}"


def _kinds() -> list[str]:
    """The kinds that anything is known of, from the widest to the narrowest."""
    widest = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "mxfp8", "mxfp4", "nvfp4")
    return [kind for kind in widest if kind in format_kinds()]


def _targets() -> dict[str, str]:
    """Target -> its name: GPUs by compute capability, AMD's, CPUs; those of which half is unknown are left out."""
    found: dict[str, str] = {}
    for spec in gpus().values():
        target = format_target(spec)
        known = sum(format_support(target, kind).word != "unknown" for kind in _kinds())
        if 2 * known > len(_kinds()):
            name = f"{spec.arch.split(' ')[0]} {target}" if spec.compute_capability else CPUS.get(target, target)
            found.setdefault(target, name)
    family = {"NVIDIA": 0, "AMD": 1}
    order = {format_target(spec): family.get(spec.vendor, 2) if spec.compute_capability else 2
             for spec in gpus().values()}
    return dict(sorted(found.items(), key=lambda pair: (order[pair[0]], order[pair[0]] == 0 and float(pair[0]))))
