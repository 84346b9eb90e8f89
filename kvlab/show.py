"""What the commands print for people: tables and lines. Nothing is computed here that --json does not give too."""
from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from kvlab.units import display


def print_size(spec, found) -> None:
    """A sized cache line by line, with what the numbers are."""
    from kvlab.kv.sizing import crossover_tokens, size
    print(f"{found.model}: {found.batch_size} × {found.kv_len:,} tokens in {found.kv_format}, {spec.attention_type}")

    def line(what, value, note=""):
        shown = "unknown" if value is None else f"{value:>20,} B = {display(value, 'B', 4)}"
        print(f"  {what:<24} {shown} {note}".rstrip())
    line("KV cache", found.kv_bytes)
    line("  of it the newest token", found.kv_bytes_per_token)
    if found.tp > 1:
        line(f"  on each of {found.tp} ranks", found.kv_bytes_per_rank)
    if found.state_bytes:
        line("constant state", found.state_bytes, "(beside the KV cache)")
    line("weights (16 bit)", found.weight_bytes)
    exact = size(spec, found.kv_len, found.batch_size).kv_bytes
    line("the article's formula", found.article_formula_bytes,
         f"({found.article_formula_bytes / exact:.2f} × the KV cache in 16 bit)" if exact else "")
    crossover = crossover_tokens(spec, found.kv_format)
    print("  whether KV outgrows the weights is unknown: so is the parameter count" if found.weight_bytes is None
          else "  KV never outgrows the weights: the cache stops growing before" if crossover is None
          else f"  KV outgrows the weights beyond {crossover:,} cached tokens, over all sequences")
    print(f"  {found.kind}: {found.note}")


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
        table.add_row(*[cell.replace("[", "\\[") for cell in cells])
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def print_readings(rows, one) -> None:
    """The wide row, standing upright: metric, value, interval, kind, and what there is to say about it."""
    w, size = one.workload, one.layout.block_size
    blocks = "contiguous" if size is None else f"in blocks of {size}, {one.layout.page_order}"
    print(f"{one.variant.label}: {w.phase}, batch {w.batch_size}, q_len {max(w.q_lens)}, kv_len {max(w.kv_lens)}, "
          f"{w.shape.num_q_heads}/{w.shape.num_kv_heads} heads × {w.shape.head_dim}, K/V {one.kv_format} "
          f"{blocks}, "
          f"{one.dtype} on {one.device}; {next((r['hardware'] for r in rows if r['hardware']), '')}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("metric", "value", "interval", "kind", "remark"):
        table.add_column(column, overflow="fold")
    lacking: dict[tuple, list[str]] = {}                 # why there is no number -> of which metrics
    for row in rows:
        if row["value"] is None:
            lacking.setdefault((row["status"], row["error"] or row["note"]), []).append(row["metric"])
    for row in sorted(rows, key=lambda row: (row["metric"] != "latency_s", row["scope"] == "comparison")):
        names = [row["metric"]]
        if row["value"] is None:                         # the reason of several is said once
            names = lacking.pop((row["status"], row["error"] or row["note"]), [])
            if not names:
                continue
        low, high = (display(row[end], row["unit"]) for end in ("low", "high"))
        interval = "" if row["low"] is None else f"{low} … {high}"
        clock = row["method"] if row["method"].startswith("timer:") else ""
        remark = row["error"] or "; ".join(filter(None, (clock, row["cache_state"], row["note"])))
        kind = row["kind"] if row["status"] == "ok" else row["status"]
        shown = ", ".join(names) if len(names) < 5 else f"{names[0]} and {len(names) - 1} more"
        table.add_row(shown, display(row["value"], row["unit"]), interval, kind,
                      remark.replace("[", "\\["))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_check(found, counts) -> None:
    for status in ("skipped", "failed", "oom"):
        reasons: dict[str, list[dict]] = {}
        for f in found:
            if f["status"] == status:
                reasons.setdefault(f["remark"] if status == "skipped" else f"{f['name']}: {f['remark']}", []).append(f)
        for reason, cells in reasons.items():
            print(f"{status:>8} {len(cells):>4}  {reason}")
    worst = max((f["kernel_error"] for f in found if f["kernel_error"] is not None), default=None)
    print(f"{counts['ok']} cells agree with the oracle (largest kernel_error {display(worst, 'ratio')}), "
          f"{counts['failed'] + counts['oom']} fail, {counts['skipped']} refused by why_not")
