"""How every figure looks: size, fonts, one colour and marker per variant, the kind of each number, the footer.

measured = filled with an interval bar, modelled = hollow, quoted = diamond. Figures are made without pyplot, so that
any thread and any notebook may draw them.
"""
from __future__ import annotations

import contextlib
import io
import re
import textwrap
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from kvlab.record.statistics import aa_resolution
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# seaborn's "colorblind", written out (a test compares): importing seaborn brings pyplot and its global state with it
PALETTE = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9")
MARKERS = "osv^P<>X*phH8"                                       # no diamond: that is a quoted number
KNOWN = ("sdpa", "naive", "flash", "naive_repeat", "paged", "sdpa_enable_gqa")
KINDS = {"measured": "filled, bar = interval: measured", "simulated": "hollow: simulated",
         "modelled": "hollow or line: modelled", "quoted": "diamond: quoted"}
GREY = "#555555"
_RC = {
    "font.family": ["DejaVu Sans"], "font.size": 8, "axes.labelsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7,
    "legend.frameon": False, "axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.spines.right": False, "axes.spines.top": False, "lines.linewidth": 1.1, "lines.markersize": 5,
    "text.parse_math": False,                                   # a variant's name may hold a dollar sign
    "pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "kvlab",
}
_UNDATED = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}  # same rows, same file
_LOCK = threading.RLock()


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """kvlab's settings of matplotlib for as long as something is drawn or written.

    matplotlib's settings are global, so one thread at a time: two would restore each other's.
    """
    with _LOCK, matplotlib.rc_context(_RC):
        yield


def image(figure: Figure, wanted: str) -> bytes:
    """The figure as png, pdf (Type 42 fonts) or svg."""
    content = io.BytesIO()
    with drawing():
        figure.savefig(content, format=wanted, dpi=200, metadata=_UNDATED[wanted])
    return content.getvalue()


class Drawing(Figure):
    """A matplotlib Figure that a notebook shows by itself, without pyplot."""

    def _repr_png_(self) -> bytes:
        return image(self, "png")


class Look(NamedTuple):
    """Colour and marker of one variant or model."""
    color: str = "black"
    marker: str = "o"


@dataclass(frozen=True)
class Style:
    """What a figure module draws with. width: inches, that of a page's text."""
    width: float = 6.5

    def figure(self, height: float, columns: int = 1, **axes) -> tuple[Figure, list[Axes]]:
        """A figure of `height` inches, to which a legend `above` adds, with its axes in one row.

        axes: what Figure.subplots takes.
        """
        made = Drawing(figsize=(self.width, height), layout="constrained")
        return made, list(made.subplots(1, columns, squeeze=False, **axes)[0])

    def looks(self, names: Iterable[str]) -> dict[str, Look]:
        """Name -> look, known variants first and always alike, others in the order of the alphabet."""
        names = set(names)
        ordered = [*KNOWN, *sorted(names - set(KNOWN))]
        return {name: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)])
                for i, name in enumerate(ordered) if name in names}

    def marker(self, kind: str, look: Look | None = None) -> dict:
        """Keywords of `Axes.plot` for a point of that kind, black where no look is given."""
        look = look or Look()
        return dict(color=look.color, marker="D" if kind == "quoted" else look.marker,
                    markerfacecolor=look.color if kind == "measured" else "white", markeredgecolor=look.color)

    def bars(self, ax: Axes, x, rows: pd.DataFrame, look: Look, kind: str = "measured", **more) -> None:
        """The rows' values over x as markers of that kind, with their low … high as bars where they have them."""
        value = rows["value"].to_numpy(float)
        low, high = (rows[end].fillna(rows["value"]).to_numpy(float) for end in ("low", "high"))
        ax.errorbar(np.asarray(x, float), value, yerr=[(value - low).clip(min=0), (high - value).clip(min=0)],
                    capsize=1.5, elinewidth=0.8, **{**self.marker(kind, look), **more})

    def bars_or_limits(self, ax: Axes, x: str, rows: pd.DataFrame, look: Look) -> None:
        """Measured values over the column x; those that may be 0 for all that is known as upper limits."""
        told, below = rows[rows["low"] > 0], rows[rows["low"] <= 0]
        self.bars(ax, told[x], told, look)
        ax.errorbar(below[x].astype(float), below["high"], yerr=below["high"] / 2, uplims=True, elinewidth=0.8,
                    capsize=1.5, ls="none", **self.marker("measured", look))


def log_axis(axis: Axis, unit: str, base: int = 10) -> None:
    """A logarithmic axis whose ticks read as kvlab prints that unit ("ratio": per cent, "count": plain numbers)."""
    def text(value, _):
        if unit == "ratio":
            return f"{100 * value:.4g} %"
        return f"{value:,.10g}" if unit == "count" else display(value, unit)
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=base)
    axis.set_major_locator(LogLocator(base=base, numticks=12))
    axis.set_minor_locator(NullLocator() if base == 2 else LogLocator(base=base, subs=range(2, 10), numticks=12))
    axis.set_major_formatter(FuncFormatter(text))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def ticks_at(axis: Axis, positions, labels) -> None:
    """Ticks at the data's own positions and nowhere else."""
    axis.set_major_locator(FixedLocator(list(positions)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda _, i: labels[i] if i is not None else ""))


def above(figure: Figure, handles: list, columns: int) -> None:
    """The legend in the margin above the axes, where it covers no point: as many columns as fit, `columns` at most."""
    labels = [label if len(label) <= 80 else f"{label[:39]}…{label[-40:]}"
              for label in (handle.get_label() for handle in handles)]
    for n in range(columns, 0, -1):
        legend = figure.legend(handles, labels, loc="outside upper left", ncols=n, handlelength=2.2, columnspacing=1.4)
        box = legend.get_window_extent()
        if n == 1 or box.width <= figure.bbox.width:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)    # many names must not press the axes flat


def add_footer(figure: Figure, rows: pd.DataFrame, table: pd.DataFrame) -> None:
    """Below the axes: what the rows are about, of which run and kinds, and how small a difference can be told."""
    lines = [line for part in _footer(rows, table) for line in textwrap.wrap(part, 136)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6, color=GREY, linespacing=1.35)


def _footer(rows: pd.DataFrame, table: pd.DataFrame) -> Iterator[str]:
    own = rows[rows["kind"] != "quoted"]
    hardware = [name for name in own["hardware"].unique() if name not in ("", "none")]
    told = "simulated" if "simulated" in set(own["kind"]) else "computed from kvlab's catalogue"
    about = hardware or [f"nothing measured: {told}"]
    about += [name for name in own["dtype"].unique() if name]
    for run in filter(None, own["run_id"].unique()):
        dated = re.match(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)\d\dZ-", run)
        about += ["{}-{}-{} {}:{} UTC".format(*dated.groups())] if dated else []
        about.append(f"run {run}")
    yield " · ".join(about)
    counts = own[(own["kind"] == "measured") & (own["variant"] != "") & (own["n"] > 1)]["n"]
    told = [KINDS[kind] for kind in KINDS if kind in set(rows["kind"])]
    if len(counts):
        most = f"–{counts.max()}" if counts.max() > counts.min() else ""
        told.append(f"n = {counts.min()}{most} a point")
    pair = aa_resolution(table)
    if pair is not None and (own["metric"] == "latency_s").any():       # it is a ratio of two times
        told.append("A/A resolution {:.3f} [{:.3f}, {:.3f}]".format(*pair))
    yield " · ".join(told)
    bad = table[(table["status"] != "ok") & table["phase"].isin(own["phase"])]
    undrawn = sorted(set(bad["variant"]) - set(rows["variant"]) - {""})
    if undrawn:
        yield f"Not drawn, because it failed or was refused: {', '.join(undrawn)}"
    if len(table):                                       # of a run: what the catalogue lacks is part of the picture
        for source, absent in rows[rows["kind"] == "missing"].groupby("source", sort=False):
            yield f"Not drawn: {source} gave nothing: {'; '.join(dict.fromkeys(absent['note']))}"
