"""Flame strips of profiled calls: every operator as a bar over time, those it calls above it. Drawn from traces."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from matplotlib.patches import Patch

from kvlab.figures._style import GREY, PALETTE, Style, above, drawing
from kvlab.record._operators import operator_class
from kvlab.record.trace import CALL, Event, Trace
from kvlab.units import display

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {"attention": PALETTE[0], "matmul": PALETTE[2], "softmax": PALETTE[4], "copy": PALETTE[3], "other": PALETTE[7],
          "kernel": PALETTE[8]}
LABELLED = 0.012                                                # share of the strip that a letter takes


def flame(*traces: Trace) -> Figure:
    """The last profiled call of each trace, one strip below the other, each over its own time.

    Bars are as long as the operator ran, under the profiler; GPU kernels stand below the line. Colours tell what an
    operator is by its name. Refused (ValueError): no trace, a trace without a `kvlab:call` range.
    """
    if not traces:
        raise ValueError("no trace is given; make one: kvlab.measure(variant, workload, also=('torch_profile',), "
                         "artifacts=DIR), then read_trace(DIR/traces/….json.gz)")
    strips = [_strip(trace) for trace in traces]
    with drawing():
        height = 0.6 + sum(0.7 + 0.22 * _rows(bars) for _, _, bars in strips)
        figure = Style().figure(height)[0]
        figure.clear()
        ratios = [_rows(bars) + 1 for _, _, bars in strips]
        axes = figure.subplots(len(strips), 1, squeeze=False, height_ratios=ratios)[:, 0]
        for ax, (title, seconds, bars) in zip(axes, strips):
            _draw(ax, title, seconds, bars)
        axes[-1].set_xlabel("time since the call began, under torch's profiler")
        kinds = {kind for _, _, bars in strips for _, _, _, kind, _ in bars}
        above(figure, [Patch(fc=COLORS[kind], label=kind) for kind in COLORS if kind in kinds], columns=6)
        figure.supxlabel("measured by torch's profiler, which slows operators down: lengths compare within a strip",
                         x=0.01, ha="left", fontsize=6, color=GREY)
    return figure


def _strip(trace: Trace) -> tuple[str, float, list[tuple]]:
    """Title, seconds and bars (start, seconds, level, kind, name) of the trace's last call."""
    call = max((one for one in trace.ranges if one.name.startswith(CALL)), key=lambda one: one.start, default=None)
    if call is None:
        raise ValueError(f"the trace has no range {CALL!r}: it was not written by the probe torch_profile; "
                         "`kvlab trace FILE` summarises traces of other programs")
    bars = [(event.start - call.start, event.seconds, level, operator_class(event.name), event.name)
            for event, level in _levels(one for one in trace.operators if one.lane == call.lane
                                        and call.start <= one.start < call.end)]
    bars += [(one.start - call.start, one.seconds, -1, "kernel", one.name) for one in trace.kernels
             if call.start <= one.start < call.end]
    name = trace.about.get("variant") or call.name.removeprefix(CALL).strip()
    return f"{name}: {display(call.seconds, 's')}, {len(bars)} operators", call.seconds, bars


def _levels(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """Each event of one lane, sorted by start, with how many are around it."""
    around: list[Event] = []
    for event in events:
        while around and around[-1].end <= event.start:
            around.pop()
        yield event, len(around)
        around.append(event)


def _rows(bars) -> int:
    levels = [level for _, _, level, _, _ in bars] or [0]
    return max(levels) - min(levels) + 1


def _draw(ax, title, seconds, bars) -> None:
    for start, took, level, kind, name in bars:
        ax.barh(level, took, left=start, height=0.9, color=COLORS[kind], ec="white", lw=0.3)
        short = name.removeprefix("aten::")
        if took > LABELLED * len(short) * seconds:
            ax.text(start + took / 2, level, short, ha="center", va="center", fontsize=6, color="white", clip_on=True)
    levels = [level for _, _, level, _, _ in bars] or [0]
    ax.set(xlim=(0, seconds), ylim=(min(levels) - 0.6, max(levels) + 0.6), yticks=[])
    ax.spines["left"].set_visible(False)
    ax.set_title(title, loc="left", fontsize=8)
    ax.xaxis.set_major_formatter(lambda value, _: display(value, "s") if value else "0")
