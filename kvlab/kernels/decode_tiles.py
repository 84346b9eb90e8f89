"""How a decode step is cut for a GPU: rows and tokens of a tile, and parts of a sequence. Numbers only: no Triton."""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from kvlab.kernels.triton_tuning import Config

BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int4": 4, "int2": 2}
SHARED_BYTES = 99 * 1024                        # what a program may have on every GPU since sm_80
THREAD_NUMBERS = 72                             # of a tile that a thread decodes: with more, registers spill
RESIDENT = 2                                    # programs that a multiprocessor holds at once, of such tiles
LEAST_TILES = 2                                 # a part of fewer tiles costs more to merge than it wins
MOST_PARTS = 256


def parts(width: int) -> tuple[int, int]:
    """A width as a power of two and the padded rest: 576 = 512 + 64, and not 1024; 16 at least, as a product needs."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, max(16, 1 << (rest - 1).bit_length()) if rest > 0 else 0


def candidates(group: int, sides: Sequence[tuple[str, int]], itemsize: int) -> tuple[Config, ...]:
    """Few configurations, the first the default. Found by compiling: they fit every GPU, and none spills registers.

    group: query heads per KV head. sides: (kind of codes, width) of K, and of V unless it is a view of K. itemsize: of
    q. Two limits: tiles in flight in shared memory, and the numbers that a thread makes of codes in registers.
    """
    width = max(sum(parts(w)) for _, w in sides)
    token_bytes = sum(sum(parts(w)) * BITS[kind] // 8 for kind, w in sides)
    rows = min(max(16, 1 << (group - 1).bit_length()), 64 if width <= 128 else 32 if width <= 256 else 16)
    decoded = any(BITS[kind] != 8 * itemsize for kind, _ in sides)
    wanted = (((16, 4, 3), (32, 8, 2)) if itemsize == 4 else                    # fp32: products without matrix units
              ((64, 4, 3), (64, 4, 4), (128, 8, 3), (32, 4, 3), (32, 8, 3), (16, 4, 3)))
    found = [Config(rows, tokens, warps, stages) for tokens, warps, stages in wanted
             if (tokens * token_bytes * (stages - 1) + rows * (width + tokens) * itemsize <= SHARED_BYTES
                 and (not decoded or tokens * width <= THREAD_NUMBERS * 32 * warps))]
    return tuple(found[:4]) or (Config(rows, 16, 8 if decoded else 4, 2),)


def splits(programs: int, kv_len: int, tokens: int, multiprocessors: int) -> int:
    """Parts that each sequence's tokens are cut into, so that the multiprocessors are busy and end together.

    programs: sequences x KV heads x tiles of query heads. kv_len: tokens of the longest. The fewest parts whose last
    round of programs is as full as the best choice's, to 5 %; none shorter than LEAST_TILES tiles of tokens.
    """
    places = RESIDENT * multiprocessors
    most = max(1, min(MOST_PARTS, kv_len // (tokens * LEAST_TILES), 8 * -(-places // programs)))

    def filled(count: int) -> float:
        return programs * count / (places * -(-programs * count // places))
    best = max(map(filled, range(1, most + 1)))
    return next(count for count in range(1, most + 1) if filled(count) >= 0.95 * best)


@cache
def multiprocessors(device) -> int:
    """Of a GPU; 2 where the kernel is only interpreted, so that a test meets parts too."""
    import torch
    device = torch.device(device)
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
