"""INT8 with symmetric absmax scales in fp32: per tensor, head, channel (static), token, or block of tokens."""
from __future__ import annotations

from kvlab.kv.formats._base import KVFormat
from kvlab.kv.formats._scaled import Code, codec

EXAMPLES = ("int8/tensor", "int8/head", "int8/channel", "int8/token", "int8/block16")
_INT8 = Code(8, 127, False, "int8", "int8", "float32", 4)


def kv_format(name: str) -> KVFormat | None:
    found = codec(name, "int8", _INT8)
    return KVFormat(name, found, found) if found else None
