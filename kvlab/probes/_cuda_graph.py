"""Calls as one CUDA graph: a second opinion on their time, without launches by the host between them."""
from __future__ import annotations


class NotCaptured(Exception):
    """The calls are no graph; the message says why."""


def captured(calls):
    """A CUDA graph of the calls one after the other, on their own inputs.

    Raises NotCaptured for what waits for the GPU or cannot be captured otherwise. What torch itself waits for is found
    before the capture: one that fails leaves torch on the stream of the capture, and its allocator believing that it
    still goes on (before torch 2.12).
    """
    import torch
    cuda = torch.cuda
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        calls[0]()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise NotCaptured("it waits for the GPU inside a call, which a CUDA graph cannot hold") from None
    finally:
        cuda.set_sync_debug_mode(before)
    graph, pool, stream = cuda.CUDAGraph(), cuda.graph_pool_handle(), cuda.current_stream()
    try:
        with cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            for call in calls:
                call()
    except Exception as error:
        cuda.set_stream(stream)
        _end(pool)
        spoilt = "previous error during capture" in str(error)       # then its end raises as well
        first = error.__context__ if spoilt and error.__context__ else error
        text = " ".join(f"{type(first).__name__}: {first}".split())[:200]
        raise NotCaptured(f"it cannot be captured as a CUDA graph ({text})") from None
    return graph


def _end(pool) -> None:
    """Tell the allocator that the capture is over, if it does not know, and come to rest."""
    import torch
    try:
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    except (AttributeError, RuntimeError):
        pass                                                         # it knows: torch ended it with the capture
    torch.cuda.synchronize()
