"""Fitting a drawn figure to a venue's column: what was written for a wide page is wrapped, turned or thinned out."""
from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from matplotlib.ticker import FixedLocator

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    from kvlab.figures._style import Drawing

LOWEST = 0.9                     # inches of a panel that was made lower
AGAIN = 3                        # what is wrapped moves what is beside it


def fit(figure: Drawing, name: str) -> None:
    """Wrap labels and titles that are longer than their axes, and thin out ticks whose labels touch.

    A figure that is higher than the venue's page is made lower where it may; else a warning says what to do.
    """
    room = figure.venue.height
    for _ in range(AGAIN):
        figure.draw_without_rendering()
        changed = [*_wrapped(figure), *_thinned(figure), *_lowered(figure, room)]
        if not changed:
            break
    height = figure.get_figheight()
    if height > room + 0.01:
        wider = " give --columns 2, or" if figure.get_figwidth() < figure.venue.widths[-1] else ""
        warnings.warn(f"figure {name} is {height:.1f} inches high and a page of {figure.venue.name} has {room:.1f}:"
                      f"{wider} include it at {100 * room / height:.0f} % of its size, or draw it from a run with "
                      "fewer cases", stacklevel=3)


def _wrapped(figure: Drawing) -> Iterator[Text]:
    """Texts along an axis that were longer than it, broken into lines."""
    for ax in figure.axes:
        box = ax.get_window_extent()
        wide, high = max(box.width, 1), max(box.height, 1)
        along = [(ax.xaxis.label, wide, "width"), (ax.yaxis.label, high, "height")]
        along += [(title, wide, "width") for title in (ax.title, ax._left_title, ax._right_title)]
        for text, room, side in along:
            yield from _broken(text, room, getattr(text.get_window_extent(), side))
    for text, room, side in ((figure._supylabel, figure.bbox.height, "height"),
                             (figure._supxlabel, figure.bbox.width, "width")):
        if text is not None:
            yield from _broken(text, room, getattr(text.get_window_extent(), side))


def _broken(text: Text, room: float, length: float) -> Iterator[Text]:
    told = text.get_text()
    if told and length > 1.08 * room:
        wide = max(8, int(max(map(len, told.split("\n"))) * room / length))
        broken = "\n".join(textwrap.wrap(" ".join(told.split()), wide, break_long_words=False, break_on_hyphens=False))
        if broken != told:
            text.set_text(broken)
            yield text


def _thinned(figure: Drawing) -> Iterator[Axis]:
    """x axes whose tick labels touched: names are turned upright, numbers left out one by one."""
    for ax in figure.axes:
        axis = ax.xaxis
        shown = [label for label in axis.get_majorticklabels() if label.get_visible() and label.get_text()]
        boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
        if len(boxes) < 2 or shown[0].get_rotation() or not any(
                one.x1 + 1 > two.x0 for one, two in zip(boxes, boxes[1:])):
            continue
        if not isinstance(axis.get_major_locator(), FixedLocator):
            axis.get_major_locator().set_params(**_fewer(axis))
        else:
            ax.tick_params(axis="x", labelrotation=90)
        yield axis


def _fewer(axis: Axis) -> dict[str, int]:
    locator, count = axis.get_major_locator(), len(axis.get_majorticklocs())
    return {"numticks": max(2, count // 2)} if hasattr(locator, "numticks") else {"nbins": max(2, count // 2)}


def _lowered(figure: Drawing, room: float) -> Iterator[Drawing]:
    """The figure, made as high as a page where it was higher and its panels stay high enough."""
    above = figure.get_figheight() - room
    lowest = min(ax.get_window_extent().height for ax in figure.axes) / figure.dpi
    rows = len({round(ax.get_position().y0, 2) for ax in figure.axes})
    if figure.squeezed and above > 0.01 and lowest - above / rows > LOWEST:
        figure.set_figheight(room)
        yield figure
