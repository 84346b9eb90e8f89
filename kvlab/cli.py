"""The command kvlab. Every verb is a thin call; nothing heavy is imported before it is needed.

Exit codes: 0 all well, 1 some row failed (missing is no failure), 2 wrong use.
"""
from __future__ import annotations

import json
import signal
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from kvlab.registry import Registry
from kvlab.units import display
from kvlab.verbs._complete import names, words
from kvlab.verbs._help import COLUMNS, Verbs, verb
from kvlab.verbs._options import results

app = typer.Typer(cls=Verbs, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
                  context_settings=COLUMNS,
                  help="A laboratory for the KV cache: every number with where it came from.",
                  epilog="Help of a verb, with examples: kvlab VERB --help")
LONGEST = 1000                      # characters of an error
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Also = Annotated[list[str] | None, typer.Option("--also", metavar="PROBE", autocompletion=names("probes"), help="A "
                                                "further probe of `kvlab ls probes`, such as ncu or callgrind; may "
                                                "be given several times.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=words("cpu", "cuda"))]
Tune = Annotated[bool, typer.Option(" /--no-tune", show_default=False, help="Keep a kernel's default configuration: "
                                    "choose none by measuring.")]


def main() -> None:
    """Run the command line; what the user got wrong is one sentence and exit code 2, never a traceback."""
    if sys.argv[1:] == ["--version"]:
        from kvlab import __version__
        sys.exit(print(f"kvlab {__version__}"))
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # `kill`, `timeout` and containers end it as Ctrl-C
    try:
        code = app(standalone_mode=False)
        if code == 130:                                     # typer's word for Ctrl-C
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("kvlab: interrupted", file=sys.stderr)
        code = 130
    except (ValueError, KeyError, OSError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"cannot read or write {error.filename}: {error.strerror}"
        _say(str(text))
        code = 2
    except MemoryError:
        _say("this machine has no memory left for it; what was committed is kept. Free some, or take a smaller --size")
        code = 1
    except Exception as error:
        if not hasattr(error, "format_message"):         # not one of the command-line library's own usage errors
            raise
        _say(error.format_message(), " (see kvlab --help)")
        code = 2
    sys.exit(code or 0)


def _say(text: str, more: str = "") -> None:
    """One sentence on stderr, without credentials and control characters; a file's content may be in it, so cut."""
    from kvlab.hushed import hushed
    from kvlab.show import printable
    print(f"kvlab: {printable(hushed(text[:4 * LONGEST]))[:LONGEST]}{more}", file=sys.stderr)


def _print_json(data) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


@app.command(cls=verb("kvlab size Qwen/Qwen2-72B --kv-len 32768 --batch 16 --tp 8",
                      "kvlab size meta-llama/Llama-3.1-8B --kv-len 131072 --kv-format fp8_e4m3 --json"))
def size(model: Annotated[str, typer.Argument(autocompletion=names("models"), help="A name from `kvlab ls models`, a "
                                              "config.json or its folder, a .gguf file, or an id in the local "
                                              "Hugging Face cache.")],
         kv_len: Annotated[int, typer.Option(help="Cached tokens per sequence.")],
         batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
         kv_format: Annotated[str, typer.Option(help="A name from `kvlab ls formats`.",
                                                autocompletion=names("formats"))] = "bf16",
         tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; bytes are also said of one.")] = 1,
         download: Annotated[bool, typer.Option("--download", help="Fetch the config.json (nothing else) of an id "
                                                "that is not here.")] = False, as_json: Json = False) -> None:
    """Exact bytes of a model's KV cache, layer kind by layer kind."""
    from kvlab.catalog.models import models
    from kvlab.catalog.resolve import model as resolved
    from kvlab.kv.sizing import size as size_of
    from kvlab.show import print_size, printable
    spec = resolved(model, download=download)
    found = size_of(spec, kv_len, batch, kv_format, tp)
    if spec.context and kv_len > spec.context:
        source = "the catalogue" if spec.name in models() else "its file"
        print(f"kvlab: warning: kv_len {kv_len:,} is beyond the {spec.context:,} tokens of context that {source} gives "
              f"for {printable(spec.name)}", file=sys.stderr)
    if as_json:
        return _print_json(asdict(found))
    print_size(spec, found)


@app.command(cls=verb("kvlab ls models", "kvlab ls variants --json", "kvlab ls runs"))
def ls(what: Annotated[str, typer.Argument(autocompletion=names("lists"), help="models, gpus, engines, variants, "
                                           "formats, probes, studies, figures, metrics, texts, runs.")] = "",
       out: Annotated[str, typer.Option(help="Of runs: the folder with <study>/<run> in it.")] = "profiles",
       as_json: Json = False) -> None:
    """List what kvlab knows, the runs made here, and why a variant or a probe cannot run here."""
    from kvlab.listing import LISTS, brief
    from kvlab.registry import no_such
    from kvlab.show import print_list
    if not what:
        raise ValueError(f"say what to list: {', '.join(LISTS)}")
    if what not in LISTS:
        raise no_such("list", what, LISTS)
    rows = list(LISTS[what](out) if what == "runs" else LISTS[what]())
    if as_json:
        return _print_json(rows)
    if not rows:
        return print(f"there are no {what} here")
    print_list(brief(rows))
    for row in rows:
        if said := row.get("problem"):
            _say(said)


@app.command(cls=verb("kvlab measure --variant sdpa --kv-len 4096",
                      "kvlab measure --variant paged --kv-len 4096 --batch 16 --kv-format int8/token --json",
                      Shape="kv_len q_len batch q_heads kv_heads head_dim window shared_prefix latent",
                      Cache="kv_format block_size page_order",
                      How_it_is_run="variant device dtype threads seed data tune also", Output="trace as_json help"))
def measure(variant: Annotated[str, typer.Option(autocompletion=names("variants"), help="A name from `kvlab ls "
                                                 "variants`, or path/to/file.py:Class.")],
            kv_len: Annotated[int, typer.Option(help="Cached tokens per sequence, new ones included.")],
            q_heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
            kv_heads: Annotated[int, typer.Option(help="KV heads; a divisor of the query heads.")] = 8,
            head_dim: Annotated[int, typer.Option(help="Elements of a head of K and V.")] = 128,
            batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
            q_len: Annotated[int, typer.Option(help="New tokens per sequence; 1 = decode.")] = 1,
            window: Annotated[int | None, typer.Option(help="Sliding window in tokens.")] = None,
            shared_prefix: Annotated[int, typer.Option(help="Leading tokens that all sequences have in common, "
                                                       "stored once; a multiple of the block size.")] = 0,
            latent: Annotated[int | None, typer.Option(help="Absorbed MLA: V is the first so many channels of K; "
                                                       "needs --kv-heads 1.")] = None,
            kv_format: Annotated[str | None, typer.Option(autocompletion=names("formats"), help="A name from `kvlab "
                                                          "ls formats`; default: the dtype.")] = None,
            block_size: Annotated[int | None, typer.Option(help="Tokens per block; default: the variant's.")] = None,
            page_order: Annotated[str | None, typer.Option(autocompletion=words("in_order", "random"),
                                                           help="in_order or random; default: the "
                                                           "variant's.")] = None,
            dtype: Annotated[str | None, typer.Option(autocompletion=words("fp32", "bf16", "fp16"), help="Of q and "
                                                      "the output: fp32 (cpu's default), bf16 (cuda's) or "
                                                      "fp16.")] = None,
            device: Device = "cpu",
            threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
            seed: Annotated[int, typer.Option(help="Of the random tensors.")] = 0,
            data: Annotated[str, typer.Option(help="gaussian, outlier, or the path (or file:SHA256) of tensors that "
                                              "kvlab.capture wrote.")] = "gaussian",
            trace: Annotated[Path | None, typer.Option(help="Folder for an operator trace, by torch's profiler in a "
                                                       "pass of its own.")] = None,
            tune: Tune = True, also: Also = None, as_json: Json = False) -> int:
    """Measure one attention call under every probe: each number with its kind."""
    from kvlab.attention import Comparison, trial
    from kvlab.shapes import AttentionShape, Workload
    from kvlab.studies._run import Job, untuned
    from kvlab.studies._worker import worker_each
    if latent is not None and (kv_heads != 1 or not 0 < latent <= head_dim):
        raise ValueError(f"--latent {latent} is a part of the one head of K: it needs --kv-heads 1 (got {kv_heads}) "
                         f"and 1 … --head-dim {head_dim}; DeepSeek's is --kv-heads 1 --head-dim 576 --latent 512")
    shape = AttentionShape(q_heads, kv_heads, head_dim, latent, latent is not None, window)
    if batch < 1:
        raise ValueError(f"--batch {batch} must be at least 1")
    workload = Workload(shape, (q_len,) * batch, (kv_len,) * batch, shared_prefix)
    layout = _layout(variant, block_size, page_order, shared_prefix)
    one = trial(variant, workload, kv_format=kv_format, layout=layout, dtype=dtype, device=device, threads=threads,
                seed=seed, data=data)
    if not tune:
        (one,) = untuned(Comparison((one,))).trials
    _refuse_too_large(Comparison((one,)))
    named = _probes_named(also)
    job = Job(also=named)
    if trace is not None:
        from kvlab.record.export import made_folder
        job = Job(artifacts=made_folder(trace), also=(*named, "torch_profile"))
    (rows,) = worker_each(300)(job, [Comparison((one,))])
    if all(row["status"] == "skipped" for row in rows):
        raise ValueError(f"{one.variant.label} cannot compute this call: {rows[0]['error']}")
    if as_json:
        from kvlab.record.reading import complete
        _print_json([complete(row) for row in rows])
    else:
        from kvlab.show import print_readings
        print_readings(rows, one)
        if trace is not None and (trace / "traces" / f"{one.case_id}.json.gz").exists():
            print(f"\nNext: kvlab trace {trace / 'traces' / one.case_id}.json.gz (or open it in ui.perfetto.dev)")
    return _exit_code(rows)


def _layout(variant: str, block_size: int | None, page_order: str | None, shared_prefix: int):
    """The variant's own layout, changed as asked; a prefix that the batch shares is stored once."""
    from kvlab.attention import VariantRef
    from kvlab.kv.cache import Layout
    layout = VariantRef.of(variant).default_layout
    if block_size is not None:
        layout = Layout(block_size, page_order or "random")
    elif page_order is not None:
        if layout.block_size is None:
            raise ValueError(f"--page-order needs blocks, and {variant} has a contiguous cache: give --block-size too")
        layout = replace(layout, page_order=page_order)
    if layout.block_size and shared_prefix % layout.block_size:
        less = shared_prefix - shared_prefix % layout.block_size
        raise ValueError(f"--shared-prefix {shared_prefix} is no multiple of the block size {layout.block_size}; take "
                         f"{f'{less} or ' if less else ''}{less + layout.block_size}, or another --block-size")
    return replace(layout, share_prefix=shared_prefix > 0) if layout.block_size else layout


def _probes_named(also: list[str] | None) -> tuple[str, ...]:
    """The names, each once. Raises KeyError for one that no probe has."""
    from kvlab.probes import probes
    return tuple(dict.fromkeys(probes[name].name for name in also or ()))


def _refuse_too_large(comparison) -> None:
    """A single call that cannot fit is wrong use: said before a worker is started."""
    from kvlab.record.environment import free_memory
    needed, free = comparison.nbytes(1), free_memory()
    if needed > free and comparison.device == "cpu":
        raise ValueError(f"this call needs {needed:,} bytes ({display(needed, 'B')}, with the originals and the fp64 "
                         f"copies that judge it) and {free:,} ({display(free, 'B')}) are free; take "
                         "a smaller kv_len or batch, fewer KV heads, or a smaller format")


def _exit_code(rows) -> int:
    return 1 if any(row["status"] in ("failed", "oom") for row in rows) else 0


@app.command(cls=verb("kvlab run memory_wall --size small", "kvlab run kernels --device cuda --variants sdpa,paged",
                      "kvlab run memory_wall --resume RUN"))
def run(study: Annotated[str, typer.Argument(
                                             help="A name from `kvlab ls studies`.",
                                                  autocompletion=names("studies"))],
        size: Annotated[str | None, typer.Option(autocompletion=words("smoke", "small", "large"), help="smoke, small "
                                                 "(default) or large.")] = None,
        device: Annotated[str | None, typer.Option(autocompletion=words("cpu", "cuda"), help="cpu (default) or "
                                                   "cuda.")] = None,
        out: Annotated[str, typer.Option(help="Parent of <study>/<UTC>-<id>: a folder, or a URL such as "
                                         "s3://bucket/runs.")] = "profiles",
        resume: Annotated[str | None, typer.Option(help="A run (directory, id or URL) to complete.")] = None,
        variants: Annotated[str | None, typer.Option(autocompletion=names("variants"), help="Comma-separated names "
                                                     "of `kvlab ls variants`, or file.py:Class.")] = None,
        model: Annotated[str | None, typer.Option(autocompletion=names("models"), help="For studies of a model: a "
                                                  "name from `kvlab ls models`.")] = None,
        trace: Annotated[bool, typer.Option("--trace", help="Also trace each trial's operators, by torch's profiler "
                                            "in a pass of its own.")] = False,
        tune: Tune = True, also: Also = None,
        engine: Annotated[str | None, typer.Option(autocompletion=words("local", "ray", "slurm"), help="local "
                                                   "(default), ray or slurm: one case after another on a "
                                                   "cluster.")] = None,
        address: Annotated[str | None, typer.Option(help="Of a running Ray cluster, or auto (default: a Ray of this "
                                                    "machine alone); for slurm, sbatch's options, such as "
                                                    "partition=gpu,timeout_min=60,jobs=8.")] = None,
        lang: Annotated[str, typer.Option(autocompletion=words("en", "zh"), help="en, or zh for findings and figures "
                                          "in Chinese.")] = "en") -> int:
    """Run a study: measure its cases, print its findings, draw its figures.

    The last line is the run's directory.
    """
    from kvlab.lang import Text, checked
    from kvlab.record.store import find_run
    from kvlab.show import print_failures, print_findings
    from kvlab.studies._run import run as run_study
    from kvlab.studies._run import studies
    checked(lang)                                       # said before anything is measured
    chosen = None if variants is None else [name.strip() for name in variants.split(",") if name.strip()]
    if chosen == []:
        raise ValueError("--variants names none; give one or more of kvlab ls variants, with commas between")
    resumed = None if resume is None else find_run(resume, out)
    begun = []
    try:
        store = run_study(study, size=size, device=device, out=out, resume=resumed, variants=chosen, model=model,
                          also=(*_probes_named(also), *(("torch_profile",) if trace else ())), tune=tune,
                          engine=engine, address=address, begun=begun.append)
    except (KeyboardInterrupt, ValueError, OSError, RuntimeError):
        if begun:
            kept = len(begun[0].committed)
            print(f"\nkvlab: {kept:,} case{'s' * (kept != 1)} kept. Go on with: kvlab run {study} --resume "
                  f"{begun[0].place}{' --address …' if address else ''}", file=sys.stderr)
        raise
    table = store.table()
    print_findings(getattr(studies[study], "findings", lambda table: [])(table), lang)
    print_failures(table, lang)
    drawn = _draw_all(study, store.path, lang)
    store.share()                                        # the figures too
    report, figure = f"kvlab report {store.place}", f"kvlab figure {study} --run {store.place}"
    print("\n" + (Text(f"Next: {report}, or {figure}", f"下一步：{report}，或 {figure} --lang zh") if drawn else
                  Text(f"Next: {report}", f"下一步：{report}")).of(lang))
    print(store.place)
    return _exit_code(table[["status"]].to_dict("records"))


def _draw_all(study: str, path: Path, lang: str) -> bool:
    """The study's figures into the run, if it has any; one that the rows do not allow is said and left out."""
    from kvlab.figures import figures, save
    own = [name for name in figures if figures[name].STUDY == study]
    from kvlab.show import printable
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: print(f"kvlab: {printable(message)}", file=sys.stderr)
        for name in own:
            try:
                save(name, path, path / "figures", lang=lang)
            except Exception as error:                   # whatever it is: the run is stored, and its name must be said
                print(f"kvlab: no figure {name}: {printable(error)}", file=sys.stderr)
    return bool(own)


@app.command(cls=verb("kvlab report RUN", "kvlab report RUN --out report.html"))
def report(run: Annotated[str, typer.Argument(help="A run directory, id or URL.")],
           out: Annotated[Path | None, typer.Option(help="Default: report.html in the run, or <run id>.html here where "
                                                    "the run is at a URL or not yours to write to.")] = None) -> None:
    """Write one self-contained HTML page about a run."""
    from kvlab.record._places import is_url
    from kvlab.report import write_report
    print(write_report(run if is_url(run) else results(run), out))


@app.command(cls=verb("kvlab check sdpa", "kvlab check mine.py:Mine --device cuda"))
def check(variant: Annotated[str, typer.Argument(autocompletion=names("variants"), help="path/to/file.py:Class, or a "
                                                 "name from `kvlab ls variants`.")],
          device: Device = "cpu", as_json: Json = False) -> int:
    """Judge a variant against an fp64 oracle over shapes, lengths, formats and layouts."""
    from tqdm.auto import tqdm

    from kvlab.attention import VariantRef
    from kvlab.attention._matrix import cells
    from kvlab.studies._run import Job
    from kvlab.studies._worker import DIED, worker_each
    cases = list(cells(VariantRef.of(variant), device=device, dtypes=("fp32", "bf16")))
    answers = worker_each(60)(Job(probes=("kernel_error",)), [comparison for _, comparison in cases])
    found, deaths = [], 0
    for (about, comparison), rows in tqdm(zip(cases, answers), total=len(cases), unit="cell", disable=as_json):
        one, row = comparison.trials[0], rows[0]
        found.append(dict(name=about, kv_format=one.kv_format, block_size=one.layout.block_size,
                          page_order=one.layout.page_order, order=one.layout.order, status=row["status"],
                          kernel_error=row["value"], remark=row["error"] or row["note"]))
        deaths += DIED in row["error"]
        if deaths == 3:                                  # each death costs a new process; three are enough to know
            print("kvlab: the variant brought its process down three times; the other cells are left out",
                  file=sys.stderr)
            break
    counts = {status: sum(f["status"] == status for f in found) for status in ("ok", "skipped", "failed", "oom")}
    if as_json:
        _print_json(found)
    else:
        from kvlab.show import print_check
        print_check(found, counts)
    return 0 if counts["ok"] and not counts["failed"] and not counts["oom"] else 1


@app.command(cls=verb("kvlab compare sdpa naive",
                      "kvlab compare RUN_A RUN_B --metric latency_s --by variant,kv_len"))
def compare(a: Annotated[str, typer.Argument(help="A run (directory, id, study for its newest), a file of results, "
                                             "kvlab's or of aiperf, guidellm, vllm bench serve, or a variant.")],
            b: Annotated[str, typer.Argument(help="Of the same sort: what is compared with A.")],
            metric: Annotated[str | None, typer.Option(help="A name from `kvlab ls metrics`; default: latency_s, of "
                                                       "two files of load generators all both have.")] = None,
            run: Annotated[str | None, typer.Option(help="The run that both variants are of; default: the newest "
                                                    "that has them.")] = None,
            by: Annotated[str | None, typer.Option(help="Comma-separated columns that make a case; default: "
                                                   "all.")] = None,
            margin: Annotated[float, typer.Option(help="SAME: the whole interval is within this share of 1.")] = 0.05,
            as_json: Json = False) -> None:
    """Say case by case whether B is FASTER, SLOWER, the SAME or AMBIGUOUS against A."""
    from kvlab.comparing import as_json as plain
    from kvlab.comparing import compare as compare_sides
    from kvlab.comparing import default_metrics, print_comparison
    columns = None if by is None else [name.strip() for name in by.split(",") if name.strip()]
    found = [compare_sides(a, b, metric=name, run=run, by=columns, margin=margin)
             for name in ([metric] if metric else default_metrics(a, b))]
    if as_json:
        return _print_json(plain(found[0]) if len(found) == 1 else [plain(table) for table in found])
    for table in found:
        print_comparison(table, briefly=table is not found[-1])


@app.command(cls=verb("kvlab score smollm2-135m --text pydoc:execmodel --kv-format int8/token,int4/token/g32"))
def score(model: Annotated[str, typer.Argument(help="smollm2-135m, a .gguf file, a folder with config.json and "
                                               "safetensors, or an id in the local Hugging Face cache.")],
          text: Annotated[str, typer.Option(help="A name from `kvlab ls texts`, such as file:PATH.")],
          kv_format: Annotated[str, typer.Option(autocompletion=names("formats"), help="Comma-separated names from "
                                                 "`kvlab ls formats`.")] = "fp8_e4m3",
          window: Annotated[int, typer.Option(help="Tokens that are scored together, from an empty cache.")] = 512,
          count: Annotated[int, typer.Option(help="Windows, one behind the other.")] = 2,
          start: Annotated[int, typer.Option(help="First token of the first window.")] = 0,
          calibration: Annotated[str | None, typer.Option(help="Another text, whose first 256 tokens give static "
                                                          "scales.")] = None,
          margin: Annotated[float, typer.Option(help="Relative loss of perplexity that counts as none.")] = 0.001,
          as_json: Json = False) -> None:
    """Score a text under KV formats: KL to an fp32 cache, top-1 agreement, perplexity."""
    from tqdm.auto import tqdm

    from kvlab.accuracy.scoring import CALIBRATION, compare, is_static, score_each
    from kvlab.accuracy.texts import sha256
    from kvlab.accuracy.texts import text as text_of
    from kvlab.show import print_scores, printable
    names = list(dict.fromkeys(name.strip() for name in kv_format.split(",") if name.strip()))
    if not names:
        raise ValueError("--kv-format names no format; give one or more of kvlab ls formats, with commas between")
    if not 0 < margin < float("inf"):
        raise ValueError(f"--margin {margin:g} must be a number above 0, such as 0.001 for 0.1 %")
    scales = (calibration or CALIBRATION) if any(map(is_static, names)) else None
    if calibration and not scales:
        raise ValueError(f"--calibration {calibration}: none of {', '.join(names)} has static scales to calibrate; "
                         "leave it out")
    frames = score_each(model, text, names, window=window, count=count, start=start, calibration=scales or CALIBRATION)
    found = {}
    with tqdm(total=len(names), unit="format", disable=as_json) as bar:
        for name, frame in zip(names, frames):
            found[name] = compare(frame, margin=margin)
            bar.update()
    if as_json:
        return _print_json(dict(model=model, text=text, text_sha256=sha256(text_of(text)), window=window, count=count,
                                start=start, calibration=scales,
                                formats={name: asdict(quality) for name, quality in found.items()}))
    origin = f"; static scales from {scales}" if scales else ""
    print(printable(f"{model}, {text}: {count} × {window} tokens from token {start}, held against the same model with "
                    f"an fp32 cache{origin}"))
    print_scores(found)


@app.command(cls=verb("kvlab doctor", "kvlab doctor --markdown"))
def doctor(markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown to paste in a bug "
                                                  "report.")] = False,
           as_json: Json = False) -> None:
    """Say what this machine has for kvlab, what is wrong, and where metrics come from."""
    from kvlab.doctor import as_markdown, examine, plain, print_checks
    found = examine()
    if as_json:
        return _print_json(plain(found))
    if markdown:
        return print(as_markdown(found))
    print_checks(found)


@app.command("validate-gpu", cls=verb("kvlab validate-gpu --out gpu-check"))
def validate_gpu(out: Annotated[Path, typer.Option(help="Folder for findings, rows and recordings; made if it is not "
                                                   "there.")],
                 device: Annotated[str, typer.Option(help="cuda, or cuda:1 for another GPU.")] = "cuda") -> int:
    """Hold a GPU's counters against known traffic and each other, within 150 s."""
    from kvlab.show import print_list, printable
    from kvlab.validate import validate
    from kvlab.validate_answers import summary
    found = validate(out, device=device)
    if lines := summary(found.rows):
        print_list(lines)
    for verdict in found.verdicts:
        print(f"{verdict.question}: {printable(verdict)}")
    return _exit_code(found.rows)


@app.command(cls=verb("kvlab lab", "kvlab lab 00_first_look --port 8890"))
def lab(notebook: Annotated[str | None, typer.Argument(help="A notebook to open; default: the folder.")] = None,
        port: Annotated[int | None, typer.Option(help="Default: the first free one from 8888.")] = None,
        browser: Annotated[bool, typer.Option(help="Open a browser.")] = True) -> int:
    """Start JupyterLab on the notebooks with this environment, on this machine only."""
    from kvlab.lab import lab as prepared
    from kvlab.lab import start
    one = prepared(notebook, port=port, browser=browser)
    for sentence in one.said:
        print(f"kvlab: {sentence}", file=sys.stderr)
    return start(one)


@app.command(cls=verb("kvlab trace RUN", "kvlab trace trace.json.gz --top 30"))
def trace(file: Annotated[str, typer.Argument(help="A .json or .json.gz trace, or a run directory or id.")],
          top: Annotated[int, typer.Option(help="Operators to show.")] = 15, as_json: Json = False) -> None:
    """Summarise a Chrome trace: top operators, gaps, modelled bytes, kernels."""
    from kvlab.record.trace import read_trace
    from kvlab.record.trace_summary import summary
    from kvlab.show import print_trace
    if top < 1:
        raise ValueError(f"--top {top} must be at least 1")
    path = _trace_file(file)
    if path is None:
        return
    opened = read_trace(path)
    found = summary(opened)
    if as_json:
        return _print_json({"trace": str(path), "about": opened.about, **asdict(found), "bytes": found.bytes})
    print_trace(path, opened.about, found, top)


def _trace_file(text: str) -> Path | None:
    """The trace that is meant; of a run with several, all are listed and none is taken."""
    path = Path(text)
    if path.is_file() or text.endswith((".json", ".gz")):
        return path
    folder = path / "traces" if (path / "traces").is_dir() else results(text) / "traces"
    found = sorted(folder.glob("*.json.gz"))
    if not found:
        raise ValueError(f"{text} has no traces; make them with kvlab run STUDY --trace")
    if len(found) > 1:
        from kvlab.show import print_traces
        return print_traces(found)
    return found[0]


_verbs = Registry("verb", "kvlab.verbs")            # each file is a verb, and imports nothing heavy until it is called
for _name in _verbs:
    app.command(_name, cls=_verbs[_name].HELP)(_verbs[_name].command)
