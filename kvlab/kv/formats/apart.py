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
    sides = [next(filter(None, (families[family].kv_format(one) for family in families if family != "apart")), None)
             for one in (k, v)]
    if None in sides:
        return None
    return KVFormat(name, sides[0].k, sides[1].v)
