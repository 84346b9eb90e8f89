"""kvlab: a laboratory for the KV cache. Why decoding is slow, what a cache costs, what each remedy buys."""
from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

# Loaded when first used, so that `import kvlab` and `kvlab --help` need neither torch nor matplotlib.
_LAZY = {
    "AttentionShape": "kvlab.shapes", "Workload": "kvlab.shapes", "ModelSpec": "kvlab.shapes",
    "Layout": "kvlab.kv.cache", "kv_format": "kvlab.kv.formats", "Comparison": "kvlab.attention",
    "Trial": "kvlab.attention", "trial": "kvlab.attention", "Reading": "kvlab.record.reading",
    "wide": "kvlab.record.wide", "read_table": "kvlab.record.store", "model_spec": "kvlab.catalog.resolve:model",
    "gpu": "kvlab.catalog.gpus",
    "size": "kvlab.api", "measure": "kvlab.api", "run": "kvlab.api", "figure": "kvlab.api",
    "findings": "kvlab.api", "ledger": "kvlab.api", "reference": "kvlab.api", "export": "kvlab.record.export",
    "read_trace": "kvlab.record.trace", "compare": "kvlab.comparing", "table": "kvlab.record.reading",
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
