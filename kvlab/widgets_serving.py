"""Who owns which block, step by step: states of a pool from a simulated engine or from one's own hands, to be drawn.

`figure(state)` draws one state without any slider; `block_stepper(states)` walks through a list of them. What moves
needs the extra: pip install 'kvlab[notebook]'.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from matplotlib.patches import Patch

from kvlab.figures._style import GREY, Style, above, drawing, image
from kvlab.figures.block_table import ACROSS, draw_table
from kvlab.serving.request import Request
from kvlab.serving.scheduler import Live
from kvlab.serving.scheduler_config import SchedulerConfig
from kvlab.serving.simulator import StepRecord, simulate
from kvlab.serving.step_time import fixed
from kvlab.shapes import positive
from kvlab.widgets import _ipywidgets

if TYPE_CHECKING:
    from ipywidgets import DOMWidget
    from matplotlib.figure import Figure

__all__ = ["PoolState", "block_stepper", "engine_states", "figure"]
MOST_NAMED = 10                 # as many as there are colours; more requests get no legend
MOST_BLOCKS = 2048              # beyond that squares are too small to see, and slow to draw


@dataclass(frozen=True)
class PoolState:
    """Block tables by request, of a pool of num_blocks blocks (the null block included), and what led to them.

    names: the order in which requests get their colours, so that each keeps its own over many states.
    Refused (ValueError): more blocks than a picture can hold, ids that the pool does not have.
    """
    tables: Mapping[str, Sequence[int]]
    num_blocks: int
    words: str = ""
    names: Sequence[str] = ()

    def __post_init__(self):
        positive(num_blocks=self.num_blocks)
        if self.num_blocks > MOST_BLOCKS:
            raise ValueError(f"a pool of {self.num_blocks:,} blocks cannot be seen in one picture; take one of at most "
                             f"{MOST_BLOCKS:,}")
        wrong = [block for table in self.tables.values() for block in table if not 0 < block < self.num_blocks]
        if wrong:
            raise ValueError(f"block id {wrong[0]!r} is not one that a table may hold; this pool hands out 1 … "
                             f"{self.num_blocks - 1}")


def engine_states(requests: Iterable[Request], config: SchedulerConfig | None = None, *, num_blocks: int = 65,
                  block_size: int = 16, steps: int = 200) -> list[PoolState]:
    """The pool of a simulated engine behind each of its first `steps` steps, which all take equally long."""
    positive(steps=steps)
    names: dict[str, None] = {}
    seen: list[tuple[dict[str, list[int]], str]] = [({}, "step 0: nothing has been computed")]

    def look(record: StepRecord) -> None:
        if len(seen) <= steps:
            tables = {live.served.request.id: list(live.table) for live in record.live}
            names.update(dict.fromkeys(live.served.request.id for live in record.step.admitted))
            seen.append((tables, f"step {len(seen)}: {_words(record, num_blocks)}"))
    simulate(requests, config or SchedulerConfig(), num_blocks=num_blocks, block_size=block_size, step_time=fixed(0.02),
             every_s=None, on_step=look)
    return [PoolState(tables, num_blocks, words, tuple(names)) for tables, words in seen]


def figure(state: PoolState) -> Figure:
    """One state of a pool as the stepper shows it: a square per block, in the colour of the request that holds it."""
    with drawing():
        made, (ax,) = Style().figure(0.6 + 0.21 * -(-state.num_blocks // ACROSS))
        colors = draw_table(ax, {name: list(table) for name, table in state.tables.items()}, state.num_blocks,
                            state.names)
        if state.words:
            ax.set_title(state.words, loc="left", fontsize=7, wrap=True)
        if 0 < len(state.tables) <= MOST_NAMED:
            above(made, [Patch(color=colors[name], label=name) for name in state.tables], columns=MOST_NAMED)
        made.supxlabel("white: free · hatched: the null block · black: in several tables", x=0.01, ha="left",
                       fontsize=6, color=GREY)
    return made


def block_stepper(states: Sequence[PoolState], at: int = 0) -> DOMWidget:
    """A play button and a slider over the states, the picture of one, and what happened there in words."""
    if not 0 <= at < len(states):
        raise ValueError(f"step {at} is not one of the {len(states)} there are; give a step from 0 to "
                         f"{len(states) - 1}" if states else "there are no states to show; give at least one")
    widgets = _ipywidgets()
    slider = widgets.IntSlider(min=0, max=len(states) - 1, value=at, description="step", continuous_update=False,
                               layout=dict(width="500px"))
    play = widgets.Play(min=0, max=len(states) - 1, value=at, interval=500, show_repeat=False)
    widgets.link((play, "value"), (slider, "value"))
    picture, said = widgets.Image(layout=dict(max_width="820px", object_fit="contain")), widgets.HTML()

    def redraw(_=None):
        state = states[slider.value]
        picture.value, said.value = image(figure(state), "png"), escape(state.words)
    slider.observe(redraw, "value")
    redraw()
    return widgets.VBox([widgets.HBox([play, slider]), picture, said])


def _words(record: StepRecord, num_blocks: int) -> str:
    """What a step did, one event after the other, and the state behind it."""
    step, batch = record.step, record.step.batch
    did = [f"{batch.prefill_tokens:,} prompt tokens"] if batch.prefill_tokens else []
    did += [f"one token each of {batch.decode_seqs:,} sequences"] if batch.decode_seqs else []
    events = [f"computed {' and '.join(did) or 'nothing'}"]
    events += [f"{what} {_names(lives)}" for what, lives in (
        ("admitted", step.admitted), ("admitted again", step.resumed),
        ("preempted, its blocks taken away:", step.preempted), ("ended", step.ended)) if lives]
    return (f"{'; '.join(events)}. {record.blocks_used} of {num_blocks - 1} blocks in use, {record.running} running, "
            f"{record.waiting} waiting")


def _names(lives: Sequence[Live]) -> str:
    names = [live.served.request.id for live in lives]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
