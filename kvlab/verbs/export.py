"""kvlab export: a run's readings, or its operator traces, for other programs."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlab.verbs._complete import words
from kvlab.verbs._help import verb
from kvlab.verbs._options import results

HELP = verb("kvlab export RUN --format csv --wide", "kvlab export RUN --format latex --anonymous --out table.tex")


def command(run: Annotated[str, typer.Argument(help="A run directory, id or file of results.")],
            format: Annotated[str, typer.Option(autocompletion=words("csv", "parquet", "latex", "chrome-trace"),
                                                help="csv, parquet, latex or chrome-trace.")],
            out: Annotated[Path | None, typer.Option(help="File, or folder that is there; default: here.")] = None,
            wide: Annotated[bool, typer.Option("--wide", help="One line per case instead of one per "
                                               "reading.")] = False,
            anonymous: Annotated[bool, typer.Option("--anonymous", help="For blind review: without run ids, paths, "
                                                    "names, commits, serial numbers; says what it dropped.")] = False
            ) -> None:
    """Write a run's readings, or its operator traces, for other programs."""
    from kvlab.record.anonymous import Anonymous
    from kvlab.record.export import export as export_run
    cut = Anonymous() if anonymous else None
    path = export_run(results(run), format, out, wide=wide, anonymous=cut)
    if cut:
        print(f"kvlab: {cut.sentence}", file=sys.stderr)
    print(path)
