"""kvlab plan: how many requests fit, which GPUs a load needs, the longest context; start-up logs against the "
"model."""
from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvlab.verbs._complete import names
from kvlab.verbs._help import verb
from kvlab.verbs._options import beside, print_json

HELP = verb("kvlab plan Qwen/Qwen2-72B --gpu H200 --gpus 4 --max-len 8192",
            "kvlab plan Qwen/Qwen2-72B --need 64 --max-len 8192", "kvlab plan --from-log server.log --gpu H200",
            The_question="gpu gpus need longest max_len requests prefix_share",
            How_the_engine_is_started="tp util max_num_seqs max_batched_tokens block_size kv_format",
            Known_better_than_the_model_does="weights_gib weight_bits vram_gib non_torch_gib activation_gib graphs_gib "
                                            "pool_gib blocks",
            Logs_of_a_start="from_log check_logs", Output="download as_json help")



def command(
        model: Annotated[str | None, typer.Argument(autocompletion=names("models"), help="A name from `kvlab ls "
                                                    "models`, a config.json or its folder, a .gguf file, or an id in "
                                                    "the local Hugging Face cache.")] = None,
        gpu: Annotated[str | None, typer.Option(autocompletion=names("gpus"), help="A name from `kvlab ls gpus`, "
                                                "such as H200.")] = None,
        gpus: Annotated[int | None, typer.Option(help="How many of them; default: 1, with --need the fewest of 1, 2, "
                                                 "4, 8.")] = None,
        tp: Annotated[int | None, typer.Option(help="GPUs of one replica; default: the least that fits.")] = None,
        max_len: Annotated[int | None, typer.Option(help="Tokens of one request; default: the model's "
                                                    "context.")] = None,
        util: Annotated[float | None, typer.Option(help="vLLM's gpu_memory_utilization; default: 0.92, vLLM "
                                                   "0.32's.")] = None,
        max_num_seqs: Annotated[int | None, typer.Option(help="Requests at once; default: vLLM's, by the "
                                                         "GPU.")] = None,
        max_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of one step; default: vLLM's, by the "
                                                               "GPU.")] = None,
        block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
        kv_format: Annotated[str, typer.Option(autocompletion=names("formats"), help="A name from `kvlab ls "
                                               "formats`.")] = "bf16",
        prefix_share: Annotated[float, typer.Option(help="Leading share of every prompt, 0 to 1, that all live "
                                                    "requests have in common (of --max-len without "
                                                    "--requests).")] = 0.0,
        requests: Annotated[Path | None, typer.Option(help="A trace of requests: concurrency at its "
                                                      "lengths.")] = None,
        weights_gib: Annotated[float | None, typer.Option(help="GiB of the weights of all ranks together.")] = None,
        weight_bits: Annotated[int | None, typer.Option(help="4, 8 or 16 for each parameter, of a quantised "
                                                        "checkpoint (AWQ, GPTQ, FP8, MXFP4) instead of "
                                                        "--weights-gib.")] = None,
        vram_gib: Annotated[float | None, typer.Option(help="GiB of memory of one GPU.")] = None,
        non_torch_gib: Annotated[float | None, typer.Option(help="GiB that CUDA and NCCL hold outside torch on one "
                                                            "GPU.")] = None,
        activation_gib: Annotated[float | None, typer.Option(help="GiB of activations at their peak on one "
                                                             "GPU.")] = None,
        graphs_gib: Annotated[float | None, typer.Option(help="GiB of CUDA graphs; 0 before vLLM 0.21 or with "
                                                         "--enforce-eager.")] = None,
        pool_gib: Annotated[float | None, typer.Option(help="GiB of the KV pool of one GPU, as a log prints "
                                                       "it.")] = None,
        blocks: Annotated[int | None, typer.Option(help="The pool in blocks, as a log prints it.")] = None,
        need: Annotated[int | None, typer.Option(help="Requests that must fit at once. Without --gpu: which GPUs "
                                                 "hold them; with --longest: the longest context for so "
                                                 "many.")] = None,
        longest: Annotated[bool, typer.Option("--longest", help="The longest context that fits, instead of "
                                              "--max-len.")] = False,
        check_logs: Annotated[Path | None, typer.Option(help="A CSV of start-up facts to hold against the block "
                                                        "model.")] = None,
        from_log: Annotated[Path | None, typer.Option(help="A start-up log to read; with MODEL where it names none; "
                                                      "with --gpu (and --max-len) what fits in its pool.")] = None,
        download: Annotated[bool, typer.Option("--download", help="Fetch the config.json (nothing else) of an id "
                                               "that is not here.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> int | None:
    """How many requests fit on GPUs, which GPUs a load needs, or the longest context.

    Exit code: 0 if it fits, 1 if it does not fit or does not start, 2 for wrong use.
    """
    given = dict(locals())
    if check_logs:
        _refuse_others(given, "check_logs", "as_json")
        return _check_logs(check_logs, as_json)
    if from_log:
        _refuse_others(given, "from_log", "model", "gpu", "max_len", "download", "as_json")
        return _from_log(from_log, model, gpu, max_len, download, as_json)
    if model is None:
        raise ValueError("say which MODEL to plan for, or give --check-logs FILE or --from-log FILE")
    from kvlab.catalog.resolve import model as resolved
    from kvlab.serving.capacity import UTIL, DoesNotFit, Settings, plan
    spec = resolved(model, download=download)
    settings = Settings(
        tp=tp, util=UTIL if util is None else util, max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens,
        block_size=block_size, max_len=max_len, kv_format=kv_format, prefix_share=prefix_share, weights_gib=weights_gib,
        weight_bits=weight_bits, vram_gib=vram_gib, non_torch_gib=non_torch_gib, activation_gib=activation_gib,
        graphs_gib=graphs_gib, pool_gib=pool_gib, blocks=blocks)
    if requests and (longest or need is not None):
        raise ValueError("--need and --longest are about requests of one length and would not look at --requests: set "
                         "--max-len, or leave them out to see what fits at the trace's lengths")
    if longest:
        return _longest(spec, gpu, 1 if gpus is None else gpus, 1 if need is None else need, settings, as_json)
    if need is not None:
        return _need(spec, gpu, gpus, need, settings, as_json)
    if gpu is None:
        raise ValueError("say which --gpu, or how many requests it must hold with --need")
    try:
        found = plan(spec, gpu, 1 if gpus is None else gpus, settings, _lengths(requests))
    except DoesNotFit as no:
        return _no(spec.name, str(no), as_json)
    return _show(found, as_json)


def _show(found, as_json: bool) -> int:
    if as_json:
        print_json(asdict(found))
    else:
        from kvlab.show_serving import print_plan
        print_plan(found)
    return 0 if found.starts else 1


def _no(name: str, why: str, as_json: bool) -> int:
    """The answer to a fair question is no: one sentence, or as JSON."""
    from kvlab.show import printable
    if as_json:
        print_json(dict(model=name, starts=False, why=why))
    else:
        print(printable(f"{name} {why}"))
    return 1


def _refuse_others(given: dict, *names: str) -> None:
    """Options beside these that were set, and would not be looked at."""
    wrong = beside(command, given, *names)
    if wrong:
        raise ValueError(f"{', '.join(wrong)} cannot be set with --{names[0].replace('_', '-')}: leave "
                         f"{'them' if len(wrong) > 1 else 'it'} out")


def _need(spec, gpu: str | None, gpus: int | None, need: int, settings, as_json: bool) -> int:
    from kvlab.serving.capacity import COUNTS, gpus_for
    if gpu is not None:
        raise ValueError("--need asks which GPUs hold so many requests: leave --gpu out, or add --longest")
    counts = COUNTS if gpus is None else (gpus,)
    found = gpus_for(spec, need, settings, counts)
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        from kvlab.show_serving import print_gpu_options
        print_gpu_options(spec.name, need, settings, counts, found)
    return 0 if found else 1


def _lengths(trace: Path | None) -> list[tuple[int, int]]:
    if trace is None:
        return []
    from kvlab.serving.traces import read_trace
    return [(one.prompt_tokens, one.output_tokens) for one in read_trace(trace)]


def _longest(spec, gpu: str | None, gpus: int, need: int, settings, as_json: bool) -> int:
    from kvlab.serving.capacity import longest_option
    from kvlab.show import printable
    if gpu is None:
        raise ValueError("--longest needs the --gpu")
    if settings.max_len is not None:
        raise ValueError("--longest finds the length that --max-len sets; give one of them")
    tokens, reached = longest_option(spec, gpu, gpus, need, settings)
    bound, tp = tokens == spec.context, reached.tp if reached else settings.tp
    if as_json:
        print_json(dict(model=spec.name, gpu=gpu, gpus=gpus, tp=tp, need=need, max_len=tokens, bound_by_context=bound,
                         kind="modelled"))
    else:
        many = f"{need:,} request{'s' * (need != 1)}"
        print(printable(f"{spec.name} on {gpus} × {gpu}: {many} of up to {tokens:,} tokens fit at once with tp {tp}"
                        + (", the model's whole context" if bound else "") + " (modelled)" if tokens else
                        f"{spec.name} on {gpus} × {gpu}: {many} do not fit at any length"))
    return 0 if tokens else 1


def _check_logs(path: Path, as_json: bool) -> None:
    from kvlab.serving.server_logs import check, summary
    rows = check(path)
    if as_json:
        return print_json(rows)
    from kvlab.show_serving import print_log_rows
    print_log_rows(rows, summary(rows))


def _from_log(path: Path, model: str | None, gpu: str | None, max_len: int | None, download: bool, as_json: bool
              ) -> int | None:
    """What the log says, the block model's verdict, and a plan with its pool: with --gpu, else the command for it."""
    from kvlab.serving._log_plan import logged_pool
    from kvlab.serving.server_logs import check
    from kvlab.serving.startup_log import from_log
    row, spec, found = from_log(path), None, None
    if model is not None:
        from kvlab.catalog.resolve import model as resolved
        spec = resolved(model, download=download)
        row |= dict(model=spec.name)
        row["lines"].pop("model", None)
    (judged,) = check([row], spec)
    pool = logged_pool(row, spec)
    why_not, command_line = pool.why_not, None if gpu or not pool.settings else pool.command()
    if gpu and pool.settings:
        from kvlab.serving.capacity import DoesNotFit
        try:
            found = _plan_of(pool, gpu, max_len)
        except DoesNotFit as no:
            why_not = str(no)
    code = 1 if gpu and pool.settings and not (found and found.starts) else None
    if as_json:
        print_json({**row, "check": judged, "plan": found and asdict(found), "plan_command": command_line,
                     "no_plan": why_not})
        return code
    from kvlab.show import printable
    from kvlab.show_serving import print_plan, print_startup_log
    print_startup_log(row, judged)
    if found:
        print("what fits in this pool:")
        print_plan(found)
    elif command_line:
        print(printable(f"what fits in this pool: {command_line}   (GPU: a name from `kvlab ls gpus`)"))
    elif gpu or model:
        print(printable(f"no plan: {why_not}"))
    return code


def _plan_of(pool, gpu: str, max_len: int | None):
    from dataclasses import replace

    from kvlab.serving.capacity import plan
    settings = pool.settings if max_len is None else replace(pool.settings, max_len=max_len)
    return plan(pool.spec, gpu, settings.tp, settings)
