"""How a Triton kernel's work is cut: few configurations, the fastest found by measuring once, outside every timing."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

LAUNCHES = 9                    # timed ones of each candidate, after one that compiles it
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

    key: all that the speed depends on (kernel, GPU, heads, lengths, kinds of codes) and whether it was tuned. launch
    runs the whole call with a candidate. One that cannot be launched, for want of shared memory say, is left out;
    where none can, its error is raised. Call it while planning, never inside a timing.
    """
    if key not in _chosen:
        if not tune or len(candidates) == 1:
            _chosen[key] = candidates[0], "default"
        else:
            _chosen[key] = _fastest(candidates, launch)
    return _chosen[key][0]


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
    return min(times, key=times.get), how + (f", {len(refused)} could not be launched" if refused else "")


def _milliseconds(launch) -> float:
    """Median time of a launch on the GPU. What fits into its caches stays there; a KV cache worth tuning does not."""
    import torch
    launch()
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(LAUNCHES)]
    for start, end in pairs:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)
