"""kvlab simulate: an engine on a simulated clock, under a trace or a workload; or a recorded run, served again."""
from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvlab.verbs._complete import names, words
from kvlab.verbs._help import verb
from kvlab.verbs._options import beside, print_json, seconds

HELP = verb("kvlab simulate Qwen/Qwen2.5-7B --gpu H200 --rate 8",
            "kvlab simulate Qwen/Qwen2.5-7B --gpu H200 --find-rate --ttft-p99 2s --tpot-p99 50ms",
            "kvlab simulate --replay recorded-run --fit scalar",
            Machine="gpu gpus tp kernels constants blocks util kv_format weights_gib weight_bits",
            Requests="requests count rate skip_bad seed", The_highest_rate="find_rate ttft_p99 tpot_p99",
            Scheduler="policy admission batching max_num_seqs max_batched_tokens max_len block_size prefix_caching "
                      "async_scheduling watermark aging short_threshold",
            A_recorded_run="replay fit scale_from scale_gpu", Output="explain trace metrics out as_json help")


def command(
        model: Annotated[str | None, typer.Argument(autocompletion=names("models"), help="A name from `kvlab ls "
                                                    "models`, a config.json or its folder, a .gguf file; with "
                                                    "--replay: where the run does not say it.")] = None,
        replay: Annotated[Path | None, typer.Option(help="The folder of a recorded run: meta.json, requests.jsonl "
                                                    "and timeseries.csv.")] = None,
        gpu: Annotated[str | None, typer.Option(autocompletion=names("gpus"), help="A name from `kvlab ls gpus`, "
                                                "such as H200.")] = None,
        gpus: Annotated[int | None, typer.Option(help="How many of them in all.")] = None,
        blocks: Annotated[int | None, typer.Option(help="Blocks of one replica, as its log prints them, or the sum "
                                                   "over a run's replicas, as meta.json has it; default: the run's "
                                                   "own, else those of `kvlab plan`.")] = None,
        constants: Annotated[str | None, typer.Option(help="Whose step-time constants: a GPU of "
                                                      "data/engine_rates.csv, or sheet for the data sheet alone; "
                                                      "default: the GPU's own.")] = None,
        fit: Annotated[str, typer.Option(autocompletion=words("none", "scalar"), help="none, or scalar: one factor "
                                         "on the step time, fitted on this very run.")] = "none",
        scale_from: Annotated[Path | None, typer.Option(help="Fit the factor on this run instead, and carry it "
                                                        "over.")] = None,
        scale_gpu: Annotated[str | None, typer.Option(help="The GPU of --scale-from, where its meta.json lacks "
                                                      "it.")] = None,
        explain: Annotated[bool, typer.Option("--explain", help="Say in full where the step time comes from; with "
                                              "--replay: split the error into block count, step time and scheduler "
                                              "by swapping each for the true one.")] = False,
        requests: Annotated[str, typer.Option(autocompletion=names("workloads"), help="The file of a trace, or a "
                                              "workload of data/workloads.csv.")] = "azure_2023_conv",
        count: Annotated[int | None, typer.Option(help="At most so many requests; default: the whole trace, 1,000 of "
                                                  "a workload.")] = None,
        rate: Annotated[float | None, typer.Option(help="Mean arrivals per second; default: the trace's "
                                                   "own.")] = None,
        skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave a trace's bad lines out instead of refusing "
                                               "it.")] = False,
        find_rate: Annotated[bool, typer.Option("--find-rate", help="The highest rate that keeps the limits below, "
                                                "by bisection; all else is said of that rate.")] = False,
        ttft_p99: Annotated[str | None, typer.Option(help="Limit of --find-rate, such as 2s or 500ms.")] = None,
        tpot_p99: Annotated[str | None, typer.Option(help="Limit of --find-rate, such as 50ms.")] = None,
        seed: Annotated[int, typer.Option(help="Of a workload's draws.")] = 0,
        tp: Annotated[int | None, typer.Option(help="GPUs of one replica; default: the least that fits.")] = None,
        kernels: Annotated[Path | None, typer.Option(help="Step time from what a kvlab run measured on its own "
                                                     "machine: its readings.parquet; instead of --gpu.")] = None,
        util: Annotated[float | None, typer.Option(help="vLLM's gpu_memory_utilization; default: 0.92, vLLM "
                                                   "0.32's.")] = None,
        kv_format: Annotated[str, typer.Option(autocompletion=names("formats"), help="A name from `kvlab ls "
                                               "formats`.")] = "bf16",
        weights_gib: Annotated[float | None, typer.Option(help="GiB of the weights of all ranks together, such as "
                                                          "quantised ones.")] = None,
        weight_bits: Annotated[int | None, typer.Option(help="4, 8 or 16 of every parameter, instead of "
                                                        "--weights-gib.")] = None,
        policy: Annotated[str, typer.Option(autocompletion=words("fcfs", "priority", "short_first", "shortest_prefill"),
                                            help="fcfs, priority, short_first or shortest_prefill.")] = "fcfs",
        admission: Annotated[str, typer.Option(autocompletion=words("full_prompt", "first_chunk", "worst_case"),
                                               help="full_prompt, first_chunk or worst_case.")] = "full_prompt",
        batching: Annotated[str, typer.Option(autocompletion=words("continuous", "static"), help="continuous or "
                                              "static.")] = "continuous",
        max_num_seqs: Annotated[int | None, typer.Option(help="Requests at once; default: vLLM's, by the "
                                                         "GPU.")] = None,
        max_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of one step; default: vLLM's, by the "
                                                               "GPU.")] = None,
        max_len: Annotated[int | None, typer.Option(help="Longest prompt and output; default: no limit.")] = None,
        block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
        prefix_caching: Annotated[bool, typer.Option(help="Find full blocks again by their hash.")] = True,
        async_scheduling: Annotated[bool, typer.Option(help="Plan a step while the one before it computes.")] = False,
        watermark: Annotated[float, typer.Option(help="Share of the pool that stays free at admission.")] = 0.0,
        aging: Annotated[float | None, typer.Option(help="Seconds of waiting that count as a step up; default: none "
                                                    "ever does.")] = None,
        short_threshold: Annotated[int, typer.Option(help="Tokens below which short_first prefers a request.")] = 512,
        trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, .json or .json.gz.")] = None,
        metrics: Annotated[Path | None, typer.Option(help="Write the last state as Prometheus would scrape "
                                                     "it.")] = None,
        out: Annotated[Path | None, typer.Option(help="Write one row per request, .csv or .parquet.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> int | None:
    """How long requests wait and take on a simulated engine; or a recorded run, replayed.

    With --replay, how far the simulated times are from those of the run.
    """
    given = dict(locals())
    if replay is not None:
        if kernels:
            raise ValueError("--kernels are of the machine that measured them; a run on another device is not replayed "
                             "with them")
        _refuse_others(given, "replay", "model", "gpu", "gpus", "blocks", "constants", "fit", "scale_from", "scale_gpu",
                       "explain", "as_json")
        return _replay(replay, model, gpu, gpus, blocks, constants, fit, scale_from, scale_gpu, explain, as_json)
    if fit != "none" or scale_from or scale_gpu:
        raise ValueError("--fit, --scale-from and --scale-gpu compare with a recorded run: give it with --replay")
    limits = _limits(find_rate, rate, ttft_p99=ttft_p99, tpot_p99=tpot_p99)
    if model is None:
        raise ValueError("say which MODEL to simulate, or give a recorded run with --replay")
    if kernels and (gpu or constants):
        raise ValueError("--kernels are timings of their own machine and are not carried to another: leave --gpu out")
    if not (kernels or gpu):
        raise ValueError("say on which --gpu, or give timings of this machine with --kernels")
    from kvlab.catalog.resolve import model as resolved
    from kvlab.serving.capacity import UTIL, Settings
    from kvlab.serving.deployment import deployment, measured_deployment, requests_of
    from kvlab.serving.gantt import Gantt
    from kvlab.serving.scheduler import SchedulerConfig
    from kvlab.serving.simulator import simulate
    spec = resolved(model)
    if kernels:
        if blocks is None:
            raise ValueError("--kernels needs --blocks: the pool of that machine is not modelled")
        if kv_format != "bf16" or (util, weights_gib, weight_bits) != (None, None, None):
            raise ValueError("--util, --weights-gib, --weight-bits and --kv-format are of a modelled GPU: leave them "
                             "out with --kernels")
        found = measured_deployment(spec, kernels, blocks)
    else:
        settings = Settings(util=UTIL if util is None else util, max_num_seqs=max_num_seqs, block_size=block_size,
                            max_batched_tokens=max_batched_tokens, max_len=max_len, kv_format=kv_format,
                            weights_gib=weights_gib, weight_bits=weight_bits)
        found = deployment(spec, gpu, gpus or 1, tp=tp, blocks=blocks, constants=constants, settings=settings)
    config = SchedulerConfig(
        max_num_seqs=found.max_num_seqs if max_num_seqs is None else max_num_seqs, policy=policy,
        admission=admission, batching=batching, async_scheduling=async_scheduling, prefix_caching=prefix_caching,
        max_num_batched_tokens=found.max_num_batched_tokens if max_batched_tokens is None else max_batched_tokens,
        watermark=watermark, aging_s=aging, short_threshold=short_threshold, max_model_len=max_len)
    _refuse_unwritable(trace=trace, metrics=metrics, out=out)

    def simulated(at: float | None, **told):
        """The simulation at a rate, and what the trace left out."""
        try:
            taken, file = requests_of(requests, count, at, seed, "skip" if skip_bad else "refuse")
            done = simulate(taken, config, num_blocks=found.blocks, block_size=block_size, step_time=found.step_time,
                            replicas=found.replicas, **told)
        except ValueError as error:                         # the reader's sentence is for Python
            raise ValueError(str(error).replace('read with bad="skip"', "give --skip-bad")) from error
        return done, file.note() if file else ""

    searched = None
    if limits:
        from kvlab.serving.find_rate import find_rate as highest
        searched = highest(lambda at: simulated(at, every_s=None)[0], limits)
        rate = searched.rate
    gantt = Gantt() if trace else None
    done, left_out = simulated(rate, on_step=gantt)
    written = _written(done, spec.name, gantt, trace, metrics, out)
    about = dict(model=spec.name, requests=requests, replicas=found.replicas, tp=found.tp, left_out=left_out,
                 blocks=dict(value=found.blocks, kind=found.blocks_kind, source=found.blocks_source),
                 step_time=dict(kind=found.step_time.kind, device=found.step_time.device,
                                source=found.step_time.source, brief=found.step_time.rates.brief,
                                in_sample=spec.name in found.step_time.rates.fitted_on,
                                constants=asdict(found.step_time.rates)),
                 scheduler=asdict(config), written=written)
    if searched:
        about["find_rate"] = dict(asdict(searched), kind="simulated", limits=limits)
    first = next((one.rejected for one in done.served if one.rejected), "")
    if as_json:
        print_json(dict(summary=done.summary(), first_rejected=first, **about))
    else:
        from kvlab.verbs._simulate_table import print_simulation
        print_simulation(done.summary(), about, first, explain)
    return None if done.finished else 1


def _limits(find: bool, rate: float | None, **given: str | None) -> dict[str, float]:
    """The limits of --find-rate in seconds, by the statistic's name in a summary; {} without it."""
    limits = {f"{name}_s": seconds(f"--{name.replace('_', '-')}", text) for name, text in given.items() if text}
    if find != bool(limits):
        raise ValueError("--find-rate needs a limit, such as --ttft-p99 2s" if find else
                         "--ttft-p99 and --tpot-p99 are limits of --find-rate: give that too")
    if find and rate is not None:
        raise ValueError("--find-rate finds the rate that --rate sets; give one of them")
    return limits


def _refuse_others(given: dict, *names: str) -> None:
    """Options beside these that were set, and would not be looked at."""
    wrong = beside(command, given, *names)
    if wrong:
        raise ValueError(f"{', '.join(wrong)} cannot be set with --replay: a recorded run has its own requests and "
                         "settings")


def _refuse_unwritable(**files: Path | None) -> None:
    """Before a long simulation rather than after it."""
    for name, path in files.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"--{name} {path}: " + ("that is a folder" if path.is_dir() else
                                                     f"there is no folder {path.parent}"))
    for name, ends in (("out", (".csv", ".parquet")), ("trace", (".json", ".json.gz"))):
        if files[name] is not None and not files[name].name.endswith(ends):
            raise ValueError(f"--{name} {files[name]}: give a name that ends in {' or '.join(ends)}")


def _written(done, name: str, gantt, trace: Path | None, metrics: Path | None, out: Path | None) -> list[str]:
    try:
        return _write(done, name, gantt, trace, metrics, out)
    except OSError as error:
        raise ValueError(f"{error.filename or 'a file'} cannot be written: {error.strerror or error}") from error


def _write(done, name: str, gantt, trace: Path | None, metrics: Path | None, out: Path | None) -> list[str]:
    if gantt is not None:
        gantt.write(trace)
    if metrics is not None:
        from kvlab.serving.exposition import Exposition
        metrics.write_text(Exposition(done.timeline(), done.served, model=name, num_blocks=done.num_blocks
                                      * done.replicas, block_size=done.block_size).text(), encoding="utf-8")
    if out is not None:
        table = done.requests()
        table.to_csv(out, index=False) if out.suffix == ".csv" else table.to_parquet(out, index=False)
    return [str(path) for path in (trace, metrics, out) if path is not None]


def _replay(folder, model, gpu, gpus, blocks, constants, fit, scale_from, scale_gpu, split, as_json) -> None:
    from kvlab.serving.replay import explain, fitted_scale, replay
    if scale_gpu and not scale_from:
        raise ValueError("--scale-gpu says the GPU of --scale-from: give that too")
    given = dict(model=model, gpu=gpu, gpus=gpus, blocks=blocks, constants=constants)
    if fit != "none" or scale_from or split:
        print("kvlab: fitting a factor on the step time: the run is simulated about 15 times …", file=sys.stderr)
    carried = fitted_scale(scale_from, gpu=scale_gpu, constants=constants) if scale_from else None
    found = replay(folder, fit=fit, carried=carried, **given)
    parts = explain(folder, scale=found.scale if fit == "scalar" else None, **given) if split else None
    if as_json:
        return print_json(asdict(found) | (dict(explain=parts) if parts else {}))
    from kvlab.verbs._simulate_table import print_explanation, print_replay
    print_replay(found, split)
    if parts:
        print_explanation(parts)
