"""A recorded run of a real engine, served again by the simulator: how far off is it, and which part of it is wrong.

`replay(folder, fit="none" | "scalar")` gives signed relative errors, (simulated − real) ÷ real, of makespan and of the
means and percentiles of TTFT, TPOT and end-to-end time; `explain(…)` splits them into block count, step time and
scheduler by swapping each for the true one. Time counts from a request's arrival on the engine's clock, on both sides.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvlab.registry import no_such
from kvlab.serving._replay_run import Run, read_run
from kvlab.serving._replay_setup import Setup, setup
from kvlab.serving.model_work import ranked
from kvlab.serving.simulator import Simulation, simulate
from kvlab.serving.step_models import Parts, Rates, chosen_rates, parts
from kvlab.serving.step_time import Linear

__all__ = ["FITS", "FITTED", "Replay", "explain", "fitted_scale", "replay"]
FITS = ("none", "scalar")
MEASURES = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
FITTED = ("makespan", "ttft_mean", "tpot_mean", "e2e_mean")     # what the one factor is fitted on; the rest is not seen
_WIDEST = 16.0                  # the factor is sought between 1/16 and 16
_FIT_STEPS, _FIT_WIDTH = 10, 0.1            # of the search around the factor that the end-to-end mean asks for


@dataclass(frozen=True, slots=True)
class Replay:
    """A run beside its simulation.

    Times are seconds, errors signed and relative; None where there is no number. fit: none, scalar (fitted on this
    run) or carried (from another). errors, real, simulated: by statistic. series_mae: mean absolute error of running
    and waiting requests and of KV usage in points, over the run's own ticks. blocks, step_time, scheduler: what was
    used, each with its kind and source. requests, left_out: how many were compared, and which rows were not. notes:
    what to know before believing it.
    """
    run: str
    fit: str
    errors: dict[str, float | None]
    real: dict[str, float | None]
    simulated: dict[str, float | None]
    scale: float
    series_mae: dict[str, float | str]
    blocks: dict
    step_time: dict
    scheduler: dict
    requests: int
    left_out: dict[str, int]
    preemptions: int
    steps: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Case:
    """A run, what it was, and a step time of its GPU."""
    run: Run
    setup: Setup
    step_time: Linear | Parts

    def simulated(self, scale: float = 1.0, blocks: int | None = None, every_s: float | None = None) -> Simulation:
        s = self.setup
        model = self.step_time if scale == 1.0 else self.step_time.scaled(scale, "")
        return simulate([one.request for one in self.run.requests], s.config, num_blocks=blocks or s.blocks,
                        block_size=s.block_size, step_time=model, replicas=s.dp, lockstep=s.lockstep, every_s=every_s)


def replay(folder: Path | str, *, fit: str = "none", model: str | None = None, gpu: str | None = None,
           gpus: int | None = None, blocks: int | None = None, constants: str | None = None,
           carried: tuple[float, str] | None = None, step_time: Linear | None = None) -> Replay:
    """Simulate a recorded run and compare.

    fit: "scalar" fits one factor on the step time so that FITTED come nearest (least squares of their relative errors):
    in-sample, as the result says. constants: whose of data/engine_rates.csv ("sheet": none, the data sheet alone);
    default: the run's own GPU. carried: a factor, and in words the run it was fitted on. step_time: one's own instead
    of the GPU's model; its device must be the run's GPU. model, gpu, gpus, blocks: where meta.json lacks them or is to
    be overruled; gpus is the number of all ranks, blocks of one replica.
    ValueError, KeyError: a folder that is no run, unknown fit, GPU, model or blocks.
    """
    if fit not in FITS:
        raise no_such("fit", fit, FITS)
    if fit == "scalar" and carried:
        raise ValueError("a factor is either fitted on this run or carried from another")
    case = _case(folder, model, gpu, gpus, blocks, constants, step_time)
    scale, name = 1.0, fit
    if fit == "scalar":
        scale = _fitted(case)
    elif carried:
        scale, name = carried[0], "carried"
    tick = _tick(case.run)
    done = case.simulated(scale, every_s=tick)
    return _replayed(case, done, name, scale, carried[1] if carried else "", tick)


def fitted_scale(folder: Path | str, **given) -> tuple[float, str]:
    """The factor fitted on a run, and the run in words: what `replay(…, carried=…)` takes. given: as for replay."""
    case = _case(folder, given.get("model"), given.get("gpu"), given.get("gpus"), given.get("blocks"),
                 given.get("constants"), given.get("step_time"))
    return _fitted(case), f"{case.setup.spec.name} on {case.setup.device}, {case.run.path.name}"


def explain(folder: Path | str, *, scale: float | None = None, **given) -> dict:
    """Errors with the blocks and the step time each modelled or true, and what each of the three parts adds.

    `rows`: blocks (true | modelled), step time (modelled | fitted), errors. `split` by statistic: blocks = modelled −
    true blocks, step time = modelled − fitted, scheduler = what is left with both true: order, batching and what one
    factor cannot mend. A step time fitted on this run is as true as one factor makes it. scale: that factor, where it
    has been fitted already. given: as for replay.
    """
    case = _case(folder, *(given.get(name) for name in ("model", "gpu", "gpus", "blocks", "constants", "step_time")))
    s, scale = case.setup, _fitted(case) if scale is None else scale
    true, why = (s.blocks, "") if s.blocks_kind != "capacity" else (None, "the run does not say its blocks")
    rows: list[dict] = []
    for blocks, number in (("true", true), ("modelled", s.modelled_blocks)):
        for kind, factor in (("modelled", 1.0), ("fitted", scale)):
            if number is not None:
                errors, *_ = _errors(case, case.simulated(factor, number))
                rows.append(dict(blocks=blocks, num_blocks=number, step_time=kind, scale=factor, errors=errors))
    by = {(row["blocks"], row["step_time"]): row["errors"] for row in rows}
    base = "true" if true is not None else "modelled"
    step = _minus(by.get((base, "modelled")), by.get((base, "fitted")))
    split = dict(blocks=_minus(by.get(("modelled", "modelled")), by.get(("true", "modelled"))), step_time=step,
                 scheduler=by.get((base, "fitted")))
    missing = why or (s.why_no_model if s.modelled_blocks is None else "")
    return dict(rows=rows, split=split, missing=missing, scale=scale)


def _minus(a: dict | None, b: dict | None) -> dict | None:
    if a is None or b is None:
        return None
    return {name: None if a[name] is None or b[name] is None else a[name] - b[name] for name in a}


def _case(folder, model, gpu, gpus, blocks, constants, step_time) -> _Case:
    run = read_run(folder)
    found = setup(run, model=model, gpu=gpu, gpus=gpus, blocks=blocks, measured=step_time is not None)
    if step_time is not None:
        if step_time.device != found.device:
            raise ValueError(f"the step time is of {step_time.device}, the run of {found.device}: a step time is not "
                             "carried to another device")
        return _Case(run, found, step_time)
    if found.gpu is None:
        raise ValueError(f"{found.device} is not in the catalogue: give its step time")
    of = chosen_rates(found.gpu.name, constants, nccl_only=found.nccl_only,
                      ranks=found.tp * (found.dp if found.lockstep else 1))
    stored = found.formats
    work = ranked(found.spec, tp=found.tp, dp=found.dp if found.lockstep else 1, kv_format=stored.kv_format,
                  itemsize=stored.itemsize)
    return _Case(run, found, parts(found.gpu, work, of, stored.multiplied))


def _tick(run: Run) -> float:
    t = run.series.get("t", [])
    gaps = sorted(b - a for a, b in zip(t, t[1:]) if b > a)
    return gaps[len(gaps) // 2] if gaps else 1.0


def _fitted(case: _Case) -> float:
    """The factor that brings FITTED nearest: bracketed by the end-to-end mean, then Brent's bounded search."""
    from scipy.optimize import minimize_scalar
    tried: dict[float, float] = {}              # logarithm of a factor -> its sum of squares

    def errors_at(log_scale: float) -> dict[str, float | None]:
        errors, *_ = _errors(case, case.simulated(math.exp(log_scale)))
        tried[log_scale] = sum(errors[name] ** 2 for name in FITTED if errors[name] is not None)
        return errors

    def misses(log_scale: float) -> float:
        if log_scale not in tried:
            errors_at(log_scale)
        return tried[log_scale]

    near = 0.0
    for _ in range(4):
        error = errors_at(near)["e2e_mean"]
        step = 0.0 if error is None else -math.log1p(error)
        if abs(step) < 0.02:
            break
        near = min(max(near + step, -math.log(_WIDEST)), math.log(_WIDEST))
    minimize_scalar(misses, bounds=(near - _FIT_WIDTH, near + _FIT_WIDTH), method="bounded",
                    options=dict(maxiter=_FIT_STEPS, xatol=5e-4))
    return math.exp(min(tried, key=tried.__getitem__))


def _statistics(times: dict[str, Sequence[float]], makespan: float) -> dict[str, float | None]:
    import numpy as np
    found: dict[str, float | None] = {"makespan": makespan}
    for name in MEASURES:
        values = times[name]
        found[f"{name}_mean"] = float(np.mean(values)) if values else None
        for p in STATISTICS[1:]:
            found[f"{name}_{p}"] = float(np.percentile(values, int(p[1:]))) if values else None
    return found


def _errors(case: _Case, done: Simulation) -> tuple[dict, dict, dict, int]:
    """Errors, real and simulated statistics, over the requests that both finished; and how many those are."""
    finished = {one.request.id: (one, one.last_token_s) for one in done.served if one.last_token_s is not None}
    both = [(row, row.first_s, row.last_s, *finished[row.id]) for row in case.run.requests
            if row.first_s is not None and row.last_s is not None and row.id in finished]
    if not both:
        first = next((one.rejected for one in done.served if one.rejected), "")
        raise ValueError(f"the simulated engine finished none of the run's requests{': ' + first if first else ''}")
    start = min(row.arrived_s for row in case.run.requests)
    real = _statistics(dict(ttft=[first - row.arrived_s for row, first, *_ in both],
                            e2e=[last - row.arrived_s for row, _, last, *_ in both],
                            tpot=[(last - first) / (row.output_tokens - 1) for row, first, last, *_ in both
                                  if row.output_tokens > 1]), max(last for _, _, last, *_ in both) - start)
    ours = _statistics({name: [value for _, _, _, one, _ in both if (value := getattr(one, f"{name}_s")) is not None]
                        for name in MEASURES}, max(ended for *_, ended in both) - start)
    errors = {name: None if not there or (value := ours[name]) is None else value / there - 1
              for name, there in real.items()}
    return errors, real, ours, len(both)


def _replayed(case: _Case, done: Simulation, fit: str, scale: float, carried: str, tick: float) -> Replay:
    errors, real, ours, count = _errors(case, done)
    s, model = case.setup, case.step_time
    left_out = dict(case.run.left_out)
    unfinished = sum(row.last_s is None for row in case.run.requests)
    if unfinished:
        left_out["not finished in the run (served here all the same)"] = unfinished
    rejected = [one for one in done.served if one.rejected]
    if rejected:
        left_out[f"rejected by the simulated engine, the first because {rejected[0].rejected}"] = len(rejected)
    constants = getattr(model, "rates", None)
    factor = {"none": "no factor", "scalar": f"× {scale:.4f}, fitted on this run itself: {', '.join(FITTED)} are "
              "in-sample", "carried": f"× {scale:.4f}, fitted on {carried}"}[fit]
    time = dict(kind=model.kind, device=model.device, source=f"{model.source}; {factor}",
                brief=f"{constants.brief if constants else model.source}; {factor}",
                constants=asdict(constants) if constants else None, in_sample=_in_sample(s, constants, fit))
    blocks = dict(value=s.blocks, kind="modelled" if s.blocks_kind == "capacity" else "quoted",
                  source=s.facts["blocks"].source, replicas=s.dp, modelled=s.modelled_blocks,
                  modelled_error=s.modelled_blocks / s.blocks - 1 if s.modelled_blocks and s.blocks_kind == "meta"
                  else None)
    return Replay(str(case.run.path), fit, errors, real, ours, scale, _series_mae(case.run, done, tick), blocks, time,
                  {name: asdict(fact) for name, fact in s.facts.items()}, count, left_out, done.preemptions, done.steps,
                  tuple(_notes(case)))


def _in_sample(s: Setup, constants: Rates | None, fit: str) -> str:
    """In words, what of the step time has seen this run."""
    seen = []
    if fit == "scalar":
        seen.append("the factor was fitted on this run")
    if constants and s.spec.name in constants.fitted_on:
        others = len(constants.fitted_on) - 1
        seen.append(f"the constants come from a run of {s.spec.name} on this GPU, perhaps this one"
                    + (f", and {others} of other models" if others else ""))
    return "; ".join(seen)


def _notes(case: _Case) -> list[str]:
    s, notes = case.setup, list(case.setup.notes)
    if case.run.clock == "queued_ts":
        notes.append("requests come when the engine queued them (queued_ts), up to a step late: their arrival_time is "
                     "missing or does not go with it")
    if s.config.prefix_caching:
        notes.append("the run's tokens are not recorded: prefixes that requests have in common are not found, only a "
                     "preempted request's own blocks")
    if s.spec.approximate:
        notes.append(s.spec.approximate)
    if s.why_no_model:
        notes.append(f"blocks were not modelled: {s.why_no_model}")
    return notes


def _series_mae(run: Run, done: Simulation, tick: float) -> dict[str, float | str]:
    """Mean absolute errors over the run's ticks; where a series says nothing, why."""
    if not run.series:
        return {}
    ours = {"running": 1, "waiting": 2, "kv_cache_pct": 4}      # columns of the simulator's timeline
    found: dict[str, float | str] = {}
    if run.series["t"][0] > 2 * done.makespan_s + tick:
        return {name: "its times do not count from the run's start" for name in ours if name in run.series}
    for name, column in ours.items():
        theirs = run.series.get(name)
        if theirs is None:
            continue
        if not any(theirs):
            found[name] = "0 in every row of the run"
            continue
        misses = []
        for t, value in zip(run.series["t"], theirs):
            place = round(t / tick) - 1
            sample = done.samples[place][column] if 0 <= place < len(done.samples) else 0.0
            misses.append(abs((100 * sample if name == "kv_cache_pct" else sample) - value))
        found[name] = sum(misses) / len(misses)
    return found
