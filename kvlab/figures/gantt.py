"""What a dozen requests did when, under three policies, and how many blocks were in use: queues, preemptions, reserve.

Bears on the claims that short requests should go first and that preemptions mean too little memory: the pool is small,
so that some request loses its blocks, waits and computes its tokens again, unless the worst case is set aside.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import Patch

from kvlab.figures._serving import question
from kvlab.figures._style import GREY, PALETTE, Style, above, sized
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LOOKS", "STUDY", "draw", "draw_blocks", "draw_spans", "select"]
STUDY = "batching"
# a span's kind -> colour, hatch
LOOKS = {"queued": ("#dddddd", ""), "prefill": (PALETTE[0], ""), "decode": (PALETTE[2], ""),
         "preempted": ("white", "////"), "recompute": (PALETTE[3], "")}


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Every span, and the blocks in use over time."""
    import pandas as pd
    return pd.concat([question(table, "gantt", STUDY, "gantt", "span_s"),
                      question(table, "gantt", STUDY, "gantt_blocks", "blocks_used")], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    labels = list(dict.fromkeys(rows["label"]))
    across = len(labels) if style.wide else 1
    down = len(labels) // across
    figure, axes = style.grid(3.2 if down == 1 else 2.0 * down, 2 * down, across, sharex=True, sharey="row",
                              height_ratios=(3, 1) * down)
    for (spans_ax, blocks_ax), label in zip(axes.T.reshape(-1, 2), labels):
        mine = rows[rows["label"] == label]
        spans, blocks = (mine[mine["question"] == name] for name in ("gantt", "gantt_blocks"))
        draw_spans(spans_ax, [(row["request"], row["what"], row["began_s"], row["value"])
                              for row in spans.to_dict("records")])
        draw_blocks(blocks_ax, blocks["t"], blocks["value"], int(mine["num_blocks"].iloc[0]))
        preempted = int((spans["what"] == "preempted").sum())
        spans_ax.set_title(f"{label}\n{preempted} preemption{'' if preempted == 1 else 's'}", fontsize=sized(7),
                           loc="left")
    for spans_ax, blocks_ax in axes[:, 0].reshape(-1, 2):
        spans_ax.set_ylabel("requests, as they arrive")
        blocks_ax.set_ylabel("blocks in use")
    above(figure, legend(), columns=6)
    return figure


def draw_spans(ax: Axes, spans: list[tuple[str, str, float, float]]) -> None:
    """One line per request, the first to arrive on top. spans: (request, kind, began, length), seconds."""
    began: dict[str, float] = {}
    for request, _, at, _ in spans:
        began[request] = min(at, began.get(request, at))
    place = {request: i for i, request in enumerate(sorted(began, key=lambda one: (began[one], len(one), one)))}
    for request, what, at, length in spans:
        color, hatch = LOOKS[what]
        ax.broken_barh([(at, length)], (place[request] - 0.4, 0.8), facecolor=color, hatch=hatch, lw=0.3,
                       edgecolor="black" if hatch else color)
    ax.set(ylim=(len(place) - 0.4, -0.6), yticks=[])
    ax.grid(axis="y", visible=False)


def draw_blocks(ax: Axes, t, used, num_blocks: int) -> None:
    """The blocks in use over time, and how many there are (the null block left out)."""
    ax.fill_between(list(t), list(used), step="pre", color=PALETTE[9], lw=0)
    ax.axhline(num_blocks - 1, color=GREY, lw=0.8, ls="--")
    ax.set(xlabel="seconds (simulated)", ylim=(0, 1.1 * (num_blocks - 1)))


def legend() -> list[Patch]:
    """A patch per kind of span."""
    return [Patch(facecolor=color, hatch=hatch, edgecolor="black" if hatch else color, label=what)
            for what, (color, hatch) in LOOKS.items()]
