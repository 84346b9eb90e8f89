"""Fitting a drawn figure to a venue's column: what was written for a wide page is wrapped, turned or thinned out."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from matplotlib.text import Text
from matplotlib.ticker import FixedLocator

from kvlab.figures._language import breadth, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from kvlab.figures._style import Drawing

LOWEST = 0.75                    # inches of a panel that was made lower
UPRIGHT = 0.5                    # of its width: the height of a panel at least, where labels would press it flat
SQUARE = 2.5                     # inches of a panel of a fixed shape, if its width allows
AGAIN = 4                        # what is wrapped moves what is beside it


def fit(figure: Drawing, name: str) -> None:
    """Wrap labels and titles that are longer than their place, and thin out ticks whose labels touch.

    The panels stay as high as they were. A figure higher than the venue's page is made lower as far as it may; where
    that isn't enough, a warning says what to do.
    """
    figure.draw_without_rendering()
    wanted = {ax: _wanted(ax) for ax in figure.axes}
    whole: dict[Text, str] = {}
    for _ in range(AGAIN):
        changed = [*_wrapped(figure, "x", whole), *_thinned(figure)]
        _raise(figure, wanted)
        changed += _wrapped(figure, "y", whole)
        if not changed:
            break
        figure.draw_without_rendering()
    _raise(figure, wanted)
    _lower(figure)
    height, room = figure.get_figheight(), figure.venue.height
    if height > 1.01 * room:
        wider = " give --columns 2, or" if figure.get_figwidth() < figure.venue.widths[-1] - 0.01 else ""
        warnings.warn(f"figure {name} is {height:.1f} inches high and a page of {figure.venue.name} has {room:.1f}:"
                      f"{wider} include it at {100 * room / height:.0f} % of its size, or draw it from a run with "
                      "fewer cases", stacklevel=3)


def _wanted(ax: Axes) -> float:
    """Pixels that the panel should be high: what it is, and no less than its shape and the names along it ask for."""
    place, drawn = ax.get_position(original=True), ax.get_window_extent()
    wide, high = place.width * ax.figure.bbox.width, place.height * ax.figure.bbox.height
    if ax.get_aspect() != "auto":
        return min(wide * drawn.height / drawn.width, max(high, SQUARE * ax.figure.dpi))         # fills its width
    strip = high < 0.35 * wide and len(ax.get_shared_x_axes().get_siblings(ax)) > 1
    return max(high, _names(ax), 0 if strip else UPRIGHT * wide)


def _names(ax: Axes) -> float:
    """Pixels that the names along the y axis take."""
    if not isinstance(ax.yaxis.get_major_locator(), FixedLocator):
        return 0.0
    return 1.1 * sum(label.get_window_extent().height for label in ax.get_yticklabels() if label.get_text())


def _rows(figure: Drawing) -> dict[int, list[Axes]]:
    """Panels by the row they stand in; a twin or a bar of colours stands where its panel does."""
    rows: dict[int, list[Axes]] = {}
    for ax in figure.axes:
        rows.setdefault(round(50 * ax.get_position(original=True).y0), []).append(ax)
    return rows


def _high(ax: Axes) -> float:
    return ax.get_position(original=True).height * ax.figure.bbox.height


def _raise(figure: Drawing, wanted: dict[Axes, float]) -> None:
    """Make the figure higher by what its panels have lost."""
    figure.draw_without_rendering()
    lost = sum(max(0.0, *(wanted[ax] - _high(ax) for ax in row)) for row in _rows(figure).values())
    if lost > 2:
        figure.set_figheight(figure.get_figheight() + lost / figure.dpi)
        figure.draw_without_rendering()


def _lower(figure: Drawing) -> None:
    """Make a figure as high as a page where it was higher, as far as its panels stay high enough."""
    above = figure.get_figheight() - figure.venue.height
    if above < 0.01 or not figure.squeezed:
        return
    rows = [(max(map(_high, row)), max(map(_least, row))) for row in _rows(figure).values()]
    panels = sum(has for has, _ in rows)
    kept = max(1 - above * figure.dpi / panels, *(needs / has for has, needs in rows))
    if kept < 0.98:
        figure.set_figheight(figure.get_figheight() - (1 - kept) * panels / figure.dpi)


def _least(ax: Axes) -> float:
    return max(_names(ax), min(LOWEST * ax.figure.dpi, 0.65 * _high(ax)))       # a strip may be low already


def _wrapped(figure: Drawing, direction: str, whole: dict[Text, str]) -> list[Text]:
    """Texts along that direction that were longer than their place, broken into lines. whole: as they were at first."""
    side = "width" if direction == "x" else "height"
    places: list[tuple[Text, float]] = []
    for ax in figure.axes:
        titles = [child for child in ax.get_children() if isinstance(child, Text) and child not in ax.texts]
        texts = [ax.xaxis.label, *titles] if direction == "x" else [ax.yaxis.label]
        places += [(text, _room(figure, ax, text, direction)) for text in texts]
    places += [(text, getattr(figure.bbox, side)) for text in figure.texts
               if (text.get_rotation() == 90) == (direction == "y")]
    return [text for text, room in places if _broken(text, room, side, whole)]


def _room(figure: Drawing, ax: Axes, text: Text, direction: str) -> float:
    """Pixels for a text along the axes: up to the figure's edges where no other panel is beside it."""
    box, whole = ax.get_window_extent(), figure.bbox
    if direction == "y":
        return 1.1 * box.height
    others = [other.get_window_extent() for other in figure.axes]
    if any((one.x0 > box.x1 or one.x1 < box.x0) and one.y0 < box.y1 and one.y1 > box.y0
           and one.width > 0.2 * box.width for one in others):            # a bar of colours is narrower
        return 1.05 * box.width
    if text.get_horizontalalignment() == "left":
        return 0.97 * (whole.width - box.x0)
    middle = (box.x0 + box.x1) / 2
    return max(box.width, 0.97 * 2 * min(middle, whole.width - middle))


def _broken(text: Text, room: float, side: str, whole: dict[Text, str]) -> bool:
    told, length = text.get_text(), getattr(text.get_window_extent(), side)
    if not told or length <= room:
        return False
    wide = max(8, int(max(map(breadth, told.split("\n"))) * 0.98 * room / length))
    lines = [wrapped(line, wide, whole_words=True) for line in whole.setdefault(text, told).split("\n")]
    text.set_text("\n".join(part for line in lines for part in line))
    return text.get_text() != told


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
