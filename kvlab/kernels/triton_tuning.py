"""How a Triton kernel's work is cut: few configurations, the fastest found by measuring once, outside every timing."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from kvlab.kernels.flush import Flush

LAUNCHES = 9                    # timed ones of each candidate, after one that compiles it
FASTER = 0.98                   # of the default's time; what is not 2 % faster may owe it to noise
AHEAD_CYCLES = 4_000_000        # about 2 ms in which the GPU waits, so that no gap between launches is timed


class Config(NamedTuple):
    """rows: queries of a tile; tokens: KV tokens of a tile; warps: of 32 threads; stages: tiles loaded ahead."""
    rows: int
    tokens: int
    warps: int
    stages: int


_chosen: dict[Hashable, tuple[Config, str]] = {}


def pick(key: Hashable, candidates: Sequence[Config], launch: Callable[[Config], object], tune: bool) -> Config:
    """The candidate whose launches are the fastest, found once per process and key; without `tune` the first.

    key: what the speed depends on (kernel, GPU, heads, kinds of codes, about how long: `power`) and whether it was
    tuned. launch runs the whole call with a candidate, on the current device. The first is the default, which another
    replaces where it is 2 % faster. One that cannot be launched, for want of shared memory say, is left out; where none
    can, its error is raised. Call it while planning, never inside a timing.
    """
    if key not in _chosen:
        if not tune or len(candidates) == 1:
            _chosen[key] = candidates[0], "default"
        else:
            _chosen[key] = _fastest(candidates, launch)
    return _chosen[key][0]


def power(lens: Sequence[int]) -> int:
    """The power of two that is not below the longest: a step longer by one token is not measured anew."""
    return 1 << (max(lens) - 1).bit_length()


def told(key: Hashable) -> str:
    """What was picked, for a row's note: "tile of 16 queries by 64 tokens, 4 warps, 3 stages; default"."""
    if key not in _chosen:
        return ""
    config, how = _chosen[key]
    return (f"tile of {config.rows} queries by {config.tokens} tokens, {config.warps} warps, {config.stages} stages; "
            f"{how}")


def _fastest(candidates, launch) -> tuple[Config, str]:
    times, refused = {}, []
    for config in candidates:
        try:
            times[config] = _milliseconds(lambda config=config: launch(config))
        except Exception as error:                      # whatever Triton or the driver raises: others may still run
            refused.append(error)
    if not times:
        raise refused[0]
    how = f"chosen among {len(times)} by measuring"
    best = min(times, key=times.get)
    if times[best] > FASTER * times.get(candidates[0], float("inf")):
        best = candidates[0]
    return best, how + (f", {len(refused)} could not be launched" if refused else "")


def _milliseconds(launch) -> float:
    """Median time of a launch on the current GPU that finds nothing in its L2 cache, as the timer's calls do not."""
    import torch
    flush = Flush(torch.cuda.current_device())
    launch()
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(LAUNCHES)]
    for start, end in pairs:
        flush()
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)
