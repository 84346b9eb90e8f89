"""A scrubber over a small simulated engine: policy, admission, blocks and rate on controls, and a moment on a slider.

`gantt_scrubber()` wires them to a frozen `SmallEngine`; `gantt(SmallEngine(policy="short_first", at_s=5))` is the same
picture without any slider. The clock is simulated: steps take what kvlab models of Llama-3.1-8B on an RTX 4090. What
moves needs the extra: pip install 'kvlab[notebook]'.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from kvlab.figures._style import Drawing, Style, above, drawing, image
from kvlab.figures.gantt import draw_blocks, draw_spans, legend
from kvlab.serving.gantt import Gantt
from kvlab.serving.scheduler_config import ADMISSIONS, POLICIES, SchedulerConfig
from kvlab.serving.simulator import simulate
from kvlab.serving.workloads import synthetic
from kvlab.shapes import positive
from kvlab.studies._serving import engine
from kvlab.widgets import _ipywidgets

if TYPE_CHECKING:
    from ipywidgets import DOMWidget
    from matplotlib.figure import Figure

__all__ = ["SmallEngine", "gantt", "gantt_scrubber"]
MOST = 60                       # requests that a Gantt chart can show
WORDS = {"queued": "wait for the first time", "prefill": "compute their prompt", "decode": "generate",
         "preempted": "were preempted and wait", "recompute": "compute again what they had"}


@dataclass(frozen=True)
class SmallEngine:
    """`count` requests of a workload at `rate` per second on an engine of `num_blocks` blocks of 16 tokens.

    at_s: the moment that is looked at, in simulated seconds. Refused (ValueError, KeyError): an unknown policy,
    admission or workload, numbers that are not above 0, more than 60 requests, a moment before the beginning.
    """
    policy: str = "fcfs"
    admission: str = "full_prompt"
    num_blocks: int = 321
    rate: float = 4.0
    at_s: float = 5.0
    count: int = 12
    seed: int = 5
    workload: str = "azure_2023_conv"

    def __post_init__(self):
        positive(count=self.count, num_blocks=self.num_blocks)
        if self.count > MOST:
            raise ValueError(f"count={self.count} requests do not fit in one chart; give at most {MOST}")
        if not self.rate > 0 or not self.at_s >= 0:
            raise ValueError(f"rate={self.rate!r} must be above 0 per second, and at_s={self.at_s!r} at least 0 s")

    @cached_property
    def served(self) -> Gantt:
        """The simulation's spans and steps; those of a request larger than the pool are none: it is rejected."""
        found = Gantt()
        requests = synthetic(self.workload, self.count, self.rate, self.seed)
        simulate(requests, SchedulerConfig(policy=self.policy, admission=self.admission), num_blocks=self.num_blocks,
                 step_time=engine(), every_s=None, on_step=found)
        return found

    @cached_property
    def spans(self) -> list[tuple[str, str, float, float]]:
        """(request, kind, began, length) of each span."""
        return [(one.id, one.what, one.began_s, one.ended_s - one.began_s) for one in self.served.spans().itertuples()]

    @cached_property
    def blocks(self) -> list[tuple[float, int]]:
        """(when a step ended, blocks in use then)."""
        return [(ended, used) for _, _, ended, *_, used in self.served.steps]

    def state(self) -> dict[str, list[str]]:
        """Kind of span -> the requests that are in one at that moment."""
        found: dict[str, list[str]] = {what: [] for what in WORDS}
        for request, what, began, length in self.spans:
            if began <= self.at_s < began + length:
                found[what].append(request)
        return found

    def used(self) -> int:
        """Blocks in use at that moment: after the last step that had ended."""
        return next((used for ended, used in reversed(self.blocks) if ended <= self.at_s), 0)


def gantt(choice: SmallEngine) -> Figure:
    """The spans of all requests above the blocks in use, with a line at the moment."""
    with drawing():
        figure = Drawing(figsize=(Style().width, 3.4), layout="constrained")
        spans, blocks = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        draw_spans(spans, choice.spans)
        draw_blocks(blocks, [ended for ended, _ in choice.blocks], [used for _, used in choice.blocks],
                    choice.num_blocks)
        for ax in (spans, blocks):
            ax.axvline(choice.at_s, color="black", lw=0.9)
        spans.set_ylabel("requests, as they arrive")
        blocks.set_ylabel("blocks")
        above(figure, legend(), columns=6)
    return figure


def gantt_scrubber(start: SmallEngine | None = None) -> DOMWidget:
    """Controls above the picture and the state at the moment in words; what a choice refuses stands there instead."""
    widgets, at = _ipywidgets(), start or SmallEngine()
    picture, words = widgets.Image(layout=dict(max_width="820px", object_fit="contain")), widgets.HTML()
    late = dict(continuous_update=False)
    controls = dict(
        policy=widgets.Dropdown(options=POLICIES, value=at.policy),
        admission=widgets.Dropdown(options=ADMISSIONS, value=at.admission),
        num_blocks=widgets.IntSlider(min=min(101, at.num_blocks), max=max(1001, at.num_blocks), step=20,
                                     value=at.num_blocks, description="blocks", **late),
        rate=widgets.FloatSlider(min=0.5, max=20, step=0.5, value=at.rate, description="requests / s", **late),
        at_s=widgets.FloatSlider(min=0, max=30, step=0.1, value=at.at_s, description="moment (s)", **late))

    def redraw(_=None):
        try:
            choice = SmallEngine(**{name: control.value for name, control in controls.items()}, count=at.count,
                                 seed=at.seed, workload=at.workload)
            picture.value, picture.layout.display, words.value = image(gantt(choice), "png"), "", _said(choice)
        except (ValueError, KeyError) as error:
            picture.layout.display = "none"                      # no picture of another choice beside the refusal
            words.value = f"<b>{escape(str(error.args[0]))}</b>"
    for name, control in controls.items():
        control.description = control.description or name
        control.style.description_width, control.layout.width = "100px", "400px"
        control.observe(redraw, "value")
    redraw()
    grid = widgets.GridBox(list(controls.values()), layout=dict(grid_template_columns="repeat(2, 410px)"))
    return widgets.VBox([grid, picture, words])


def _said(choice: SmallEngine) -> str:
    """The state at the moment, as HTML."""
    shown = {what: names for what, names in choice.state().items() if names}
    lines = [f"at {choice.at_s:g} s, {choice.used():,} of {choice.num_blocks - 1:,} blocks in use"]
    lines += [f"{len(names)} {WORDS[what]}: {escape(', '.join(names))}" for what, names in shown.items()]
    lacking = choice.count - len({request for request, *_ in choice.spans})
    lines += [f"{lacking} rejected: larger than the pool"] if lacking else []
    return "<br>".join(lines)
