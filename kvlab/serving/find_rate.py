"""The highest rate of arrivals at which a simulated engine still answers in time, by bisection."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvlab.serving.simulator import Simulation

SPREAD = 1.02                   # at most, between the rate that passes and the one that does not
START, MOST_STEPS = 1.0, 14     # requests/s; doublings or halvings of it


@dataclass(frozen=True, slots=True)
class FoundRate:
    """rate: requests/s, the highest tried that passes; above: the lowest tried that fails; simulations: how many."""
    rate: float
    above: float
    simulations: int


def find_rate(simulated: Callable[[float], Simulation], limits: Mapping[str, float]) -> FoundRate:
    """simulated: the simulation at a rate, of the same requests each time. limits: of its summary, such as
    {"ttft_p99_s": 2.0}; a request that is rejected, or a statistic that is absent, fails.

    START is doubled or halved until one rate passes and the next fails; between them it is bisected in the logarithm.
    Where times do not grow with the rate everywhere, a higher one may pass too.
    ValueError: all rates that were tried pass, or none does.
    """
    tried = []

    def passes(rate: float) -> bool:
        tried.append(rate)
        done = simulated(rate)
        found = done.summary()
        return not done.rejected and all((value := found[name]) is not None and value < limit
                                         for name, limit in limits.items())

    factor = 2.0 if passes(START) else 0.5
    for step in range(1, MOST_STEPS + 1):
        if passes(START * factor**step) != (factor > 1):
            break
    else:
        said = " and ".join(f"{name} < {limit:g}" for name, limit in limits.items())
        raise ValueError(f"{said} holds at every rate up to {max(tried):,.0f} requests/s: give more requests (--count)"
                         if factor > 1 else f"{said} does not hold even at {min(tried):.2g} requests/s: give a longer "
                         "limit, other GPUs or, where requests are rejected, more blocks")
    low, high = sorted(tried[-2:])
    while high / low > SPREAD:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if passes(middle) else (low, middle)
    return FoundRate(low, high, len(tried))
