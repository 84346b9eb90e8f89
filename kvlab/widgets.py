"""What notebooks show beside results: explorers of the figures that need no run, searchable tables, flame strips.

An explorer wires sliders to a frozen dataclass of plain numbers (`KVBudget`, `DecodeStep`); `figure` draws the same
picture from one without any slider. What moves needs the extra: pip install 'kvlab[notebook]'. Nothing is loaded from a
network.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

from kvlab.catalog.gpus import gpus
from kvlab.catalog.models import models
from kvlab.figures import figures
from kvlab.figures._caption import add_footer, footer
from kvlab.figures._flame import flame
from kvlab.figures._style import Style, drawing, image
from kvlab.figures.decode_roofline import DecodeStep
from kvlab.figures.kv_budget import KVBudget
from kvlab.kv.formats import format_names
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd
    from ipywidgets import DOMWidget
    from matplotlib.figure import Figure

__all__ = ["DecodeStep", "KVBudget", "figure", "flame", "kv_explorer", "roofline_explorer", "table"]
Choice = KVBudget | DecodeStep
LENGTHS = [2**n for n in range(9, 21)]
BATCHES = [2**n for n in range(11)]
_STYLE = """<style>.kvlab-numbers {line-height: 1.4}
.kvlab-numbers :is(td, th) {text-align: left; padding: 1px 10px 1px 0; vertical-align: top}
.kvlab-numbers td:not(:last-child) {white-space: nowrap}</style>"""


def figure(choice: Choice) -> Figure:
    """The figure of a choice, as the explorer shows it: `figure(KVBudget("Qwen2-72B-Instruct", kv_len=32768, tp=4))`.

    Refused (ValueError, KeyError): what the choice refuses, unknown models, formats and GPUs.
    """
    return _drawn(choice)[0]


def kv_explorer(start: KVBudget | None = None) -> DOMWidget:
    """Model, context, batch, format and GPUs on sliders: what the cache, the weights and the reserve take of a GPU."""
    widgets, at = _ipywidgets(), start or KVBudget()
    known = [name for name, spec in gpus().items() if spec.memory_bytes]
    return _explorer(KVBudget, dict(
        model=widgets.Dropdown(options=list(models()), value=at.spec.name),
        kv_len=_powers("context", LENGTHS, at.kv_len), batch_size=_powers("sequences", BATCHES, at.batch_size),
        kv_format=_formats(at.kv_format),
        tp=_powers("tensor parallel", [1, 2, 4, 8, 16, 32, 64], at.tp),
        weight_bits=widgets.Dropdown(options=[16, 8], value=at.weight_bits),
        reserve=widgets.FloatSlider(min=0, max=0.5, step=0.05, value=at.reserve, readout_format=".0%",
                                    continuous_update=False),
        gpus=widgets.SelectMultiple(options=[*at.gpus, *(name for name in known if name not in at.gpus)],
                                    value=at.gpus, rows=5)))


def roofline_explorer(start: DecodeStep | None = None) -> DOMWidget:
    """Batch, context, group ratio, format and GPU on sliders: the points of a decode step walk under the GPU's roof."""
    widgets, at = _ipywidgets(), start or DecodeStep()
    known = [name for name, spec in gpus().items() if spec.bandwidth and (spec.flops["bf16"] or spec.flops["fp16"])]
    return _explorer(DecodeStep, dict(
        gpu=widgets.Dropdown(options=known, value=at.sheet.name),
        batch_size=_powers("sequences", BATCHES, at.batch_size),
        kv_len=_powers("context", LENGTHS, at.kv_len),
        group_ratio=_powers("group ratio", [1, 2, 4, 8, 16, 32, 64], at.group_ratio),
        kv_format=_formats(at.kv_format)))


def table(rows: pd.DataFrame | Iterable[Mapping]) -> DOMWidget:
    """A table to search and to sort: a result table, or a list of `kvlab ls` (`table(kvlab.listing.models())`)."""
    import pandas as pd
    try:
        from itables.widget import ITable
    except ImportError as error:
        raise _lacking("itables[widget]") from error
    frame = (rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows)).convert_dtypes()
    frame = frame.map(lambda cell: ", ".join(map(str, cell)) if isinstance(cell, list) else cell)
    # allow_html: said here, for a user's own option would let a model's name run scripts
    return ITable(frame, maxBytes=0, scrollX=True, showIndex=False, classes="display compact nowrap", allow_html=False)


def _drawn(choice: Choice) -> tuple[Figure, pd.DataFrame]:
    from kvlab.record.reading import table as result_table
    module, empty = figures[choice.figure], result_table([])
    rows = module.select(empty, choice)
    with drawing():
        made = module.draw(rows, Style())
        add_footer(made, [*footer(rows, empty)])
    return made, rows


def _explorer(make: Callable[..., Choice], controls: Mapping[str, DOMWidget]) -> DOMWidget:
    """The controls above the picture and the exact numbers; what a choice refuses stands there instead, in words."""
    widgets = _ipywidgets()
    picture, words = widgets.Image(layout=dict(max_width="820px", object_fit="contain")), widgets.HTML()

    def redraw(_=None):
        try:
            made, rows = _drawn(make(**{name: control.value for name, control in controls.items()}))
        except (ValueError, KeyError) as error:
            picture.layout.display = "none"                      # no picture of another choice beside the refusal
            words.value = f"<b>{escape(str(error.args[0]))}</b>"
        else:
            picture.value, picture.layout.display = image(made, "png"), ""
            words.value = _numbers(rows)
    for name, control in controls.items():
        control.description = control.description or name.replace("_", " ")
        control.style.description_width, control.layout.width = "100px", "400px"
        control.observe(redraw, "value")
    redraw()
    grid = widgets.GridBox(list(controls.values()), layout=dict(grid_template_columns="repeat(2, 410px)"))
    return widgets.VBox([grid, picture, words])


def _numbers(rows: pd.DataFrame) -> str:
    """Every number of the picture as HTML: exact values by metric and by what they are about, kind and formula."""
    of = rows["hardware"].where(rows["scope"] == "call", rows["scope"]).replace("none", "model")
    how = rows["method"].str.removeprefix("formula:") + rows["note"].where(rows["note"] == "", "; " + rows["note"])
    shown = rows.assign(of=of, how=how, value=[_exact(row) for row in rows.to_dict("records")])
    keys, columns = ["metric", "kind", "how"], list(dict.fromkeys(of))
    order = list(shown[keys].drop_duplicates().itertuples(index=False, name=None))
    wide = shown.pivot(index=keys, columns="of", values="value").reindex(index=order, columns=columns).fillna("")
    wide = wide.reset_index().rename_axis(columns=None)
    return _STYLE + wide[["metric", *columns, "kind", "how"]].to_html(index=False, border=0, classes="kvlab-numbers")


def _exact(row: Mapping) -> str:
    if row["kind"] == "missing":
        return "–"
    if row["unit"] in ("B", "count"):
        return f"{row['value']:,.0f}" + (" B" if row["unit"] == "B" else "")
    return display(row["value"], row["unit"], 4)


def _powers(description: str, values: list[int], at: int) -> DOMWidget:
    """A slider over those values and `at`, which answers when it is let go."""
    return _ipywidgets().SelectionSlider(options=[(f"{n:,}", n) for n in sorted({*values, at})], value=at,
                                         description=description, continuous_update=False)


def _formats(at: str) -> DOMWidget:
    """Every format that has a size, those that kvlab does not compute with too."""
    names = {*format_names(), *format_names(sizes_only=True), at}
    return _ipywidgets().Dropdown(options=sorted(names), value=at)


def _ipywidgets():
    try:
        import ipywidgets
    except ImportError as error:
        raise _lacking("ipywidgets") from error
    return ipywidgets


def _lacking(package: str) -> ImportError:
    return ImportError(f"explorers and tables in notebooks need {package}: pip install 'kvlab[notebook]'")
