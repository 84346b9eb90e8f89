"""K and V stored apart, each in the format of its own: "bf16+int8/token", or k16v8 for short."""
from __future__ import annotations

import re

from kvlab.kv.formats._base import KVFormat, families

EXAMPLES = ("k16v8", "k8v4", "bf16+int4/token/g32")
_BITS = {"16": "bf16", "8": "int8/token", "4": "int4/token/g32", "2": "int2/token/g32"}


def kv_format(name: str) -> KVFormat | None:
    short = re.fullmatch(r"k(16|8|4|2)v(16|8|4|2)", name)
    k, plus, v = (_BITS[short[1]], "+", _BITS[short[2]]) if short else name.partition("+")
    if not plus or "+" in v:
        return None
    of_k, of_v = _side(k), _side(v)
    return KVFormat(name, of_k.k, of_v.v) if of_k and of_v else None


def _side(name: str) -> KVFormat | None:
    return next(filter(None, (families[family].kv_format(name) for family in families if family != "apart")), None)
