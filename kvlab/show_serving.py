"""What the serving commands print for people, in the manner of kvlab/show.py: nothing that --json does not give too."""
from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlab.show import printable
from kvlab.units import GiB, display


def table_of(columns: dict[str, str], rows) -> None:
    """A table without lines. columns: title -> "left" or "right"; cells are text and shown escaped."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, side in columns.items():
        table.add_column(title, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*[Text(printable(cell)) for cell in row])
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _gib(value: int) -> str:
    return f"{value / GiB:.2f}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _between(low, high) -> str:
    return "" if low == high else f"{low} … {high}"


def print_plan(p) -> None:
    """A Plan: the budget term by term, what the pool holds, formats, the article's formula, notes."""
    if not p.starts:
        print(f"DOES NOT START: not one request of {p.max_len:,} tokens fits (the note below says why)")
    print(printable(f"{p.model} on {p.gpus} × {p.gpu}: {p.replicas} replica{'s' * (p.replicas != 1)} of tp {p.tp}; "
                    f"vLLM, util {p.util:g}, at most {p.max_num_seqs:,} sequences, {p.max_batched_tokens:,} tokens a "
                    "step"))
    table_of({"one GPU": "left", "GiB": "right", "between": "right", "kind": "left", "how": "left"},
             [(t.name, _gib(t.value), _between(_gib(t.low), _gib(t.high)), t.kind, t.how) for t in (*p.terms, p.pool)])
    print(printable(
        f"one replica's cache in {p.kv_format}: {p.blocks:,} blocks of {display(p.block_bytes, 'B')} ({p.block_size:,} "
        f"tokens each) = {p.tokens:,} tokens as vLLM logs them, {p.concurrency:.2f} × {p.max_len:,} tokens"))
    shared = (f", {p.shared_blocks:,} of them stored once for all that are live (share {p.prefix_share:g})"
              if p.prefix_share else "")
    print(f"one request of {p.max_len:,} tokens: {p.blocks_per_request:,} blocks{shared}")
    whole = f" ({_between(f'{p.least:,}', f'{p.most:,}')})" if p.least != p.most else ""
    binds = (f"the pool binds, not max_num_seqs {p.max_num_seqs:,}" if p.binds == "pool"
             else f"max_num_seqs {p.max_num_seqs:,} binds, not the pool")
    print(f"at once: a replica's pool holds {p.requests:,}{whole} of them, {p.live:,} live; {binds}; in all "
          f"{p.live_total:,} live and {p.tokens_total:,} tokens ({p.pool.kind})")
    if p.lengths:
        table_of({"at the trace's lengths": "left", "tokens": "right", "blocks": "right",
                  "in a replica's pool": "right", "live": "right"},
                 [(row.name, f"{row.tokens:,}", f"{row.blocks:,.1f}", f"{row.requests:,}",
                   f"{min(row.requests, p.max_num_seqs):,}") for row in p.lengths])
    table_of({"KV format": "left", f"× {p.max_len:,} tokens": "right", "tokens": "right", f"on {p.gpu}": "left",
              "multiplied as": "left"},
             [(f.kv_format, _count(f.requests), _count(f.tokens), f.word, 
               f.why if f.requests is None or not f.product else f.product) for f in p.formats])
    if p.article and not p.article.low / 1.1 <= p.concurrency <= p.article.high * 1.1:
        a = p.article
        print(f"the common formula, (VRAM − weights) ÷ (KV of one request × 1.3 … 1.5), would give {a.low:,.1f} … "
              f"{a.high:,.1f} requests per replica, not {p.concurrency:,.1f}")
    for note in p.notes:
        print(printable(f"note: {note}"))


def print_gpu_options(model: str, need: int, settings, counts, found) -> None:
    """The GPUs that hold a load, fewest first."""
    length = (f"{settings.max_len:,} tokens" if settings.max_len else
              "the model's whole context (--max-len sets fewer tokens)")
    of = f"{counts[0]:,} GPU{'s' * (counts[0] > 1)} of a kind" if len(counts) == 1 else (
        f"fewest of {', '.join(map(str, counts))} GPUs")
    print(printable(f"{model}: {need:,} requests of {length} at once, in {settings.kv_format}; {of}"))
    if not found:
        return print(f"no GPU of the catalogue holds that, {max(counts):,} of them together neither")
    table_of({"GPU": "left", "GPUs": "right", "replicas × tp": "right", "VRAM GiB": "right", "at once": "right",
              "at least": "right", "binds": "left"},
             [(o.gpu, str(o.gpus), f"{o.replicas} × {o.tp}", f"{o.memory_gib:,.0f}", f"{o.live:,}", f"{o.least:,}",
               o.binds) for o in found])
    for note in dict.fromkeys(note for o in found for note in o.notes):
        print(printable(f"note: {note}"))
    print("modelled: vLLM's budget; at least: with every term of it at its worst. Where that is less than what was "
          "asked for, it fits probably and not surely")


def _shown(value) -> str:
    return "–" if value is None else f"{value:,}" if type(value) is int else (
        f"{value:,.6g}" if isinstance(value, float) else str(value))


def print_log_rows(rows, counts: dict[str, int]) -> None:
    """Start-up logs against the block model, row by row, with the four counts."""
    sides = dict(id="right", verdict="left", what="left", logged="right", predicted="right", note="left")
    table_of(sides, [tuple(_shown(row[name]) for name in sides) for row in rows])
    print(", ".join(f"{count} {word}" for word, count in counts.items()))


def print_startup_log(row, judged) -> None:
    """What a start-up log says, each with its line, what its words mean, and what the block model says of it."""
    lines = row["lines"]
    facts = [name for name in row if name not in ("id", "lines", "meaning")]
    table_of({"": "left", "said": "left", "line": "right", "text": "left"},
             [(name, row[name], *(_shown(part)[:100] for part in lines.get(name, ("", "")))) for name in facts])
    if row["meaning"]:
        print(printable(f"kv_tokens means {row['meaning']}"))
    said = f": {judged['what']} logged {_shown(judged['logged'])}, predicted {_shown(judged['predicted'])}"
    print(printable(f"{judged['verdict']}{said if judged['what'] else ''}; {judged['note']}".rstrip("; ")))
