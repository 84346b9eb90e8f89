"""INT4 and INT2, packed into bytes, asymmetric with scale and zero point in fp16; and KIVI, which mixes two grains.

KIVI: K per channel in groups of g tokens, V per token in groups of g channels; the newest kv_len % r tokens of K and
the newest r of V stay in fp16. A step is stored before it is attended to: its reference code attends first, so that the
token which fills K's residual still meets it in full precision there, and encoded here.
Source: arXiv 2402.02750 and its reference code (fp16 scales and zero points).
"""
from __future__ import annotations

import re
from dataclasses import replace

from kvlab.kv.formats._base import KVFormat
from kvlab.kv.formats._scaled import Code, codec

EXAMPLES = ("int4/head", "int4/token", "int4/token/g32", "int4/channel/g32", "int4/block16", "int2/token/g32",
            "kivi4/g32/r128", "kivi2/g32/r128")
_CODES = {"int4": Code(4, 15, True, "uint8", "uint8", "float16", 2),
          "int2": Code(2, 3, True, "uint8", "uint8", "float16", 2)}


def kv_format(name: str) -> KVFormat | None:
    kivi = re.fullmatch(r"kivi([24])/g([1-9][0-9]{0,5})(?:/r([1-9][0-9]{0,5}))?", name)
    if kivi:
        kind, group, residual = f"int{kivi[1]}", int(kivi[2]), int(kivi[3] or 0)
        if residual % group:
            raise ValueError(f"{name}: KIVI encodes its residual in whole groups; r{residual} must be a multiple of "
                             f"g{group}")
        k, v = (codec(f"{kind}/{axis}/g{group}", kind, _CODES[kind]) for axis in ("channel", "token"))
        if k and v:
            return KVFormat(name, replace(k, residual=residual, flushed=residual > 0), replace(v, residual=residual))
    for prefix, code in _CODES.items():
        found = codec(name, prefix, code)
        if found:
            return KVFormat(name, found, found)
    return None
