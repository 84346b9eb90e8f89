"""kvlab query: SQL over the readings of many runs."""
from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.verbs._help import verb

if TYPE_CHECKING:
    import pyarrow

EXAMPLES = ("SELECT study, metric, count(*) AS n FROM readings GROUP BY ALL ORDER BY n DESC",
            "SELECT variant, kv_len, median(value) AS s FROM readings WHERE metric = 'latency_s' AND kind = 'measured' "
            "GROUP BY ALL ORDER BY kv_len, s",
            "SELECT cpu, metric, min(value) AS low, max(value) AS high, count(DISTINCT run_id) AS n FROM readings JOIN "
            "runs USING (run_id) WHERE unit = 'B/s' AND kind = 'measured' GROUP BY ALL")
HELP = verb("kvlab query",
            'kvlab query "SELECT study, metric, count(*) AS n FROM readings GROUP BY ALL" reference',
            'kvlab query "SELECT * FROM runs ORDER BY created_utc DESC LIMIT 5" profiles --json')
LINES = 50                                                  # of a result that the table shows
WIDE = 12                                                   # columns; with more, a line stands upright
UPRIGHT = 3                                                 # lines of so wide a result that are shown
LONG = 60                                                   # letters of a cell


def command(sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT over the tables readings and runs, in "
                                               "DuckDB's SQL; without it their columns are listed.")] = "",
            stores: Annotated[list[str] | None, typer.Argument(
                metavar="STORE", help="Runs (directories, ids), folders of runs, .parquet, .csv or .jsonl files, "
                "patterns, or the word reference for the runs that ship with kvlab; default: profiles.")] = None,
            csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table, all of it.")] = False,
            as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table, all of it.")] = False,
            out: Annotated[Path | None, typer.Option(help="Write all of it to a .parquet or .csv file.")] = None,
            memory: Annotated[str, typer.Option(help="What may be held in memory at once, such as 512MiB or 4GiB; "
                                                "beyond it a temporary folder is used.")] = "1GiB") -> int:
    """Ask the readings of many runs by SQL."""
    from kvlab.record.query import opened
    from kvlab.show import printable
    if csv + as_json + (out is not None) > 1:
        raise ValueError("--csv, --json and --out are three ways to give one result; take one of them")
    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise ValueError(f"--out {out} must end in .parquet or .csv")
    if not sql.strip():
        _print_help()
        return 0
    if sql == "reference" or os.path.exists(sql):
        raise ValueError(f"{sql} is what to ask, and the SQL comes before it: kvlab query \"SELECT …\" {sql}")
    with opened(stores or ("profiles",), memory) as store:
        reader = store.select(sql)
        if out is not None:
            rows = _write(reader, out)
            print(f"{out}: {rows:,} line{'s' * (rows != 1)}")
        elif csv:
            with tempfile.TemporaryDirectory() as folder:
                _write(reader, Path(folder) / "result.csv")
                sys.stdout.flush()
                with open(Path(folder) / "result.csv", "rb") as file:
                    shutil.copyfileobj(file, sys.stdout.buffer)
        elif as_json:
            _print_json(reader)
        else:
            _print_table(reader)
        for said in (*store.problems, *(one.why for one in store.bad)):
            print(f"kvlab: {printable(said)}", file=sys.stderr)
        if store.bad:
            print(f"kvlab: the result is without the {len(store.bad)} named above", file=sys.stderr)
    return 1 if store.bad else 0


def _print_help() -> None:
    from rich.console import Console
    from rich.table import Table

    from kvlab.record.query import READINGS, RUNS
    for name, columns, about in (("readings", READINGS, "one line per reading, of all runs together"),
                                 ("runs", RUNS, "one line per run, to be joined by run_id")):
        print(f"{name}: {about}")
        table = Table(box=None, pad_edge=False, show_header=False)
        cells = [f"{column} {kind}" for column, kind in columns.items()]
        for i in range(0, len(cells), 4):
            table.add_row("", *cells[i:i + 4])
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    print('absent text is \'\', an absent number NULL; the column case is written "case"\n\nExamples:')
    for sql in EXAMPLES:
        print(f'  kvlab query "{sql}"')


def _write(reader: pyarrow.RecordBatchReader, out: Path) -> int:
    """The whole result as a file; how many lines it has."""
    from kvlab.record.export import atomic_file, write_csv
    from kvlab.record.seal import sealed_parquet
    rows = 0

    def counted():
        nonlocal rows
        for batch in itertools.chain([reader.schema.empty_table()], reader):
            rows += batch.num_rows
            yield batch
    if out.suffix == ".csv":
        write_csv((batch.to_pandas() for batch in counted()), out)
    else:
        with atomic_file(out) as file, sealed_parquet(file, reader.schema) as writer:
            for batch in counted():
                writer.write(batch)
    return rows


def _print_json(reader: pyarrow.RecordBatchReader) -> None:
    """A list of objects, one a line; what JSON has no word for (times, infinities) is text."""
    before = "["
    for batch in reader:
        for row in batch.to_pylist():
            print(before, json.dumps({name: _json(value) for name, value in row.items()}, ensure_ascii=False,
                                     default=str), sep="\n", end="")
            before = ","
    print("\n]" if before == "," else "[]")


def _json(value):
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.isoformat() if isinstance(value, date) else value


def _print_table(reader: pyarrow.RecordBatchReader) -> None:
    """The first lines as a table, and how many there are beside them; a wide result stands upright."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvlab.show import printable
    names, upright = reader.schema.names, len(reader.schema.names) > WIDE
    most, shown, rows = UPRIGHT if upright else LINES, [], 0
    for batch in reader:
        shown += batch.slice(0, most - len(shown)).to_pylist() if len(shown) < most else []
        rows += batch.num_rows
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=not upright)
    numbers = [not upright and str(kind) in ("int64", "double", "int32") for kind in reader.schema.types]
    if upright:
        for name in names:
            if any(row[name] not in (None, "") for row in shown):
                table.add_row(Text(printable(name), style="bold"), *(_cell(row[name]) for row in shown))
    else:
        for name, number in zip(names, numbers):
            table.add_column(Text(printable(name)), justify="right" if number else "left", overflow="fold")
        for row in shown:
            table.add_row(*(_cell(row[name]) for name in names))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if rows > len(shown):
        print(f"{rows - len(shown):,} more line{'s' * (rows - len(shown) != 1)}: --csv, --json or --out FILE gives all")
    elif not rows:
        print("no line")


def _cell(value):
    from rich.text import Text

    from kvlab.show import printable
    text = "–" if value is None else f"{value:,}" if type(value) is int else f"{value:.6g}" if type(value) is float \
        else printable(value)
    return Text(text if len(text) <= LONG else text[:LONG - 1] + "…")
