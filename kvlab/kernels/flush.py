"""What empties a GPU's L2 cache before a call: the timer's clock, the counters' children and tuning use the same."""
from __future__ import annotations


class Flush:
    """Called, it reads a resident buffer of 2 × L2 bytes, so that the next call finds nothing of its own in the cache.

    A read and not a write, which would leave dirty lines whose write-backs a counter would lay at the call's door. It
    is ordered on the current stream, before what comes after it; it does not wait.
    """

    def __init__(self, device):
        import torch
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.ones(2 * l2 // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self._buffer.sum()
