"""What the commands print for people: tables and lines. Nothing is computed here that --json does not give too."""
from __future__ import annotations

import re
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlab.units import display

# C0, DEL, C1; separators of lines and paragraphs; what turns the direction of writing; halves of surrogate pairs
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

SOUGHT = ("sm_utilization", "hbm_bytes")        # what most people look for: named where many metrics have no number


def printable(text: object) -> str:
    """Text of a file or an error as a terminal may show it: control characters as escapes such as \\x1b."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def print_size(spec, found) -> None:
    """A sized cache line by line, with what the numbers are. What comes from a model's file is shown escaped."""
    from kvlab.kv.sizing import crossover_tokens, size

    def say(text):
        print(printable(text))

    def line(what, value, note=""):
        shown = "unknown" if value is None else f"{value:>20,} B = {display(value, 'B', 4)}"
        say(f"  {what:<24} {shown} {f'({note})' if note else ''}".rstrip())
    say(f"{found.model}: {found.batch_size} × {found.kv_len:,} tokens in {found.kv_format}, {spec.attention_type}")
    line("KV cache", found.kv_bytes)
    line("  growth per token", found.kv_bytes_per_token, found.growth_note)
    if found.tp > 1:
        line(f"  on each of {found.tp} ranks", found.kv_bytes_per_rank)
    line("in an engine's blocks", found.engine_bytes, found.engine_note)
    if found.state_bytes:
        line("constant state", found.state_bytes, "beside the KV cache")
    line(f"weights ({found.weights_are})", found.weight_bytes)
    exact = size(spec, found.kv_len, found.batch_size).kv_bytes
    line("the article's formula", found.article_formula_bytes,
         f"{found.article_formula_bytes / exact:.2f} × the KV cache in 16 bit" if exact else "")
    crossover = crossover_tokens(spec, found.kv_format)
    say("  whether KV outgrows the weights is unknown: so is the parameter count" if found.weight_bytes is None
        else "  KV never outgrows the weights: the cache stops growing before" if crossover is None
        else f"  KV outgrows the weights beyond {crossover:,} cached tokens, over all sequences")
    for assumption in found.assumed:
        say(f"  assumed: {assumption}")
    say(f"  {found.kind}: {found.note}")


def print_list(rows) -> None:
    """Rows of one kind as a table; columns that say nothing are left out, sources are for --json."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = [c for c in rows[0] if c != "source" and any(row[c] not in ("", None) for row in rows)]
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = ["" if row[c] is None else f"{row[c]:,}" if type(row[c]) is int
                 else f"{row[c]:.4g}" if type(row[c]) is float
                 else ", ".join(row[c]) if type(row[c]) is list else str(row[c]) for c in columns]
        table.add_row(*[Text(printable(cell)) for cell in cells])
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def print_readings(rows, one) -> None:
    """The wide row, standing upright: metric, value, interval, kind, and what there is to say about it."""
    w, size = one.workload, one.layout.block_size
    blocks = "contiguous" if size is None else f"in blocks of {size}, {one.layout.page_order}"
    s, path = w.shape, next((r["format_path"] for r in rows if r.get("format_path")), "")
    more = [f"V the first {s.v_dim} channels of K" if s.v_in_k else "", f"window {s.window}" if s.window else "",
            f"shared prefix {w.shared_prefix}" + ("" if one.layout.share_prefix else " (stored once per sequence)")
            if w.shared_prefix else ""]
    print(printable(
          f"{one.variant.label}: {w.phase}, batch {w.batch_size}, q_len {max(w.q_lens)}, "
          f"kv_len {max(w.kv_lens)}, {s.num_q_heads}/{s.num_kv_heads} heads × {s.head_dim}, "
          f"{''.join(f'{words}, ' for words in more if words)}K/V {one.kv_format} {blocks}{path and f', {path}'}, "
          f"{one.dtype} on {one.device}, {one.threads} thread{'s' * (one.threads > 1)}; "
          f"{next((r['hardware'] for r in rows if r['hardware']), '')}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("metric", "value", "interval", "kind", "remark"):
        table.add_column(column, overflow="fold")
    lacking: dict[tuple, list[dict]] = {}                # why there is no number -> the rows that have none
    sources: dict[str, set[str]] = {}                    # of each metric: where it has several, they are named
    for row in rows:
        sources.setdefault(row["metric"], set()).add(row["source"])
        if row["value"] is None:
            lacking.setdefault((row["status"], row["error"] or row["note"]), []).append(row)
    said: set[str] = set()
    for row in sorted(rows, key=lambda row: (row["metric"] != "latency_s", row["scope"] == "comparison")):
        of = [row]
        if row["value"] is None:                         # the reason of several is said once
            of = lacking.pop((row["status"], row["error"] or row["note"]), [])
            if not of:
                continue
        low, high = (display(row[end], row["unit"]) for end in ("low", "high"))
        interval = "" if row["low"] is None else f"{low} … {high}"
        clock = row["method"] if row["method"].startswith("timer:") else ""
        remark = row["error"] or "; ".join(filter(None, (clock, row["cache_state"], row["note"])))
        if row["value"] is not None and len(remark) > 100:         # a counter's note of all its numbers alike
            remark, said = "as above" if remark in said else remark, said | {remark}
        if any(len(sources[one["metric"]]) > 1 for one in of) or len(of) > 4:
            remark = f"{', '.join(dict.fromkeys(one['source'] for one in of))}: {remark}"
        kind = row["kind"] if row["status"] == "ok" else row["status"]
        names = list(dict.fromkeys(one["metric"] for one in of))
        first = [*(name for name in SOUGHT if name in names), *(name for name in names if name not in SOUGHT)]
        shown = ", ".join(names) if len(names) < 5 else f"{', '.join(first[:3])} and {len(names) - 3} more"
        table.add_row(*(Text(printable(cell)) for cell in (shown, display(row["value"], row["unit"]), interval, kind,
                                                           remark)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_scores(found) -> None:
    """Per format: KL, top-1 agreement, change of perplexity, and what the equivalence test makes of it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    margin = next(iter(found.values())).margin if found else 0.0
    said = {"below": f"change below {100 * margin:g} %", "above": f"loss above {100 * margin:g} %",
            "gain": f"gain above {100 * margin:g} %"}
    for column in ("format", "KL (nat)", "top-1 agreement", "perplexity", "change", "equivalence test"):
        table.add_column(column, overflow="fold")
    for name, q in found.items():
        verdict = said.get(q.verdict) or (f"inconclusive: ±{50 * margin:g} % would take {q.n_needed:,} tokens, here "
                                          f"{q.loss.n:,}")
        table.add_row(name, f"{q.kl.value:.2g} [{q.kl.low:.2g}, {q.kl.high:.2g}]",
                      f"{q.top1_agreement.value:.3f} [{q.top1_agreement.low:.3f}, {q.top1_agreement.high:.3f}]",
                      f"{q.perplexity.value:.2f}", f"{100 * q.loss.value:+.2f} % [{100 * q.loss.low:+.2f}, "
                      f"{100 * q.loss.high:+.2f}]", verdict)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print("measured; intervals 95 %, of the change 90 % (both ends of the equivalence test at 5 %), by paired "
          "moving-block bootstrap")


def print_check(found, counts) -> None:
    for status in ("skipped", "failed", "oom"):
        reasons: dict[str, list[dict]] = {}
        for f in found:
            if f["status"] == status:
                reasons.setdefault(f["remark"] if status == "skipped" else f"{f['name']}: {f['remark']}", []).append(f)
        for reason, cells in reasons.items():
            print(f"{status:>8} {len(cells):>4}  {printable(reason)}")
    worst = max((f["kernel_error"] for f in found if f["kernel_error"] is not None), default=None)
    print(f"{counts['ok']} cells agree with the oracle (largest kernel_error {display(worst, 'ratio')}), "
          f"{counts['failed'] + counts['oom']} fail, {counts['skipped']} refused by why_not")


LANES = 6                       # threads and streams of a trace that are shown


def print_trace(path, about, found, top: int) -> None:
    """A trace's summary: what it is of, operators by their own time, where none ran, bytes, kernels."""
    from kvlab.record.simulated_trace import Simulated
    if isinstance(found, Simulated):
        return print_simulated_trace(path, found)
    of = "whole trace" if not found.calls else f"{found.calls} call{'s' if found.calls > 1 else ''}"
    print(f"{printable(path)}: {_text(about.get('variant')) or 'a trace'}, {of}, {display(found.seconds, 's')} under "
          "the profiler")
    by_kernel = found.kernel_s > 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("operator", "calls", "own time", "share", "with what is inside", "kernels", "bytes (modelled)"):
        if column != "kernels" or by_kernel:
            table.add_column(column, justify="left" if column == "operator" else "right", overflow="fold")
    for row in found.operators[:top]:
        moved = display(row["bytes"], "B") + (" + outputs" if row["bytes_of"] == "inputs" else "")
        kernels = [display(row["kernel_s"], "s")] if by_kernel else []
        table.add_row(Text(printable(row["name"])), f"{row['calls']:,}", display(row["self_s"], "s"),
                      f"{100 * row['share']:.1f} %", display(row["total_s"], "s"), *kernels,
                      moved if row["bytes_of"] else "")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if len(found.operators) > top:
        rest = found.operators[top:]
        print(f"and {len(rest)} operators more, {display(sum(row['self_s'] for row in rest), 's')} together")
    for lane in sorted(found.lanes, key=lambda lane: -lane["busy_s"])[:LANES]:
        print(f"{lane['kind']} {printable(lane['lane'])}: busy {display(lane['busy_s'], 's')}, no "
              f"{'kernel' if lane['kind'] == 'stream' else 'operator'} for {display(lane['gap_s'], 's')} "
              f"({100 * lane['gap_share']:.1f} %); the largest gap, {display(lane['largest_gap_s'], 's')}, is "
              f"{printable(lane['largest_gap'])}")
    if len(found.lanes) > LANES:
        print(f"and {len(found.lanes) - LANES} threads or streams more, less busy")
    for row in found.kernels[:top]:
        print(f"kernel of {printable(row['operator'])}: {row['count']:,} × {printable(row['kernel'][:80])}, "
              f"{display(row['total_s'], 's')}")
    if found.bytes is None:
        print("modelled bytes: unknown, the trace holds no shapes (profile with record_shapes=True)")
    else:
        per_call = f", {display(found.bytes / found.calls, 'B')} per call" if found.calls else ""
        print(f"modelled bytes: {display(found.bytes, 'B')}{per_call} (shapes of inputs and known outputs; views cost "
              "nothing; nothing was counted on a bus)")
        unknown = [row for row in found.operators if not row["bytes_of"] and row["share"] > 0.01]
        if unknown:
            print("  without bytes of their own, over 1 % of the time: "
                  + ", ".join(printable(row["name"]) for row in unknown[:top]))
    for name, why in found.not_counted.items():
        print(f"  not counted: {printable(name)}: {why}")
    for problem in found.problems:
        print(f"! {printable(problem)}", file=sys.stderr)


def print_simulated_trace(path, found) -> None:
    """A simulated engine's trace: of each replica its steps by kind, and what its requests did meanwhile."""
    count = len(found.replicas)
    print(f"{printable(path)}: {count} simulated replica{'s' * (count != 1)}; seconds are of the simulated clock, "
          "nothing was measured")
    for replica in found.replicas[:LANES]:
        busy = f", {display(replica['busy_s'], 's')} of them in steps" if replica["steps"] else ""
        print(f"replica {printable(replica['replica'])}: {display(replica['simulated_s'], 's')} simulated{busy}")
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "what", "count", "mean", "total"):
            table.add_column(column, justify="right" if column in ("count", "mean", "total") else "left")
        for of, rows in (("step", replica["steps"]), ("request", replica["spans"])):
            for row in rows:
                table.add_row(of, Text(printable(row["what"])), f"{row['count']:,}", display(row["mean_s"], "s"),
                              display(row["total_s"], "s"))
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    if count > LANES:
        print(f"and {count - LANES} replicas more; --json has all")
    print("spans of requests run at the same time: their totals add up to more than the simulated time")
    for problem in found.problems:
        print(f"! {printable(problem)}", file=sys.stderr)


def print_traces(paths) -> None:
    """The traces of a run with what each is of."""
    from kvlab.record.trace import load
    print(f"{len(paths)} traces; name one:")
    for path in paths:
        about = _dict(load(path)[0].get("kvlab"))
        trial = _dict(about.get("trial"))
        kv_lens = _dict(trial.get("workload")).get("kv_lens")
        lens = kv_lens if isinstance(kv_lens, list) and kv_lens and all(type(n) is int for n in kv_lens) else None
        q_lens, shape = _dict(trial.get("workload")).get("q_lens"), _dict(_dict(trial.get("workload")).get("shape"))
        heads = [shape.get(name) for name in ("num_q_heads", "num_kv_heads")]
        prefill = isinstance(q_lens, list) and any(n != 1 for n in q_lens)
        told = [_text(about.get("variant")), _text(trial.get("kv_format")),
                "prefill" if prefill else "decode", f"batch {len(lens)}, kv_len {max(lens):,}" if lens else "",
                f"{heads[0]}/{heads[1]} heads" if all(type(n) is int for n in heads) else "",
                f"replica {trial['replica']}" if type(trial.get("replica")) is int and trial["replica"] else ""]
        print(f"  kvlab trace {printable(path)}   {', '.join(filter(None, told))}")


def _dict(value) -> dict:
    return value if isinstance(value, dict) else {}


def _text(value) -> str:
    """Text as it may be shown; what is no text (a trace may say anything of itself) is none."""
    return printable(value) if isinstance(value, str) else ""


def print_findings(found, lang: str = "en") -> None:
    """One mark per finding; what else was found of the same kind (name before the colon) stands below it."""
    from kvlab.lang import translated
    said = None
    for finding in found:
        kind = finding.name.partition(":")[0]
        print("  " if kind == said else "- ", printable(translated(finding.sentence, lang)), sep="")
        said = kind


def print_failures(table, lang: str = "en") -> None:
    """Each variant that failed, with its first error, on stderr."""
    from kvlab.lang import translated
    bad = table[table["status"].isin(["failed", "oom"])]
    for variant, rows in bad.groupby("variant", sort=False):
        cases = rows["case_id"].nunique()
        said = f"{variant or 'case'}: {rows['error'].iloc[0]} ({cases} case{'s' if cases > 1 else ''})"
        print(f"! {printable(translated(said, lang))}", file=sys.stderr)
