"""FP8 E4M3 (up to 448) and E5M2 (up to 57344): as it is, or with scales in fp32. Larger values are clipped."""
from __future__ import annotations

from kvlab.kv.formats._base import KVFormat
from kvlab.kv.formats._scaled import Code, Scaled, codec

EXAMPLES = ("fp8_e4m3", "fp8_e4m3/tensor", "fp8_e4m3/head", "fp8_e4m3/token", "fp8_e4m3/block16", "fp8_e5m2",
            "fp8_e5m2/token")
# Source: OCP 8-bit Floating Point Specification, table 1
_CODES = {"fp8_e4m3": Code(8, 448, False, "uint8", "float8_e4m3fn", "float32", 4),
          "fp8_e5m2": Code(8, 57344, False, "uint8", "float8_e5m2", "float32", 4)}


def kv_format(name: str) -> KVFormat | None:
    for prefix, code in _CODES.items():
        found = Scaled(name, code, None) if name == prefix else codec(name, prefix, code)
        if found:
            return KVFormat(name, found, found)
    return None
