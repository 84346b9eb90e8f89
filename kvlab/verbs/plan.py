"""kvlab plan: how many requests fit, which GPUs a load needs, the longest context; start-up logs against the model."""
from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

Gib = Annotated[float | None, typer.Option(help="Known better than the model does, in GiB of one GPU.")]


def command(
        model: Annotated[str | None, typer.Argument(help="A name from `kvlab ls models`, a config.json or its folder, "
                                                    "a .gguf file, or an id in the local Hugging Face cache.")] = None,
        gpu: Annotated[str | None, typer.Option(help="A name from `kvlab ls gpus`, such as H200.")] = None,
        gpus: Annotated[int, typer.Option(help="How many of them.")] = 1,
        tp: Annotated[int | None, typer.Option(help="GPUs of one replica; default: the least that fits.")] = None,
        max_len: Annotated[int | None, typer.Option(help="Tokens of one request; default: the model's context.")
                           ] = None,
        util: Annotated[float | None, typer.Option(help="vLLM's gpu_memory_utilization; default: 0.92, vLLM 0.32's.")
                        ] = None,
        max_num_seqs: Annotated[int | None, typer.Option(help="Default: vLLM's, by the GPU.")] = None,
        max_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of one step; default: vLLM's, by the GPU.")
                                      ] = None,
        block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
        kv_format: Annotated[str, typer.Option(help="A name from `kvlab ls formats`.")] = "bf16",
        prefix_share: Annotated[float, typer.Option(help="Leading share of every prompt, 0 to 1, that all live "
                                                    "requests have in common (of --max-len without --requests).")
                                ] = 0.0,
        requests: Annotated[Path | None, typer.Option(help="A trace of requests: concurrency at its lengths.")] = None,
        weights_gib: Annotated[float | None, typer.Option(help="Weights of all ranks together.")] = None,
        vram_gib: Gib = None, non_torch_gib: Gib = None, activation_gib: Gib = None,
        graphs_gib: Annotated[float | None, typer.Option(help="CUDA graphs; 0 before vLLM 0.21 or with --enforce-eager")
                              ] = None,
        pool_gib: Annotated[float | None, typer.Option(help="The KV pool of one GPU, as a log prints it.")] = None,
        blocks: Annotated[int | None, typer.Option(help="The pool in blocks, as a log prints it.")] = None,
        need: Annotated[int | None, typer.Option(help="Requests that must fit at once. Without --gpu: which GPUs hold "
                                                 "them; with --longest: the longest context for so many.")] = None,
        longest: Annotated[bool, typer.Option("--longest", help="The longest context that fits, instead of --max-len."
                                              )] = False,
        check_logs: Annotated[Path | None, typer.Option(help="A CSV of start-up facts to hold against the block model.")
                              ] = None,
        from_log: Annotated[Path | None, typer.Option(help="A start-up log to read.")] = None,
        download: Annotated[bool, typer.Option("--download", help="Fetch the config.json (nothing else) of an id that "
                                               "is not here.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> int | None:
    """How many requests a model holds on these GPUs, which GPUs a load needs, or the longest context that fits."""
    if check_logs or from_log:
        if model or (check_logs and from_log):
            raise ValueError("--check-logs and --from-log stand alone: give one of them, and no MODEL")
        return _check_logs(check_logs, as_json) if check_logs else _from_log(from_log, as_json)
    if model is None:
        raise ValueError("say which MODEL to plan for, or give --check-logs FILE or --from-log FILE")
    from kvlab.catalog.resolve import model as resolved
    from kvlab.serving.capacity import UTIL, Settings, gpus_for, plan
    spec = resolved(model, download=download)
    settings = Settings(tp, UTIL if util is None else util, max_num_seqs, max_batched_tokens, block_size, max_len,
                        kv_format, prefix_share, weights_gib, vram_gib, non_torch_gib, activation_gib, graphs_gib,
                        pool_gib, blocks)
    if longest:
        return _longest(spec, gpu, gpus, need or 1, settings, as_json)
    if need is not None:
        if gpu is not None:
            raise ValueError("--need asks which GPUs hold so many requests: leave --gpu out, or add --longest")
        found = gpus_for(spec, need, settings)
        if as_json:
            return _print_json([asdict(one) for one in found])
        from kvlab.show_serving import print_gpu_options
        return print_gpu_options(spec.name, need, settings, found)
    if gpu is None:
        raise ValueError("say which --gpu, or how many requests it must hold with --need")
    found = plan(spec, gpu, gpus, settings, _lengths(requests))
    if as_json:
        _print_json(asdict(found))
    else:
        from kvlab.show_serving import print_plan
        print_plan(found)
    return 0 if found.starts else 1


def _print_json(data) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _lengths(trace: Path | None) -> list[tuple[int, int]]:
    if trace is None:
        return []
    from kvlab.serving.traces import read_trace
    return [(one.prompt_tokens, one.output_tokens) for one in read_trace(trace)]


def _longest(spec, gpu: str | None, gpus: int, need: int, settings, as_json: bool) -> int:
    from kvlab.serving.capacity import longest_context
    from kvlab.show import printable
    if gpu is None:
        raise ValueError("--longest needs the --gpu")
    if settings.max_len is not None:
        raise ValueError("--longest finds the length that --max-len sets; give one of them")
    tokens = longest_context(spec, gpu, gpus, need, settings)
    bound = tokens == spec.context
    if as_json:
        _print_json(dict(model=spec.name, gpu=gpu, gpus=gpus, need=need, max_len=tokens, bound_by_context=bound,
                         kind="modelled"))
    else:
        many = f"{need:,} request{'s' * (need != 1)}"
        print(printable(f"{spec.name} on {gpus} × {gpu}: {many} of up to {tokens:,} tokens fit at once"
                        + (", the model's whole context" if bound else "") + " (modelled)" if tokens else
                        f"{spec.name} on {gpus} × {gpu}: {many} do not fit at any length"))
    return 0 if tokens else 1


def _check_logs(path: Path, as_json: bool) -> None:
    from kvlab.serving.server_logs import check, summary
    rows = check(path)
    if as_json:
        return _print_json(rows)
    from kvlab.show_serving import print_log_rows
    print_log_rows(rows, summary(rows))


def _from_log(path: Path, as_json: bool) -> None:
    from kvlab.serving.server_logs import check
    from kvlab.serving.startup_log import from_log
    row = from_log(path)
    (judged,) = check([row])
    if as_json:
        return _print_json({**row, "check": judged})
    from kvlab.show_serving import print_startup_log
    print_startup_log(row, judged)
