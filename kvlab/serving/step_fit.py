"""A step time fitted to a recorded run of one device: for engines and machines that no table knows."""
from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from kvlab.serving._replay_run import read_run
from kvlab.serving._replay_setup import setup
from kvlab.serving.simulator import simulate
from kvlab.serving.step_time import Linear

_START = (5e-3, 1e-3, 1e-3)     # s per step, prompt token and decoding sequence, from which the search sets out


def fitted_linear(folder: Path | str, **given) -> Linear:
    """A constant, a time per prompt token and one per decoding sequence, so that tokens come when they did.

    Least squares of the logarithms of simulated ÷ real TTFT and end-to-end time of each request, by Nelder-Mead; what a
    cached token costs is not told apart: 0. In-sample on that run. given: model, gpu, gpus, blocks, as for `replay`.
    """
    from scipy.optimize import minimize
    run = read_run(folder)
    found = setup(run, measured=True, **given)
    requests = [one.request for one in run.requests]
    real = {one.id: (one.first_s - one.arrived_s, one.last_s - one.arrived_s) for one in run.requests
            if one.first_s is not None and one.last_s is not None and min(one.first_s, one.last_s) > one.arrived_s}
    blank = Linear(*_START, 0.0, found.device, f"fitted to {run.path.name} itself, {len(real)} requests", "modelled")

    def model(logs) -> Linear:
        base, prefill, decode = (math.exp(min(max(log, -30.0), 10.0)) for log in logs)
        return replace(blank, base_s=base, per_prefill_token_s=prefill, per_decode_seq_s=decode)

    def misses(logs) -> float:
        done = simulate(requests, found.config, num_blocks=found.blocks, block_size=found.block_size, every_s=None,
                        step_time=model(logs), replicas=found.dp)
        total = 0.0
        for one in done.served:
            if one.ttft_s is not None and one.e2e_s is not None and one.request.id in real:
                ttft, whole = real[one.request.id]
                total += math.log(one.ttft_s / ttft) ** 2 + math.log(one.e2e_s / whole) ** 2
        return total

    found_logs = minimize(misses, [math.log(start) for start in _START], method="Nelder-Mead",
                          options=dict(maxfev=300, xatol=1e-3, fatol=1e-5)).x
    return model(found_logs)
