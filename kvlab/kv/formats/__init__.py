"""KV formats: one file per family. `kv_format(name)` finds one, `format_names()` lists them."""
from kvlab.kv.formats._base import (
    Codec,
    Component,
    KVFormat,
    Packed,
    format_names,
    kv_format,
    torch_dtype,
)

__all__ = ["Codec", "Component", "KVFormat", "Packed", "format_names", "kv_format", "torch_dtype"]
