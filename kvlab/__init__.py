"""kvlab: a laboratory for the KV cache. Why decoding is slow, what a cache costs, what each remedy buys."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:               # for editors and type checkers, which cannot follow the lazy names below
    from kvlab.accuracy.scoring import score as score
    from kvlab.api import figure as figure
    from kvlab.api import findings as findings
    from kvlab.api import ledger as ledger
    from kvlab.api import measure as measure
    from kvlab.api import reference as reference
    from kvlab.api import run as run
    from kvlab.api import size as size
    from kvlab.attention import trial as trial
    from kvlab.catalog import resolve
    from kvlab.catalog.gpus import gpu as gpu
    from kvlab.comparing import compare as compare
    from kvlab.kv.cache import Layout as Layout
    from kvlab.kv.formats import kv_format as kv_format
    from kvlab.model.capture import capture as capture
    from kvlab.model.load import load_decoder as load_decoder
    from kvlab.model.transformers import attach as attach
    from kvlab.record.export import export as export
    from kvlab.record.query import query as query
    from kvlab.record.reading import table as table
    from kvlab.record.store import read_table as read_table
    from kvlab.record.wide import wide as wide
    from kvlab.shapes import AttentionShape as AttentionShape
    from kvlab.shapes import Workload as Workload
    model_spec = resolve.model

__version__ = "0.1.0"

# Loaded when first used, so that `import kvlab` and `kvlab --help` need neither torch nor matplotlib.
_LAZY = {
    # what is measured: shapes, layouts, formats, models, devices
    "AttentionShape": "kvlab.shapes", "Workload": "kvlab.shapes", "Layout": "kvlab.kv.cache",
    "kv_format": "kvlab.kv.formats", "model_spec": "kvlab.catalog.resolve:model", "gpu": "kvlab.catalog.gpus",
    "trial": "kvlab.attention",
    # one call, one study, and what they say
    "size": "kvlab.api", "measure": "kvlab.api", "run": "kvlab.api", "findings": "kvlab.api", "figure": "kvlab.api",
    "ledger": "kvlab.api", "compare": "kvlab.comparing",
    # result tables
    "reference": "kvlab.api", "read_table": "kvlab.record.store", "query": "kvlab.record.query",
    "table": "kvlab.record.reading",
    "wide": "kvlab.record.wide", "export": "kvlab.record.export",
    # whole models
    "load_decoder": "kvlab.model.load", "attach": "kvlab.model.transformers", "capture": "kvlab.model.capture",
    "score": "kvlab.accuracy.scoring",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = _LAZY[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)
