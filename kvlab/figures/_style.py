"""How every figure looks: size, fonts, one colour and marker per variant, the kind of each number.

measured = filled with an interval bar, modelled = hollow, quoted = diamond. Figures are made without pyplot, so that
any thread and any notebook may draw them.
"""
from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from kvlab.figures._language import breadth, families, wrapped
from kvlab.lang import translated
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.legend import Legend

    from kvlab.figures._venue import Venue

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
PAGE = 8                              # points of a label on kvlab's own page, which sizes here are written for
WIDE = 4.5                            # inches, with labels of that size: below it panels no longer stand in a row
FLAT = 0.66                           # of its width: the height of a venue's figure at most, a little above 1 : 1.618
_UNDATED = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}  # same rows, same file
_LOCK = threading.RLock()


@contextlib.contextmanager
def drawing(venue: Venue | None = None, lang: str = "en") -> Iterator[None]:
    """kvlab's settings of matplotlib, the venue's and the language's, for as long as something is drawn or written.

    matplotlib's settings are global, so one thread at a time: two would restore each other's.
    """
    settings = {**_RC, **(venue.settings() if venue else {})}
    settings["font.family"] = families(lang, settings["font.family"])
    with _LOCK, matplotlib.rc_context(settings):
        yield


def sized(points: float) -> float:
    """Points of a text that has so many on kvlab's own page, in step with the labels of what is drawn now."""
    return points * matplotlib.rcParams["font.size"] / PAGE


def image(figure: Figure, wanted: str, about: dict | None = None) -> bytes:
    """The figure as png, pdf (Type 42 fonts) or svg. about: further metadata of the file."""
    content = io.BytesIO()
    with drawing(getattr(figure, "venue", None), getattr(figure, "lang", "en")):
        figure.savefig(content, format=wanted, dpi=200, metadata={**_UNDATED[wanted], **(about or {})})
    return content.getvalue()


class Drawing(Figure):
    """A matplotlib Figure that a notebook shows by itself, without pyplot. venue: where it is to stand; squeezed: it
    may be made lower there, as far as the names along its axes allow."""
    venue: Venue | None = None
    lang: str = "en"
    squeezed: bool = True

    def _repr_png_(self) -> bytes:
        return image(self, "png")


class Look(NamedTuple):
    """Colour and marker of one variant or model."""
    color: str = "black"
    marker: str = "o"


@dataclass(frozen=True)
class Style:
    """What a figure module draws with. width: inches, that of a page's text or of the venue's columns."""
    width: float = 6.5
    venue: Venue | None = None
    lang: str = "en"

    @property
    def scale(self) -> float:
        """How much larger the venue's labels are than those of kvlab's own page."""
        return self.venue.text / PAGE if self.venue else 1.0

    @property
    def wide(self) -> bool:
        """Whether there is room for several panels in a row."""
        return self.width >= WIDE * self.scale

    def grid(self, height: float, rows: int, columns: int, **axes) -> tuple[Drawing, np.ndarray]:
        """A figure of `height` inches (for labels of 8 points) and its axes, rows × columns, as they are asked for.

        axes: what Figure.subplots takes.
        """
        made = Drawing(figsize=(self.width, height * self.scale), layout="constrained")
        made.venue, made.lang = self.venue, self.lang
        return made, made.subplots(rows, columns, squeeze=False, **axes)

    def figure(self, height: float, columns: int = 1, *, full: bool = False, **axes) -> tuple[Drawing, list[Axes]]:
        """A figure of `height` inches, to which a legend `above` adds, with its axes in one row.

        At a venue whose column is too narrow for the row they stand below each other, `height` each. full: what is
        drawn needs the whole height, such as lines of text. axes: what Figure.subplots takes.
        """
        across = columns if self.wide else 1
        if self.venue and not full:
            height = min(height, FLAT * self.width / self.scale)
        if across < columns:
            axes = {name: value for name, value in axes.items() if name != "width_ratios"}
        made, panels = self.grid(height * (columns // across), columns // across, across, **axes)
        return made, list(panels.ravel())

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
              for label in (translated(handle.get_label(), getattr(figure, "lang", "en")) for handle in handles)]
    room = figure.bbox.width * (0.93 if getattr(figure, "venue", None) else 1)
    for n in range(columns, 0, -1):
        legend = _legend(figure, handles, labels, n)
        box = legend.get_window_extent()
        if n == 1 or box.width <= room:
            break
        legend.remove()
    if box.width > room < figure.bbox.width:
        legend.remove()
        wide = int(max(map(breadth, labels)) * 0.92 * room / box.width)
        legend = _legend(figure, handles, ["\n".join(wrapped(label, wide)) for label in labels], 1)
        box = legend.get_window_extent()
    figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)    # many names must not press the axes flat


def _legend(figure: Figure, handles: list, labels: list[str], columns: int) -> Legend:
    return figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=2.2, columnspacing=1.4)
