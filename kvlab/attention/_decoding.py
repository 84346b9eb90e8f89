"""What turning a stored format into floats moves: torch's operators write whole arrays, one after the other."""
from __future__ import annotations

from kvlab.kv.formats._scaled import Scaled


def arrays_written(codec, itemsize: int, on_cpu: bool) -> list[int]:
    """Bytes per number of each array that the codec's decode writes, in order; the last is what attention reads.

    Codes of 4 and 2 bits are shifted and masked, a byte each; on a CPU a product of integers and floats first writes
    the integers as fp32 (a GPU casts in registers); scales of groups of channels are spread over all numbers, in
    their own type and as fp32; a zero point is a sum after the product; a residual's tail is joined by a copy.
    """
    written = []
    if isinstance(codec, Scaled):
        grain, code = codec.grain, codec.code
        spread = [code.scale_itemsize, 4] if grain and grain.channels and grain.tokens else []
        if code.bits < 8:
            written += [1, 1]
        if grain is None:
            written += [4]                                           # the cast is all
        else:
            written += ([4] if on_cpu or code.stored != code.value else []) + spread + [4]
            written += spread + [4] if code.asymmetric else []
        if itemsize != 4:
            written.append(itemsize)
    else:
        written.append(itemsize)
    if codec.residual:
        written.append(itemsize)
    return written
